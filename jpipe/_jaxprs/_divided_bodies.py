"""Loops and branches on arrays in pieces: one for each piece.

    y = cond(p, f, g, x)         y0 = cond(p, f, g, x0)         y1 = cond(p, f, g, x1)
    y = fori_loop(0, 5, f, x)    y0 = fori_loop(0, 5, f, x0)    y1 = ...

The bodies are rewritten for arrays in pieces. Then they have one result for each piece,
and what each needs is read off. A loop needs what its next iteration needs, too:

    needs(result) = the inputs of the body that it follows from,
                    and needs(the results that these are after an iteration)

If each result needs one piece of operands at most, there is one equation for each. What
is whole, such as a counter, is computed by each that needs it. Otherwise the equation
stays one: several pieces would come to one device.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from . import _jaxpr, _scans
from ._pieces import DIVIDED_BODIES, Pieces, first_stacked, inlined_bodies

# index of an input or result -> its pieces, of those that are in pieces
PiecesOf = Mapping[int, Pieces]


@dataclass(frozen=True)
class DividedBodies:
    """An equation with bodies, as one for each piece.

    Attributes:
      operand_pieces: index of an operand -> the pieces in which it is read.
      result_pieces: index of a result -> the pieces in which it comes.
      bind: ``operands -> results``. Each in pieces is as many as it has pieces.
    """

    operand_pieces: PiecesOf
    result_pieces: PiecesOf
    bind: Callable[[Sequence[Any]], list[Any]]


def divide_bodies(
    eqn: core.JaxprEqn, operand_pieces: PiecesOf, run_in_pieces: Callable[..., Any]
) -> DividedBodies | None:
    """Divides a loop or a branch into one for each piece.

    Args:
      eqn: the equation.
      operand_pieces: index of an operand -> its pieces.
      run_in_pieces: rewrites a body: see `_piecewise`, which imports this file.

    Returns:
      The equations; ``None`` if it is another equation, or cannot be divided.
    """
    if eqn.primitive.name not in DIVIDED_BODIES:
        return None
    bodies = inlined_bodies(eqn)
    num_leading = len(eqn.invars) - len(bodies[0].in_avals)
    carry = _jaxpr.carry_slice(eqn)
    num_carry = carry.stop - (carry.start or 0)
    # The slices that a scan goes along, or gives, have one axis less in its body.
    first_xs, first_ys = first_stacked(eqn)
    input_pieces = {
        i - num_leading: _shift_axis(pieces, -(i >= first_xs))
        for i, pieces in operand_pieces.items()
    }
    rewritten = _rewrite(bodies, input_pieces, carry, run_in_pieces)
    if rewritten is None:
        return None
    new_bodies, input_pieces, output_pieces = rewritten
    flat = _FlatBodies(
        eqn=eqn,
        bodies=new_bodies,
        input_parts=flat_parts(len(bodies[0].in_avals), input_pieces),
        output_parts=flat_parts(len(eqn.outvars), output_pieces),
        first_carry=len(flat_parts(carry.start or 0, input_pieces)),
        num_carry=len(flat_parts(num_carry, output_pieces)),
    )
    groups = flat.group_by_piece()
    if groups is None:
        return None

    def bind(operands: Sequence[Any]) -> list[Any]:
        results: list[Any] = [None] * len(flat.output_parts)
        leading = operands[:num_leading]
        for group in groups:
            group_results = flat.bind(group, leading, operands[num_leading:])
            for i, result in zip(group, group_results, strict=True):
                results[i] = result
        return results

    return DividedBodies(
        operand_pieces={
            i + num_leading: _shift_axis(pieces, i + num_leading >= first_xs)
            for i, pieces in input_pieces.items()
        },
        result_pieces={
            i: _shift_axis(pieces, i >= first_ys) for i, pieces in output_pieces.items()
        },
        bind=bind,
    )


def _shift_axis(pieces: Pieces, change: int) -> Pieces:
    """The same pieces of an array with so many axes more before this one."""
    return pieces._replace(axis=pieces.axis + change)


def flat_parts(count: int, pieces_of: PiecesOf) -> list[int | None]:
    """The index of the piece of each flat array; ``None`` for one that is whole."""
    parts = list[int | None]()
    for i in range(count):
        parts += range(len(pieces_of[i].sizes)) if i in pieces_of else [None]
    return parts


def _rewrite(
    bodies: Sequence[core.ClosedJaxpr],
    input_pieces: PiecesOf,
    carry: slice,
    run_in_pieces: Callable[..., Any],
) -> tuple[list[core.ClosedJaxpr], PiecesOf, PiecesOf] | None:
    """Rewrites bodies for pieces; all give the same ones, and a loop those it is given.

    Args:
      bodies: the bodies.
      input_pieces: index of an input -> its pieces.
      carry: the slice of inputs that become the first results.
      run_in_pieces: rewrites a body.

    Returns:
      The new bodies, and the pieces of their inputs and results; ``None`` if branches
      give different ones.
    """
    all_input_pieces = dict(input_pieces)
    carry_indices = range(len(bodies[0].in_avals))[carry]
    while True:
        # index of a result -> the pieces in which a body computes it
        computed: dict[int, Pieces] = {}
        for body in bodies:
            piecewise = run_in_pieces(body, all_input_pieces, {}, keeps_pieces=True)
            for i, pieces in piecewise.output_pieces.items():
                if computed.setdefault(i, pieces) != pieces:
                    return None
        num_before = len(all_input_pieces)
        for i, carry_index in enumerate(carry_indices):
            if carry_index in all_input_pieces:
                computed[i] = all_input_pieces[carry_index]
            elif i in computed:
                all_input_pieces[carry_index] = computed[i]
        if len(all_input_pieces) == num_before:
            break

    output_pieces = {i: computed.get(i) for i in range(len(bodies[0].out_avals))}
    new_bodies = [run_in_pieces(x, all_input_pieces, output_pieces) for x in bodies]
    return [x.closed for x in new_bodies], all_input_pieces, computed


@dataclass(frozen=True)
class _FlatBodies:
    """The bodies of a loop or a branch, of flat arrays.

    Attributes:
      eqn: the equation.
      bodies: the bodies.
      input_parts: the index of the piece that each input is; ``None``: it is whole.
      output_parts: the same for each result.
      first_carry: the index of the first input that a loop carries.
      num_carry: the number of these; they become the first results.
    """

    eqn: core.JaxprEqn
    bodies: Sequence[core.ClosedJaxpr]
    input_parts: Sequence[int | None]
    output_parts: Sequence[int | None]
    first_carry: int
    num_carry: int

    def group_by_piece(self) -> list[list[int]] | None:
        """The results of each new equation; ``None`` if one needs several pieces."""
        # index of a piece -> results
        groups: dict[int, list[int]] = {}
        for i, part in enumerate(self.output_parts):
            all_parts = [part, *(self.input_parts[j] for j in self._needs([i]))]
            parts = {k for k in all_parts if k is not None}
            if len(parts) > 1:
                return None
            groups.setdefault(min(parts, default=0), []).append(i)
        return list(groups.values())

    def bind(
        self, group: Sequence[int], leading: Sequence[Any], operands: Sequence[Any]
    ) -> list[Any]:
        """Evaluates the equation of some results.

        Args:
          group: the indices of the results.
          leading: the first operands, which no body reads.
          operands: the others.
        """
        needs = sorted(self._needs(group))
        carried = [
            j - self.first_carry
            for j in needs
            if self.first_carry <= j < self.first_carry + self.num_carry
        ]
        outputs = [*carried, *(i for i in group if i >= self.num_carry)]
        bodies = list[core.ClosedJaxpr]()
        for body in self.bodies:
            outvars = [body.jaxpr.outvars[i] for i in outputs]
            jaxpr = _jaxpr.dce_jaxpr(body, outvars).jaxpr
            jaxpr = jaxpr.replace(invars=[jaxpr.invars[j] for j in needs])
            bodies.append(core.ClosedJaxpr(jaxpr, body.consts))
        num_consts = sum(j < self.first_carry for j in needs)
        results = _bind(
            self.eqn,
            [core.jaxpr_as_fun(body) for body in bodies],
            leading=leading,
            operands=[operands[j] for j in needs],
            carry=slice(num_consts, num_consts + len(carried)),
        )
        result_of = dict(zip(outputs, results, strict=True))
        return [result_of[i] for i in group]

    def _needs(self, outputs: Iterable[int]) -> set[int]:
        """The inputs that some results need, in all iterations of a loop."""
        needs = set[int]()
        remaining = list(outputs)
        while remaining:
            i = remaining.pop()
            new = set(self._direct_needs[i])
            if i < self.num_carry:
                new.add(self.first_carry + i)
            new -= needs
            needs |= new
            carried = [j - self.first_carry for j in new]
            remaining += [k for k in carried if 0 <= k < self.num_carry]
        return needs

    @cached_property
    def _direct_needs(self) -> list[set[int]]:
        """The inputs that each result needs in one iteration."""
        needs = list[set[int]]()
        for i in range(len(self.output_parts)):
            inputs = set[int]()
            for body in self.bodies:
                used = _jaxpr.used_inputs(
                    _jaxpr.dce_jaxpr(body, [body.jaxpr.outvars[i]])
                )
                inputs.update(itertools.compress(range(len(used)), used))
            needs.append(inputs)
        return needs


def _bind(
    eqn: core.JaxprEqn,
    bodies: Sequence[Callable[..., list[Any]]],
    *,
    leading: Sequence[Any],
    operands: Sequence[Any],
    carry: slice,
) -> Sequence[Any]:
    """Evaluates a loop, branches or a call with other bodies.

    Args:
      eqn: the equation.
      bodies: the bodies, as functions of flat arrays.
      leading: the index of the branch.
      operands: the inputs of the bodies.
      carry: the slice of these that a loop carries.
    """
    params: Any = eqn.params
    if eqn.primitive.name == "cond":
        return jax.lax.switch(*leading, bodies, *operands)
    (body,) = bodies
    if eqn.primitive.name != "scan":
        policy = params["policy"]
        prevent_cse = params["prevent_cse"]
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*operands)

    indices = range(len(operands))
    return _scans.run_scan(
        body, operands, carried=indices[carry], along=indices[carry.stop :], like=eqn
    )

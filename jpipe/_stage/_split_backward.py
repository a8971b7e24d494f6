"""A backward split in two: the gradient of the input first, that of the weights later.

    backward:  (weights, microbatch) -> (input_grads, weight_grads)
    first:     (weights, microbatch) -> (input_grads, residuals)
    second:    (weights, microbatch, residuals) -> weight_grads

where *microbatch* is all that differs between micro-batches: activations, cotangents,
the residuals of the forward.

The stage before waits for the first half and nobody for the second, so a schedule can
put the second where a rank would idle. Both are slices of one jaxpr: each has the
equations that its results need. The residuals are all values that both halves need, or
the fewest bytes from which they follow cheaply. Values that follow from weights alone
are computed in both halves and are no residuals.

A `jax.lax.scan` becomes two scans, whose bodies are the halves of its body. So the
products for the gradients ``g`` of stacked weights are in the second half, though they
are in one loop with the cotangent ``c`` of the activation:

    scan:    c, weights, activations  ->  c, g
    first:   c, weights               ->  c, residuals   (of all iterations, stacked)
    second:  residuals, activations   ->  g

What is carried is first, if first results follow from it; else second, such as a sum of
gradients over all iterations. A scan stays whole, in the first half if that needs any
of its results,

* if the second half of its body is cheap: then it is computed sooner than handed over;
* if an iteration would hand over more than twice the bytes that it reads and writes of
  arrays that the scan goes along and stacks. A body under `jax.checkpoint` may: a loss
  in chunks of examples, whose logits are wide; layers on many more tokens than they
  are wide. Its author recomputes values rather than store those of all iterations.

Other calls that the slice would have to enter, such as a `jax.lax.cond`, stay whole.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._jaxprs import _inlining, _jaxpr, _min_cut, _scans
from .._partition._remat_mode import RematMode

# An iteration may hand over so many times the bytes that it reads and writes of stacks.
# Layers hand over 0.06 to 0.9 times as much, a loss in chunks that computes its logits
# again 7.8 times: both are programs of ``tests/stage/test_split_scans.py``.
_LARGEST_RATIO = 2


class BackwardHalves(NamedTuple):
    """The two halves of a program, as jaxprs over flat leaves.

    Attributes:
      first: ``(weights, microbatch) -> (first, residuals)``.
      second: ``(weights, microbatch, residuals) -> second``.
    """

    first: core.ClosedJaxpr
    second: core.ClosedJaxpr


def split_backward(
    closed: core.ClosedJaxpr,
    *,
    is_weight: Sequence[bool],
    is_first: Sequence[bool],
    mode: RematMode,
) -> BackwardHalves:
    """Splits a program in two.

    Args:
      closed: the jaxpr of the program.
      is_weight: one bool per input; True for weights.
      is_first: one bool per result; True for results of the first half.
      mode: tells if the residuals are all values or the fewest bytes.

    Returns:
      The halves.
    """
    opened = _inlining.open_checkpoints(closed)
    divided = _divide_scans(opened, is_weight=is_weight, is_first=is_first, mode=mode)
    jaxpr = divided.jaxpr
    outvars = list(zip(jaxpr.outvars, is_first, strict=True))
    first_outvars = [var for var, first in outvars if first]
    second_outvars = [var for var, first in outvars if not first]

    # The first half has the equations that its results need.
    first = _jaxpr.dce_jaxpr(divided, first_outvars)
    is_of_microbatch = [not weight for weight in is_weight]
    microbatch_vars = _jaxpr.depending_on(divided, is_of_microbatch)
    first_vars = _jaxpr.outvars_of(first.jaxpr.eqns)
    computed = [var for var in first_vars if var in microbatch_vars]

    # The residuals are all that the second half reads of these, or give it cheaply.
    second_reads = _read_vars(divided, second_outvars, computed)
    inputs = {*jaxpr.invars}
    residuals = [var for var in second_reads if var not in inputs]
    if mode.stores_fewest_bytes:
        residuals = _min_cut.find_residuals(
            first,
            second_reads,
            is_constant=is_weight,
            is_stored=[False] * len(is_weight),
        )

    # The first half returns them; the second computes the rest from them.
    first_jaxpr = first.jaxpr.replace(outvars=[*first_outvars, *residuals])
    return BackwardHalves(
        first=core.ClosedJaxpr(first_jaxpr, divided.consts),
        second=_jaxpr.recomputation(divided, second_outvars, residuals),
    )


def _read_vars(
    closed: core.ClosedJaxpr, outvars: Sequence[Any], stored: Sequence[core.Var]
) -> list[core.Var]:
    """The inputs and the stored variables from which some variables are computed."""
    jaxpr = _jaxpr.recomputation(closed, outvars, stored)
    invars = zip(jaxpr.jaxpr.invars, _jaxpr.used_inputs(jaxpr), strict=True)
    return [var for var, is_used in invars if is_used]


# ------------------------------------------------------------------------------- scans


def _divide_scans(
    closed: core.ClosedJaxpr,
    *,
    is_weight: Sequence[bool],
    is_first: Sequence[bool],
    mode: RematMode,
) -> core.ClosedJaxpr:
    """The same computation with two scans in place of each that the halves share.

    Args:
      closed: the jaxpr.
      is_weight: as in `split_backward`.
      is_first: as in `split_backward`.
      mode: as in `split_backward`.
    """
    jaxpr = closed.jaxpr
    is_of_microbatch = [not weight for weight in is_weight]
    microbatch_vars = _jaxpr.depending_on(closed, is_of_microbatch)
    used_vars = _jaxpr.ancestors(jaxpr, jaxpr.outvars)
    first_vars = _jaxpr.variables(itertools.compress(jaxpr.outvars, is_first))
    # id of a scan -> its halves
    halves_of: dict[int, _ScanHalves] = {}
    for eqn in reversed(jaxpr.eqns):
        if first_vars.isdisjoint(eqn.outvars) and not eqn.effects:
            continue
        operands = eqn.invars
        has_second = any(v in used_vars and v not in first_vars for v in eqn.outvars)
        if eqn.primitive.name == "scan" and has_second and not eqn.effects:
            halves = _split_scan(
                eqn,
                is_weight=[
                    isinstance(atom, core.Literal) or atom not in microbatch_vars
                    for atom in operands
                ],
                is_first=[var in first_vars for var in eqn.outvars],
                mode=mode,
            )
            if halves is not None:
                halves_of[id(eqn)] = halves
                operands = [operands[i] for i in halves.first_operands]
        first_vars |= _jaxpr.variables(operands)

    if not halves_of:
        return closed

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        halves = halves_of.get(id(eqn))
        return None if halves is None else halves.evaluate

    return _jaxpr.rewrite(closed, rule)


class _ScanHalves(NamedTuple):
    """A scan as two.

    Attributes:
      eqn: the scan.
      first: the body of the first, ``(*operands) -> (*first results, *handed carry,
        *residuals)``.
      second: the body of the second, ``(*operands, *residuals) -> second results``.
      is_first: one bool per result of the scan; True if the first scan returns it.
      handed_carry: the indices of operands that the first scan carries and the second
        reads: it goes along the values of all iterations.
    """

    eqn: core.JaxprEqn
    first: core.ClosedJaxpr
    second: core.ClosedJaxpr
    is_first: Sequence[bool]
    handed_carry: Sequence[int]

    @property
    def first_operands(self) -> list[int]:
        """The indices of the operands that the first scan reads or carries."""
        used = _used_indices(self.first)
        return [*dict.fromkeys([*used, *self._carried(is_first=True)])]

    @property
    def handed_bytes(self) -> int:
        """The bytes that an iteration of the first scan hands to one of the second."""
        return sum(map(_jaxpr.nbytes, self.first.out_avals[sum(self.is_first) :]))

    def evaluate(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the scan, by both."""
        first_results = _scans.run_scan(
            core.jaxpr_as_fun(self.first),
            operands,
            carried=self._carried(is_first=True),
            along=self._along(self.first),
            like=self.eqn,
        )

        # What the first one carried, and its residuals, are stacked over iterations.
        handed = first_results[sum(self.is_first) :]
        num_carried = len(self.handed_carry)
        second_operands = [*operands, *handed[num_carried:]]
        for i, stacked in zip(self.handed_carry, handed[:num_carried], strict=True):
            second_operands[i] = stacked
        second_results = _scans.run_scan(
            core.jaxpr_as_fun(self.second),
            second_operands,
            carried=self._carried(is_first=False),
            along=[*self.handed_carry, *self._along(self.second)],
            like=self.eqn,
        )
        first_iterator = iter(first_results)
        second_iterator = iter(second_results)
        return [
            next(first_iterator if first else second_iterator)
            for first in self.is_first
        ]

    def _carried(self, *, is_first: bool) -> list[int]:
        """The indices of the operands that one of the two carries."""
        carry_slice = _jaxpr.carry_slice(self.eqn)
        indices = range(carry_slice.start, carry_slice.stop)
        # The carries are the first results.
        carries = zip(indices, self.is_first[: len(indices)], strict=True)
        return [i for i, first in carries if first == is_first]

    def _along(self, half: core.ClosedJaxpr) -> list[int]:
        """The indices of the operands and residuals along which a half goes."""
        end_of_carry = _jaxpr.carry_slice(self.eqn).stop
        return [i for i in _used_indices(half) if i >= end_of_carry]


def _used_indices(closed: core.ClosedJaxpr) -> list[int]:
    return [i for i, used in enumerate(_jaxpr.used_inputs(closed)) if used]


def _split_scan(
    eqn: core.JaxprEqn,
    *,
    is_weight: Sequence[bool],
    is_first: Sequence[bool],
    mode: RematMode,
) -> _ScanHalves | None:
    """Splits a scan in two, or returns ``None`` if it stays whole: see the head.

    Args:
      eqn: the scan.
      is_weight: one bool per operand; True if it follows from weights alone.
      is_first: one bool per result; True for results of the first half.
      mode: as in `split_backward`.
    """
    body: Any = eqn.params["jaxpr"]
    carry_slice = _jaxpr.carry_slice(eqn)
    carry_indices = range(carry_slice.start, carry_slice.stop)
    num_carry = len(carry_indices)
    is_first = list(is_first)
    while True:
        first, second = split_backward(
            body,
            is_weight=[w and i not in carry_indices for i, w in enumerate(is_weight)],
            is_first=is_first,
            mode=mode,
        )
        # What the first half reads of the carry, the iteration before computes first.
        reads = _jaxpr.used_inputs(first)[carry_slice]
        missing = [k for k, is_read in enumerate(reads) if is_read and not is_first[k]]
        if not missing:
            break
        for k in missing:
            is_first[k] = True
    if all(map(_min_cut.is_cheap, second.jaxpr.eqns)):
        return None

    # The second scan does not carry what the first does: it is handed over.
    second_reads = _jaxpr.used_inputs(second)
    handed_carry = [
        i for k, i in enumerate(carry_indices) if is_first[k] and second_reads[i]
    ]
    num_first = sum(is_first)
    first_results = first.jaxpr.outvars
    outvars = [
        *first_results[:num_first],
        *(first.jaxpr.invars[i] for i in handed_carry),
        *first_results[num_first:],
    ]
    halves = _ScanHalves(
        eqn=eqn,
        first=core.ClosedJaxpr(first.jaxpr.replace(outvars=outvars), first.consts),
        second=second,
        is_first=is_first,
        handed_carry=handed_carry,
    )
    stacked = [*body.in_avals[carry_slice.stop :], *body.out_avals[num_carry:]]
    stacked_bytes = sum(map(_jaxpr.nbytes, stacked))
    return halves if halves.handed_bytes <= _LARGEST_RATIO * stacked_bytes else None

"""The loss of a micro-batch as a part of that of the mini-batch.

A penalty on weights in a loss function counts once in a step, whatever the reduction,
and not once for each micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr
from ._program import Traced

# What is linear in all of its operands; of one number all of these.
_SUMS = {
    *("add", "add_any", "sub", "neg", "convert_element_type", "copy", "copy_p"),
    *("name", "reduce_sum", "squeeze", "reshape", "broadcast_in_dim"),
}
# What is linear in the operand that follows from examples.
_SCALES = {"mul", "div"}
Values = dict[Any, Any]


def scaled(program: Traced, scale: float) -> Traced:
    """The program with a scaled loss, each of whose summands is one of examples.

    So it is with the loss of modules, which was run at once and in parts: a summand
    such as ``len(targets) * log_scale`` adds up, though it depends on no example.

    Args:
      program: with the loss that the user returned.
      scale: by what it is multiplied.
    """
    closed = program.closed

    def run(*args: Any) -> list[Any]:
        loss, *others = _jaxpr.as_traced(closed)(*args)
        return [loss * jnp.asarray(scale, loss.dtype), *others]

    made = jax.make_jaxpr(run)(*map(_jaxpr.spec, closed.in_avals))
    return replace(program, closed=made)


def apart(program: Traced, split: Sequence[bool], scale: float, share: float) -> Traced:
    """The program with a scaled loss, its summands without examples apart.

    Args:
      program: with the loss that the user returned.
      split: of each leaf of the batch whether it is of the examples, and not whole.
      scale: by what the loss of examples is multiplied.
      share: one over how many micro-batches there are: a summand that reads what each
        is given whole, or a key, is its mean over them.
    """
    closed, loss = program.closed, _Sum(program, split)
    inner = loss.inner()
    jaxpr = closed.jaxpr.replace(outvars=[*inner, *closed.jaxpr.outvars[1:]])
    is_once = program.of_batch.isdisjoint(set(inner) - loss.of_examples)

    def run(*args: Any) -> list[Any]:
        results = _jaxpr.as_traced(core.ClosedJaxpr(jaxpr, closed.consts))(*args)
        values, aux = dict(zip(inner, results, strict=False)), results[len(inner) :]
        if loss.is_of_examples:
            data = loss.read(loss.root, values)
            return [data * jnp.asarray(scale, data.dtype), *aux]
        data = loss.part(values, of_examples=True)
        rest = loss.part(values, of_examples=False)
        data *= jnp.asarray(scale, data.dtype)
        if is_once:
            return [data, *aux, rest]
        return [data + rest * jnp.asarray(share, data.dtype), *aux]

    made = jax.make_jaxpr(run)(*map(_jaxpr.spec, closed.in_avals))
    return replace(program, closed=made)


class _Sum:
    """A loss as a sum, perhaps scaled, of sums.

    Args:
      program: what computes it.
      split: see `apart`.

    Attributes:
      root: the loss.
      of_examples: all that follows from an example.
      is_of_examples: whether all that it is summed up of does.
    """

    def __init__(self, program: Traced, split: Sequence[bool]) -> None:
        self._jaxpr, self._producer = program.closed.jaxpr, program.producer
        examples = zip(program.given, split, strict=False)  # the last is a number
        self.of_examples = program.reached([v for v, yes in examples if yes])
        self.root: Any = program.closed.jaxpr.outvars[0]
        # sum -> the operands that it is the sum of, perhaps scaled
        self._sums: dict[core.Var, list[Any]] = {}
        self.is_of_examples = all(map(self._follows, self._find_sums()))

    def _follows(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self.of_examples

    def _equation(self, atom: Any) -> core.JaxprEqn:
        return self._jaxpr.eqns[self._producer[atom]]

    def _summands(self, atom: Any) -> list[Any]:
        """The operands whose sum, perhaps scaled, a value is; none if it is no sum."""
        if not self._follows(atom) or atom not in self._producer:
            return []
        eqn = self._equation(atom)
        kinds: list[Any] = [a.aval for a in (atom, *eqn.invars)]
        if any(kind.size != 1 for kind in kinds):
            return []
        name, read = eqn.primitive.name, eqn.invars
        if name in _SUMS:
            return list(read)
        if name in _SCALES and sum(map(self._follows, read)) == 1:
            scaled = read[0] if self._follows(read[0]) else read[1]
            return [scaled] if name == "mul" or scaled is read[0] else []
        return []

    def _find_sums(self) -> list[Any]:
        """Notes all sums in the loss; returns the values that they end in."""
        ends, todo = [], [self.root]
        while todo:
            atom = todo.pop()
            if summands := self._summands(atom):
                if atom not in self._sums:
                    self._sums[atom] = summands
                    todo += summands
            else:
                ends.append(atom)
        return ends

    def inner(self) -> list[core.Var]:
        """All variables of the sum, factors too."""
        operands = [a for var in self._sums for a in self._equation(var).invars]
        atoms = [a for a in (self.root, *operands) if not isinstance(a, core.Literal)]
        return [*dict.fromkeys(atoms)]

    def read(self, atom: Any, values: Values) -> Any:
        """The value of an operand."""
        if not isinstance(atom, core.Literal):
            return values[atom]
        return jnp.asarray(atom.val, _jaxpr.spec(atom.aval).dtype)

    def part(self, values: Values, of_examples: bool) -> Any:
        """The part of the loss that follows from examples, or the rest.

        Each sum is computed once, however many sums read it.
        """
        parts: Values = {}

        def part_of(atom: Any) -> Any:
            if not isinstance(atom, core.Literal) and atom in parts:
                return parts[atom]
            if self._follows(atom) == of_examples:
                return self.read(atom, values)
            like = _jaxpr.spec(atom.aval)
            return jnp.zeros(like.shape, like.dtype)

        for var in sorted(self._sums, key=self._producer.__getitem__):
            eqn, summands = self._equation(var), self._sums[var]
            operands = [
                part_of(a) if any(a is b for b in summands) else self.read(a, values)
                for a in eqn.invars
            ]
            if eqn.primitive.name == "name":  # a mark would be there twice
                parts[var] = operands[0]
            else:
                parts[var] = eqn.primitive.bind(*operands, **eqn.params)
        return part_of(self.root)

"""Scales the loss of a micro-batch to its part of the loss of the mini-batch.

A loss function may return a sum of terms that follow from examples and of a penalty
that follows from none, such as a norm of the weights:

    loss(params, micro-batch) = data(params, micro-batch) + penalty(params)

Each micro-batch contributes ``scale * data``. The penalty counts once per step under
every reduction, and not once for each micro-batch. It is separated here by following
the sums that end in the loss, through operations that are linear:

    a = square_error x          of examples
    b = norm w                  of no example
    c = add a b                 a sum: its terms are a and b
    loss = mul c 2.0            a sum that is scaled: its term is c

Its data are ``mul (add a 0) 2.0``, its penalty is ``mul (add 0 b) 2.0``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _jaxpr
from ._traced_function import TracedFunction

# Primitives that are linear in all of their operands together, for scalars.
_SUMS = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "name",
    "neg",
    "reduce_sum",
    "reshape",
    "squeeze",
    "sub",
}
# Primitives that are linear in the one operand that follows from examples.
_SCALES = {"div", "mul"}


def scale_loss(traced: TracedFunction, scale: float) -> TracedFunction:
    """Scales the loss of modules, each of whose terms counts for each micro-batch.

    Such a loss was run at once and in micro-batches: a term such as
    ``len(targets) * log_scale`` adds up, though it depends on no example.

    Args:
      traced: the function, with the loss that the user returned.
      scale: the factor of the loss.
    """
    closed = traced.closed

    def run(*args: Any) -> list[Any]:
        loss, *aux = _jaxpr.as_traced(closed)(*args)
        return [loss * jnp.asarray(scale, loss.dtype), *aux]

    return replace(traced, closed=_jaxpr.retrace(closed, run))


def separate_penalty(
    traced: TracedFunction, split: Sequence[bool], *, scale: float, share: float
) -> TracedFunction:
    """Scales the part of a loss that follows from examples, and separates the penalty.

    Args:
      traced: the function, with the loss that the user returned.
      split: one bool per leaf of the batch; True if it is split by examples.
      scale: the factor of the part that follows from examples.
      share: one over the number of micro-batches. A penalty that reads what each
        micro-batch is given whole, or a key, is its mean over them.
    """
    closed = traced.closed
    loss_sum = _LossSum(traced, split)
    variables = loss_sum.variables()
    jaxpr = closed.jaxpr.replace(outvars=[*variables, *closed.jaxpr.outvars[1:]])
    is_penalty_of_params = traced.vars_of_batch.isdisjoint(
        set(variables) - loss_sum.of_examples
    )

    def run(*args: Any) -> list[Any]:
        results = _jaxpr.as_traced(core.ClosedJaxpr(jaxpr, closed.consts))(*args)
        values = dict(zip(variables, results[: len(variables)], strict=True))
        aux = results[len(variables) :]

        if loss_sum.is_without_penalty:
            data = loss_sum.read(loss_sum.root, values)
            return [data * jnp.asarray(scale, data.dtype), *aux]

        data = loss_sum.part(values, of_examples=True)
        penalty = loss_sum.part(values, of_examples=False)
        data *= jnp.asarray(scale, data.dtype)
        if is_penalty_of_params:  # computed once per step
            return [data, *aux, penalty]
        return [data + penalty * jnp.asarray(share, data.dtype), *aux]

    return replace(traced, closed=_jaxpr.retrace(closed, run))


class _LossSum:
    """The loss of a program as a tree of sums, each perhaps scaled.

    Args:
      traced: the function.
      split: see `separate_penalty`.

    Attributes:
      root: the loss.
      of_examples: the variables that follow from an example.
      is_without_penalty: True if all terms of the loss follow from examples.
    """

    def __init__(self, traced: TracedFunction, split: Sequence[bool]) -> None:
        self._jaxpr = traced.closed.jaxpr
        self._producer = traced.producer
        # The last batch inputs are the number of the micro-batch and of folded keys.
        inputs = zip(traced.batch_inputs, split, strict=False)
        self.of_examples = traced.descendants(
            [var for var, is_split in inputs if is_split]
        )
        self.root: Any = traced.closed.jaxpr.outvars[0]
        # variable of a sum -> the operands that it is the sum of
        self._terms: dict[core.Var, list[Any]] = {}
        self.is_without_penalty = all(map(self._is_of_examples, self._find_leaves()))

    def variables(self) -> list[core.Var]:
        """The variables of the sums, with all operands: terms and factors."""
        atoms = [self.root]
        for var in self._terms:
            atoms += self._equation(var).invars
        variables = [atom for atom in atoms if not isinstance(atom, core.Literal)]
        return [*dict.fromkeys(variables)]

    def read(self, atom: Any, values: dict[core.Var, Any]) -> Any:
        """The value of an operand."""
        if not isinstance(atom, core.Literal):
            return values[atom]
        return jnp.asarray(atom.val, _jaxpr.spec(atom.aval).dtype)

    def part(self, values: dict[core.Var, Any], *, of_examples: bool) -> Any:
        """Computes the part of the loss that follows from examples, or the penalty.

        Each sum is computed once, however many sums read it.

        Args:
          values: the values of `variables`.
          of_examples: True for the part that follows from examples; else the penalty.
        """
        parts: dict[core.Var, Any] = {}  # variable of a sum -> its part

        def part_of(atom: Any) -> Any:
            if not isinstance(atom, core.Literal) and atom in parts:
                return parts[atom]
            if self._is_of_examples(atom) == of_examples:
                return self.read(atom, values)
            spec = _jaxpr.spec(atom.aval)
            return jnp.zeros(spec.shape, spec.dtype)

        for var in sorted(self._terms, key=self._producer.__getitem__):
            eqn = self._equation(var)
            terms = set(map(id, self._terms[var]))
            operands = [
                part_of(atom) if id(atom) in terms else self.read(atom, values)
                for atom in eqn.invars
            ]
            if eqn.primitive.name == "name":  # a mark would be there twice
                parts[var] = operands[0]
            else:
                parts[var] = eqn.primitive.bind(*operands, **eqn.params)
        return part_of(self.root)

    def _is_of_examples(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self.of_examples

    def _equation(self, var: core.Var) -> core.JaxprEqn:
        return self._jaxpr.eqns[self._producer[var]]

    def _find_leaves(self) -> list[Any]:
        """Follows the sums from the loss; returns the values in which they end."""
        leaves = []
        todo = [self.root]
        while todo:
            atom = todo.pop()
            terms = self._terms_of(atom)
            if not terms:
                leaves.append(atom)
            elif atom not in self._terms:
                self._terms[atom] = terms
                todo += terms
        return leaves

    def _terms_of(self, atom: Any) -> list[Any]:
        """The operands whose sum, perhaps scaled, a value is; none if it is no sum."""
        if not self._is_of_examples(atom) or atom not in self._producer:
            return []
        eqn = self._equation(atom)
        avals: list[Any] = [operand.aval for operand in (atom, *eqn.invars)]
        if any(aval.size != 1 for aval in avals):
            return []
        if eqn.primitive.name in _SUMS:
            return list(eqn.invars)

        if eqn.primitive.name in _SCALES:
            factors = [x for x in eqn.invars if self._is_of_examples(x)]
            is_divisor = eqn.primitive.name == "div" and eqn.invars[1] in factors
            if len(factors) == 1 and not is_divisor:
                return factors
        return []

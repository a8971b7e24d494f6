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

A checkpoint or a scan may do such a sum inside:

    loss = scan (carry loss)  along w           in one iteration:
        loss = add loss (add a b)

Where the losses of micro-batches add up, it is opened first: a checkpoint is inlined,
and a scan carries two sums, whose sum is the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from .._jaxprs import _dataflow, _eqn_source, _inlining, _jaxpr, _scans
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
    traced: TracedFunction,
    split: Sequence[bool],
    *,
    scale: float,
    share: float,
    adds_up: bool,
) -> TracedFunction:
    """Scales the part of a loss that follows from examples, and separates the penalty.

    Args:
      traced: the function, with the loss that the user returned.
      split: one bool per leaf of the batch; True if it is split by examples.
      scale: the factor of the part that follows from examples.
      share: one over the number of micro-batches. A penalty that reads what each
        micro-batch is given whole, or a key, is its mean over them. So is one that is
        computed together with what follows from examples.
      adds_up: True if the losses of micro-batches add up: then a penalty that is not
        separated counts once for each of them. False if they are averaged.

    Raises:
      ValueError: if they add up, and a penalty cannot be separated.
    """
    # The last batch inputs are the number of the micro-batch and of folded keys.
    num_others = len(traced.batch_inputs) - len(split)
    inputs = [*[False] * traced.num_params, *split, *[False] * num_others]
    closed = _open_sums(traced.closed, 0, inputs) if adds_up else traced.closed
    traced = replace(traced, closed=closed)
    loss_sum = _LossSum(closed.jaxpr, 0, inputs)
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


def _open_sums(
    closed: core.ClosedJaxpr, result: int, inputs: Sequence[bool]
) -> core.ClosedJaxpr:
    """The same computation, with sums that hold a penalty outside of calls and scans.

    Args:
      closed: the jaxpr.
      result: the index of the result that is a sum.
      inputs: one bool per input; True if it follows from an example.

    Raises:
      ValueError: if another call, a branch or a loop holds one.
    """
    while True:
        loss_sum = _LossSum(closed.jaxpr, result, inputs)
        calls = set[int]()
        scans: dict[int, _jaxpr.Rule] = {}
        for eqn, index in loss_sum.opaque_leaves():
            is_of_examples = loss_sum.operands_of_examples(eqn)
            if _goes_along_examples(eqn, is_of_examples):
                continue  # as many penalties as there are parts of the examples
            if not _holds_penalty(eqn, index, is_of_examples):
                continue
            if eqn.primitive.name in _jaxpr.CHECKPOINTS:
                calls.add(id(eqn))
            elif eqn.primitive.name == "scan" and _is_carried(eqn, index):
                scans[id(eqn)] = _split_scan_sum(eqn, index, is_of_examples)
            else:
                raise ValueError(
                    f"{_eqn_source.describe_eqn(eqn)} adds a term that follows from no "
                    f"example to the loss, so that it would count once for each "
                    f"micro-batch; return this term beside the loss, and add it outside"
                )
        if calls:
            closed = _inlining.inline_eqns(closed, calls)
        elif scans:
            closed = _jaxpr.rewrite(closed, lambda eqn, scans=scans: scans.get(id(eqn)))
        else:
            return closed


def _is_carried(eqn: core.JaxprEqn, index: int) -> bool:
    """True if a scan carries a result; False if it stacks it."""
    carry = _jaxpr.carry_slice(eqn)
    return index < carry.stop - carry.start


def _goes_along_examples(eqn: core.JaxprEqn, is_of_examples: Sequence[bool]) -> bool:
    """True if an equation is a scan, one of whose arrays follows from examples."""
    end_of_carry = _jaxpr.carry_slice(eqn).stop
    return eqn.primitive.name == "scan" and any(is_of_examples[end_of_carry:])


def _holds_penalty(
    eqn: core.JaxprEqn, index: int, is_of_examples: Sequence[bool]
) -> bool:
    """True if a result is a sum inside, of which some terms follow from no example.

    Args:
      eqn: a call, a cond or a loop.
      index: the index of the result.
      is_of_examples: one bool per operand, in all iterations of a loop.
    """
    for body in _jaxpr.bodies(eqn):
        inputs = is_of_examples[len(is_of_examples) - len(body.jaxpr.invars) :]
        loss_sum = _LossSum(body.jaxpr, index, inputs)
        if any(atom not in loss_sum.of_examples for atom in loss_sum.terms()):
            return True
        for inner_eqn, inner_index in loss_sum.opaque_leaves():
            is_inner = loss_sum.operands_of_examples(inner_eqn)
            if _holds_penalty(inner_eqn, inner_index, is_inner):
                return True
    return False


def _split_scan_sum(
    eqn: core.JaxprEqn, index: int, is_of_examples: Sequence[bool]
) -> _jaxpr.Rule:
    """A scan that carries the penalty of a sum by itself: a function of its operands.

    Args:
      eqn: the scan.
      index: the index of the result that is a sum, which it carries.
      is_of_examples: see `_holds_penalty`.
    """
    body = _open_sums(eqn.params["jaxpr"], index, is_of_examples)
    loss_sum = _LossSum(body.jaxpr, index, is_of_examples)
    variables = loss_sum.variables()
    jaxpr = body.jaxpr.replace(outvars=[*variables, *body.jaxpr.outvars])
    run_body = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, body.consts))
    carry = _jaxpr.carry_slice(eqn)
    carried = [*range(carry.start, carry.stop)]
    carried_sum: Any = body.jaxpr.invars[carried[index]]

    def run_iteration(*operands_and_penalty: Any) -> list[Any]:
        *operands, penalty = operands_and_penalty
        data = operands[carried[index]]
        operands[carried[index]] = data + penalty
        computed = run_body(*operands)
        values = dict(zip(variables, computed[: len(variables)], strict=True))
        results = computed[len(variables) :]
        results[index] = loss_sum.part(
            values, of_examples=True, parts={carried_sum: data}
        )
        next_penalty = loss_sum.part(
            values, of_examples=False, parts={carried_sum: penalty}
        )
        # Behind what is carried, before what is stacked.
        return [*results[: len(carried)], next_penalty, *results[len(carried) :]]

    def run(operands: Sequence[Any]) -> list[Any]:
        first_sum = operands[carried[index]]
        results = _scans.run_scan(
            run_iteration,
            [*operands, jnp.zeros_like(first_sum)],
            carried=[*carried, len(operands)],
            along=range(carry.stop, len(operands)),
            like=eqn,
        )
        penalty = results.pop(len(carried))
        results[index] += penalty
        return results

    return run


class _LossSum:
    """A result of a jaxpr as a tree of sums, each perhaps scaled.

    Args:
      jaxpr: the jaxpr of a program, or of what is inside of an equation.
      result: the index of the result.
      inputs: one bool per input; True if it follows from an example.

    Attributes:
      root: the result.
      of_examples: the variables that follow from an example.
      leaves: the values in which the sums end.
      is_without_penalty: True if all of these follow from examples.
    """

    def __init__(self, jaxpr: core.Jaxpr, result: int, inputs: Sequence[bool]) -> None:
        self._jaxpr = jaxpr
        self._producer = _jaxpr.producers(jaxpr)
        invars = zip(jaxpr.invars, inputs, strict=True)
        examples = [var for var, is_of_examples in invars if is_of_examples]
        self.of_examples = _dataflow.dependents(jaxpr, examples)
        self.root: Any = jaxpr.outvars[result]
        # variable of a sum -> the operands that it is the sum of
        self._terms: dict[core.Var, list[Any]] = {}
        self.leaves = self._find_leaves()
        self.is_without_penalty = all(map(self._is_of_examples, self.leaves))

    def opaque_leaves(self) -> list[tuple[core.JaxprEqn, int]]:
        """The equations with jaxprs inside that compute leaves from examples.

        Returns:
          The equations, and which of their results the leaf is.
        """
        leaves = dict.fromkeys(filter(self._is_of_examples, self.leaves))
        eqns = [(self._equation(x), x) for x in leaves if x in self._producer]
        return [(eqn, eqn.outvars.index(x)) for eqn, x in eqns if _jaxpr.bodies(eqn)]

    def variables(self) -> list[core.Var]:
        """The variables of the sums, with all operands: terms and factors."""
        atoms = [self.root]
        for var in self._terms:
            atoms += self._equation(var).invars
        variables = [atom for atom in atoms if not isinstance(atom, core.Literal)]
        return [*dict.fromkeys(variables)]

    def terms(self) -> list[core.Var]:
        """The leaves that are no numbers of the program."""
        return [x for x in self.leaves if not isinstance(x, core.Literal)]

    def operands_of_examples(self, eqn: core.JaxprEqn) -> list[bool]:
        """One bool per operand; True if it follows from an example, in any iteration.

        Args:
          eqn: an equation of the jaxpr.
        """
        is_of_examples = [*map(self._is_of_examples, eqn.invars)]
        carry = _jaxpr.carry_slice(eqn)
        carries = zip(is_of_examples[carry], eqn.outvars, strict=False)
        is_of_examples[carry] = [
            first or self._is_of_examples(var) for first, var in carries
        ]
        return is_of_examples

    def read(self, atom: Any, values: dict[core.Var, Any]) -> Any:
        """The value of an operand."""
        if not isinstance(atom, core.Literal):
            return values[atom]
        return jnp.asarray(atom.val, _jaxpr.spec(atom.aval).dtype)

    def part(
        self,
        values: dict[core.Var, Any],
        *,
        of_examples: bool,
        parts: Mapping[core.Var, Any] = MappingProxyType({}),
    ) -> Any:
        """Computes the part of the sum that follows from examples, or the penalty.

        Each sum is computed once, however many sums read it.

        Args:
          values: the values of `variables`.
          of_examples: True for the part that follows from examples; else the penalty.
          parts: variable -> its part, of those that have both.
        """
        parts = dict(parts)  # and for each variable of a sum its part

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

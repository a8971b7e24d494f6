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

Each value of such a tree is a pair of its data and its penalty. A checkpoint or a scan
may add inside. Then its body is evaluated with pairs, and a scan carries pairs:

    loss = scan (carry loss)  along w           in one iteration:
        loss = add loss (add a b)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _dataflow, _eqn_source, _jaxpr, _scans
from ._traced_function import TracedFunction

# Primitives that are linear in all of their operands together.
_SUMS = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "name",
    "neg",
    "optimization_barrier",
    "reduce_precision",
    "reduce_sum",
    "reshape",
    "squeeze",
    "sub",
}
# Primitives that are linear in the one operand that follows from examples.
_SCALES = {"div", "dot_general", "mul"}
# Primitives that put numbers into an array.
_STACKS = {"concatenate", "stack"}
# Primitives that call a jaxpr, with the names of all supported versions of JAX.
_CALLS = {
    *_jaxpr.CHECKPOINTS,
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "jit",
    "pjit",
}

# The data and the penalty of a value, whose sum it is.
Pair = tuple[Any, Any]


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
    closed = traced.closed
    sums = _Sums(closed.jaxpr, {0}, inputs, enters=adds_up)
    is_penalty_of_params = not sums.is_inside and traced.vars_of_batch.isdisjoint(
        _jaxpr.variables(sums.penalties)
    )

    def run(*args: Any) -> list[Any]:
        pairs: dict[core.Var, Pair] = {}
        loss, *aux = sums.evaluate(closed, args, pairs)
        if not sums.has_penalty:
            return [loss * jnp.asarray(scale, loss.dtype), *aux]

        data, penalty = sums.pair_of(closed.jaxpr.outvars[0], loss, pairs)
        data *= jnp.asarray(scale, data.dtype)
        if is_penalty_of_params:  # computed once per step
            return [data, *aux, penalty]
        return [data + penalty * jnp.asarray(share, data.dtype), *aux]

    return replace(traced, closed=_jaxpr.retrace(closed, run))


class _Sums:
    """Some results of a jaxpr as trees of sums, each perhaps scaled.

    Args:
      jaxpr: the jaxpr of a program, or of what is inside of an equation.
      results: the indices of the results.
      inputs: one bool per input; True if it follows from an example.
      enters: True if sums inside of checkpoints and scans are followed too.

    Attributes:
      penalties: the terms that follow from no example.
      read_inputs: the indices of the inputs that are terms, and follow from examples.
      is_inside: True if calls or scans add, or hand on, a term that follows from none.
      has_penalty: True if there is such a term, here or inside.

    Raises:
      ValueError: if a call that cannot be entered adds a term that follows from none.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        results: set[int],
        inputs: Sequence[bool],
        *,
        enters: bool,
    ) -> None:
        self._jaxpr = jaxpr
        self._producer = _jaxpr.producers(jaxpr)
        invars = zip(jaxpr.invars, inputs, strict=True)
        examples = [var for var, is_of_examples in invars if is_of_examples]
        self._of_examples = _dataflow.dependents(jaxpr, examples)
        self._arrays_of_numbers = self._find_arrays_of_numbers()
        self._enters = enters
        # variable of a sum -> the operands that it is the sum of
        self._terms: dict[core.Var, list[Any]] = {}
        # id of an equation -> the indices of its results that are sums; the sums inside
        self._entered: dict[int, tuple[set[int], _Sums]] = {}
        # id of such an equation -> its operands that are terms
        self._entered_terms: dict[int, list[Any]] = {}
        self.penalties: list[Any] = []
        self.read_inputs = set[int]()
        self._follow([jaxpr.outvars[i] for i in sorted(results)])
        for eqn_id, (_, inner) in [*self._entered.items()]:
            if not inner.has_penalty and not self._reach(self._entered_terms[eqn_id]):
                del self._entered[eqn_id]
        self.is_inside = bool(self._entered)
        self.has_penalty = self.is_inside or bool(self.penalties)

    # ------------------------------------------------------------------------ analysis

    def _follow(self, atoms: list[Any]) -> None:
        """Follows the sums from some values to their terms."""
        index_of_input = {var: i for i, var in enumerate(self._jaxpr.invars)}
        todo = list(atoms)
        followed = set[core.Var]()
        while todo:
            atom = todo.pop()
            if _is_zero(atom) or (not _is_literal(atom) and atom in followed):
                continue
            if not self._is_of_examples(atom):
                self.penalties.append(atom)
                continue
            followed.add(atom)
            if atom in index_of_input:
                self.read_inputs.add(index_of_input[atom])
            elif atom in self._producer:
                eqn = self._equation(atom)
                if terms := self._terms_of(atom):
                    self._terms[atom] = terms
                    todo += terms
                elif self._enters and _jaxpr.bodies(eqn):
                    todo += self._enter(eqn, eqn.outvars.index(atom))

    def _reach(self, atoms: Sequence[Any]) -> bool:
        """True if sums lead from some values to a term that follows from no example."""
        todo = list(atoms)
        reached = set[core.Var]()
        while todo:
            atom = todo.pop()
            if _is_zero(atom) or (not _is_literal(atom) and atom in reached):
                continue
            if not self._is_of_examples(atom):
                return True
            reached.add(atom)
            if atom in self._terms:
                todo += self._terms[atom]
            elif atom in self._producer:
                eqn_id = id(self._equation(atom))
                if eqn_id in self._entered:
                    if self._entered[eqn_id][1].has_penalty:
                        return True
                    todo += self._entered_terms[eqn_id]
        return False

    def _enter(self, eqn: core.JaxprEqn, index: int) -> list[Any]:
        """Follows a sum into a call or a scan; returns the operands that are terms.

        Args:
          eqn: an equation with jaxprs inside.
          index: the index of the result that may be a sum.
        """
        is_of_examples = self._operands_of_examples(eqn)
        carry = _jaxpr.carry_slice(eqn)
        carried = range(len(eqn.invars))[carry]
        is_scan = eqn.primitive.name == "scan"
        if is_scan and any(is_of_examples[carry.stop :]):
            return []  # as many penalties as there are parts of the examples
        if not (eqn.primitive.name in _CALLS or (is_scan and index < len(carried))):
            self._check_closed(eqn, index, is_of_examples)
            return []

        (body,) = _jaxpr.bodies(eqn)
        indices = {index}
        if id(eqn) in self._entered:
            indices |= self._entered[id(eqn)][0]
        while True:
            inner = _Sums(body.jaxpr, indices, is_of_examples, enters=True)
            if not is_scan:
                operands = inner.read_inputs
                break
            # What one iteration adds to, the iteration before has added up.
            read = inner.read_inputs.intersection(carried)
            more = {carried.index(i) for i in read} - indices
            if not more:
                operands = {carried[i] for i in indices}
                break
            indices |= more
        terms = [eqn.invars[i] for i in operands]
        self._entered[id(eqn)] = indices, inner
        self._entered_terms[id(eqn)] = terms
        return terms

    def _check_closed(
        self, eqn: core.JaxprEqn, index: int, is_of_examples: Sequence[bool]
    ) -> None:
        """Raises if a branch, a loop or a rule adds a penalty to a result."""
        for body in _jaxpr.bodies(eqn):
            inputs = is_of_examples[len(is_of_examples) - len(body.jaxpr.invars) :]
            if _Sums(body.jaxpr, {index}, inputs, enters=True).has_variable_penalty:
                raise ValueError(
                    f"{_eqn_source.describe_eqn(eqn)} adds a term that follows from no "
                    f"example to the loss, so that it would count once for each "
                    f"micro-batch; return this term beside the loss, and add it outside"
                )

    def _operands_of_examples(self, eqn: core.JaxprEqn) -> list[bool]:
        """One bool per operand; True if it follows from an example in any iteration."""
        is_of_examples = [*map(self._is_of_examples, eqn.invars)]
        carry = _jaxpr.carry_slice(eqn)
        carries = zip(is_of_examples[carry], eqn.outvars, strict=False)
        is_of_examples[carry] = [
            first or self._is_of_examples(var) for first, var in carries
        ]
        return is_of_examples

    def _terms_of(self, atom: Any) -> list[Any]:
        """The operands whose sum, perhaps scaled, a value is; none if it is no sum."""
        eqn = self._equation(atom)
        arrays = self._arrays_of_numbers
        if not all(self._is_of_numbers(x, arrays) for x in [atom, *eqn.invars]):
            return []
        if eqn.primitive.name in _SUMS | _STACKS and len(eqn.outvars) == 1:
            return list(eqn.invars)
        if eqn.primitive.name in _SCALES:
            factors = [x for x in eqn.invars if self._is_of_examples(x)]
            is_divisor = eqn.primitive.name == "div" and eqn.invars[1] in factors
            if len(factors) == 1 and not is_divisor:
                return factors
        return []

    def _find_arrays_of_numbers(self) -> set[core.Var]:
        """The arrays of numbers that are put together, and linear functions of them.

        No axis of these is one of examples, along which a penalty would count for each.
        """
        arrays = set[core.Var]()
        for eqn in self._jaxpr.eqns:
            name = eqn.primitive.name
            if name in _STACKS:
                avals = list[Any](atom.aval for atom in eqn.invars)
                has_numbers = all(aval.size == 1 for aval in avals)
            else:
                is_linear = name in _SUMS or name in _SCALES
                has_numbers = (
                    is_linear
                    and not arrays.isdisjoint(_jaxpr.variables(eqn.invars))
                    and all(self._is_of_numbers(atom, arrays) for atom in eqn.invars)
                )
            if has_numbers:
                arrays.update(eqn.outvars)
        return arrays

    def _is_of_numbers(self, atom: Any, arrays: set[core.Var]) -> bool:
        """True for what has no axis of examples.

        Args:
          atom: the operand.
          arrays: the arrays of numbers that are put together.
        """
        if not self._is_of_examples(atom):
            return True
        return atom.aval.size == 1 or atom in arrays

    def _is_of_examples(self, atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in self._of_examples

    def _equation(self, var: core.Var) -> core.JaxprEqn:
        return self._jaxpr.eqns[self._producer[var]]

    @property
    def has_variable_penalty(self) -> bool:
        """True if a term follows from no example, and is no number of the program."""
        inner_sums = [inner for _, inner in self._entered.values()]
        return bool(_jaxpr.variables(self.penalties)) or any(
            inner.has_variable_penalty for inner in inner_sums
        )

    # ---------------------------------------------------------------------- evaluation

    def evaluate(
        self,
        closed: core.ClosedJaxpr,
        args: Sequence[Any],
        pairs: dict[core.Var, Pair],
    ) -> list[Any]:
        """Evaluates the jaxpr.

        Args:
          closed: the jaxpr.
          args: its inputs.
          pairs: variable -> its pair, of inputs that have both parts; gets those of
            the sums.
        """
        has_pairs = self.has_penalty or bool(pairs)

        def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
            if not has_pairs:
                return None
            if len(eqn.outvars) == 1 and eqn.outvars[0] in self._terms:
                return lambda operands: self._add(eqn, operands, pairs)
            if id(eqn) not in self._entered:
                return None
            run = self._run_call if eqn.primitive.name in _CALLS else self._run_scan
            return lambda operands: run(eqn, operands, pairs)

        return _jaxpr.evaluate(closed, args, rule)

    def pair_of(self, atom: Any, value: Any, pairs: Mapping[core.Var, Pair]) -> Pair:
        """The data and the penalty of a value."""
        if not isinstance(atom, core.Literal) and atom in pairs:
            return pairs[atom]
        value = jnp.asarray(value)
        zeros = jnp.zeros(value.shape, value.dtype)
        return (value, zeros) if self._is_of_examples(atom) else (zeros, value)

    def _add(
        self, eqn: core.JaxprEqn, operands: Sequence[Any], pairs: dict[core.Var, Pair]
    ) -> list[Any]:
        """Evaluates a sum, and its pair."""
        terms = self._terms[eqn.outvars[0]]
        operand_pairs = list[Pair]()
        for atom, value in zip(eqn.invars, operands, strict=True):
            pair = value, value
            if any(atom is term for term in terms):
                pair = self.pair_of(atom, value, pairs)
            operand_pairs.append(pair)
        if eqn.primitive.name == "name":  # a mark would be there twice
            pairs[eqn.outvars[0]] = operand_pairs[0]
        else:
            data, penalty = (
                _bind_one(eqn, part) for part in zip(*operand_pairs, strict=True)
            )
            pairs[eqn.outvars[0]] = data, penalty
        return [_bind_one(eqn, operands)]

    def _run_call(
        self, eqn: core.JaxprEqn, operands: Sequence[Any], pairs: dict[core.Var, Pair]
    ) -> list[Any]:
        """Evaluates a call, and the pairs of its results that are sums."""
        indices, inner = self._entered[id(eqn)]
        (body,) = _jaxpr.bodies(eqn)
        terms = sorted(inner.read_inputs)
        term_pairs = [self.pair_of(eqn.invars[i], operands[i], pairs) for i in terms]

        def run(operands: Sequence[Any], term_pairs: Sequence[Pair]) -> Any:
            inner_pairs = {
                body.jaxpr.invars[i]: pair
                for i, pair in zip(terms, term_pairs, strict=True)
            }
            results = inner.evaluate(body, operands, inner_pairs)
            return results, [
                inner.pair_of(body.jaxpr.outvars[i], results[i], inner_pairs)
                for i in sorted(indices)
            ]

        if eqn.primitive.name in _jaxpr.CHECKPOINTS:
            params: Any = eqn.params
            run = jax.checkpoint(
                run, policy=params["policy"], prevent_cse=params["prevent_cse"]
            )
        results, result_pairs = run(operands, term_pairs)
        for i, pair in zip(sorted(indices), result_pairs, strict=True):
            pairs[eqn.outvars[i]] = pair
        return results

    def _run_scan(
        self, eqn: core.JaxprEqn, operands: Sequence[Any], pairs: dict[core.Var, Pair]
    ) -> list[Any]:
        """Evaluates a scan, which carries the penalties of sums by themselves."""
        indices, inner = self._entered[id(eqn)]
        (body,) = _jaxpr.bodies(eqn)
        carry = _jaxpr.carry_slice(eqn)
        carried = [*range(carry.start, carry.stop)]
        num_sums = len(indices)
        # index of a result that is a sum -> the index of its operand
        sum_operands = {i: carried[i] for i in sorted(indices)}

        def run_iteration(*operands_and_penalties: Any) -> list[Any]:
            operands = list(operands_and_penalties[:-num_sums])
            penalties = operands_and_penalties[-num_sums:]
            inner_pairs: dict[core.Var, Pair] = {}
            for k, penalty in zip(sum_operands.values(), penalties, strict=True):
                inner_pairs[body.jaxpr.invars[k]] = operands[k], penalty
                operands[k] = operands[k] + penalty
            results = inner.evaluate(body, operands, inner_pairs)
            next_penalties: list[Any] = []
            for i in sum_operands:
                atom = body.jaxpr.outvars[i]
                results[i], penalty = inner.pair_of(atom, results[i], inner_pairs)
                next_penalties.append(penalty)
            # Behind what is carried, before what is stacked.
            stacked = results[len(carried) :]
            return [*results[: len(carried)], *next_penalties, *stacked]

        operands = list(operands)
        penalties: list[Any] = []
        for k in sum_operands.values():
            operands[k], penalty = self.pair_of(eqn.invars[k], operands[k], pairs)
            penalties.append(penalty)
        count = len(operands)
        results = _scans.run_scan(
            run_iteration,
            [*operands, *penalties],
            carried=[*carried, *range(count, count + num_sums)],
            along=range(carry.stop, count),
            like=eqn,
        )
        last_penalties = results[len(carried) : len(carried) + num_sums]
        del results[len(carried) : len(carried) + num_sums]
        for i, penalty in zip(sum_operands, last_penalties, strict=True):
            pairs[eqn.outvars[i]] = results[i], penalty
            results[i] = results[i] + penalty
        return results


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _is_zero(atom: Any) -> bool:
    """True if an operand is the number zero."""
    return isinstance(atom, core.Literal) and not np.any(atom.val)


def _bind_one(eqn: core.JaxprEqn, operands: Sequence[Any]) -> Any:
    """The only result of an equation without jaxprs inside."""
    result = eqn.primitive.bind(*operands, **eqn.params)
    return result[0] if eqn.primitive.multiple_results else result

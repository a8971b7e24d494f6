"""Traces the user's function as one jaxpr, and says which stages run each equation.

    (*params, *constants, *batch, microbatch index, *folded numbers)
        -> (*loss, *loss weight, *aux, *penalty)

An equation is run by one stage, by each stage that reads its results, or once per step:
see `EqnKind`. What follows from parameters alone, or cheaply from the inputs of a
micro-batch alone, belongs to no stage. All other equations are divided among stages.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments._objective import as_loss_weight
from .._jaxprs import _jaxpr, _min_cut
from .._jaxprs._jaxpr import is_inexact
from .._jaxprs._primitives import REDUCTIONS
from .._layers import _rng
from .._layers._text import shape_text
from . import _boundaries, _checkpoints
from ._folded_numbers import lift_folded_numbers

PyTree = Any

# An equation with so few bytes of operands and results, such as a key that is folded,
# is cheap whatever it computes.
_FEW_BYTES = 1024
_user_context = jax.make_user_context()
OTHER_READS = (
    "the function reads other parameters, or other arrays from outside, for "
    "micro-batches of another size; give a batch that num_microbatches divides"
)


class EqnKind(enum.StrEnum):
    """The stages that run an equation."""

    STAGE = "stage"  # one
    COPY = "copy"  # each one that reads its results, since it is cheap
    ONCE = "once"  # none: it runs once per step, where its parameters are


@dataclass(frozen=True)
class TracedFunction:
    """A function on micro-batches of one size.

    Attributes:
      closed: its jaxpr: see the head of the file. The loss is the part that follows
        from examples; the penalty is the sum of its other terms, if there are any.
      num_params: the number of inputs that are the same for all micro-batches: the
        parameters, and then the arrays that the function closes over.
      aux: specs of the results besides the loss.
      constants: the arrays that the function closes over.
      has_loss: True if its first result is a loss.
      is_weighted: True if the next result is the loss weight, by whose sum the loss is
        divided.
      numbers: the numbers that are folded into keys: see `_folded_numbers`.
      known_kinds: the kinds of the equations, where they are decided: see `kinds`.
      num_inputs: the number of inputs after the parameters that are those of a model.
      num_local: the number of these inputs that not all stages read: the first stage
        reads the input of a list, the last one the targets.
      is_split: True if a micro-batch is a part of a mini-batch. Where it is the whole,
        the function may compute with the arrays that it closes over.
    """

    closed: core.ClosedJaxpr
    num_params: int
    aux: PyTree
    constants: Sequence[Any] = ()
    has_loss: bool = True
    is_weighted: bool = False
    numbers: Sequence[Any] = ()
    known_kinds: Sequence[EqnKind] | None = None
    num_inputs: int = 0
    num_local: int = 0
    is_split: bool = True

    @property
    def loss(self) -> list[Any]:
        """The loss, if there is one."""
        return self.closed.jaxpr.outvars[: self.has_loss]

    @property
    def weight(self) -> list[Any]:
        """The weight of a weighted loss."""
        return self.closed.jaxpr.outvars[self.has_loss : self._num_first]

    @property
    def aux_vars(self) -> list[Any]:
        """The results besides the loss and its weight."""
        end = self._num_first + len(jax.tree.leaves(self.aux))
        return self.closed.jaxpr.outvars[self._num_first : end]

    @property
    def _num_first(self) -> int:
        return self.has_loss + self.is_weighted

    @property
    def outputs(self) -> list[Any]:
        """The results that stages make: the loss, its weight and aux."""
        return [*self.loss, *self.weight, *self.aux_vars]

    @property
    def penalty(self) -> list[core.Var]:
        """The penalty: the sum of the terms of the loss that depend on no example."""
        return self.closed.jaxpr.outvars[len(self.outputs) :]

    @cached_property
    def params(self) -> list[core.Var]:
        """The inputs that are the same for all micro-batches."""
        return self.closed.jaxpr.invars[: self.num_params]

    @cached_property
    def batch_inputs(self) -> list[core.Var]:
        """The inputs that a micro-batch brings."""
        return self.closed.jaxpr.invars[self.num_params :]

    @cached_property
    def inputs(self) -> set[core.Var]:
        """The inputs of a micro-batch that are the input of a model."""
        return set(self.batch_inputs[: self.num_inputs])

    @cached_property
    def closed_over(self) -> list[core.Var]:
        """The inputs that are arrays which the function closes over."""
        return self.params[self.num_params - len(self.constants) :]

    @cached_property
    def of_batch(self) -> set[core.Var]:
        """The variables that follow from the inputs of a micro-batch."""
        constants = [] if self.is_split else self.closed_over
        return self.reached([*self.batch_inputs, *constants])

    @cached_property
    def of_params(self) -> set[core.Var]:
        """The variables that follow from parameters."""
        return self.reached(self.params)

    def reached(self, inputs: Sequence[core.Var]) -> set[core.Var]:
        """The variables that follow from some inputs, and these."""
        return _jaxpr.descendants(self.closed.jaxpr, inputs)

    def constant(self, atom: Any) -> core.ClosedJaxpr | None:
        """The jaxpr ``() -> value`` of an atom; ``None`` if it follows from inputs."""
        jaxpr = self.closed.jaxpr
        computed = _jaxpr.computable_from(
            jaxpr, jaxpr.constvars, lambda eqn: not eqn.effects
        )
        if not _jaxpr.variables([atom]) <= computed:
            return None
        eqns = [eqn for eqn in jaxpr.eqns if not eqn.effects]
        jaxpr = jaxpr.replace(invars=[], eqns=eqns, outvars=[atom], effects=set())
        return _jaxpr.dce_jaxpr(core.ClosedJaxpr(jaxpr, self.closed.consts), [atom])

    @cached_property
    def producer(self) -> dict[core.Var, int]:
        """The index of the equation that makes each variable."""
        return _jaxpr.producers(self.closed.jaxpr)

    @cached_property
    def kinds(self) -> Sequence[EqnKind]:
        """The stages that run each equation.

        An equation with effects, or one that follows from the batch at some cost, runs
        in one stage. One that follows from parameters at some cost, or reduces them,
        runs once per step. All others are cheap enough for each stage that reads them.
        """
        if self.known_kinds is not None:
            return self.known_kinds
        return [self._classify(eqn) for eqn in self.closed.jaxpr.eqns]

    def _classify(self, eqn: core.JaxprEqn) -> EqnKind:
        operands = _jaxpr.variables(eqn.invars)
        if eqn.effects:
            return EqnKind.STAGE
        if not operands.isdisjoint(self.of_batch):
            # A copy must follow from the batch through copies.
            is_copied = is_cheap(eqn) and operands <= self._copied
            return EqnKind.COPY if is_copied else EqnKind.STAGE
        if operands.isdisjoint(self.of_params):
            return EqnKind.COPY
        is_copied = is_cheap(eqn) and eqn.primitive.name not in REDUCTIONS
        return EqnKind.COPY if is_copied else EqnKind.ONCE

    @cached_property
    def _copied(self) -> set[core.Var]:
        """The variables that follow from the batch by cheap equations alone."""
        jaxpr = self.closed.jaxpr
        sources = [*jaxpr.constvars, *self.batch_inputs[self.num_local :]]
        if not self.is_split:
            sources += self.closed_over
        of_inputs = self.of_batch | self.of_params

        def may_copy(eqn: core.JaxprEqn) -> bool:
            is_constant = of_inputs.isdisjoint(_jaxpr.variables(eqn.invars))
            return not eqn.effects and (is_constant or is_cheap(eqn))

        return _jaxpr.computable_from(jaxpr, sources, may_copy)


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """True if each stage may compute an equation for itself."""
    atoms = [*eqn.invars, *eqn.outvars]
    return _min_cut.is_cheap(eqn) or sum(map(_min_cut.nbytes, atoms)) <= _FEW_BYTES


def trace_function(
    function: Callable[..., Any],
    params: PyTree,
    args: Sequence[PyTree],
    *,
    num_stages: int,
    has_aux: bool,
    has_loss: bool = True,
    is_weighted: bool = False,
    folds_params: bool = True,
) -> TracedFunction:
    """Traces a function on a micro-batch.

    Args:
      function: ``(params, *args) -> loss``, or ``(loss, aux)``.
      params: specs of its first argument.
      args: specs of the others, of a micro-batch.
      num_stages: the number of stages that it will be divided into, or about that.
      has_aux: True if it returns something besides the loss.
      has_loss: True if it returns a loss; else all that it returns is aux.
      is_weighted: True if the loss is a pair, of a total and a weight.
      folds_params: True if keys among the parameters are folded too.

    Returns:
      The function. The index of the micro-batch is folded into its keys, and its loss
      is not scaled yet: see `_penalty`.
    """

    def run(params: PyTree, args: Sequence[PyTree], index: jax.Array) -> Any:
        def fold(leaf: Any) -> Any:
            return (
                _rng.microbatch_key(leaf, index) if _rng.is_single_key(leaf) else leaf
            )

        args = jax.tree.map(fold, tuple(args))
        params = jax.tree.map(fold, params) if folds_params else params
        result = function(params, *args)
        if not has_loss:
            return (), (), jax.tree.map(jnp.asarray, result)
        loss, aux = pair(result, "(loss, aux)") if has_aux else (result, ())
        weights = []
        if is_weighted:
            loss, *weights = pair(loss, "(total, weight) in place of a loss")
        if not hasattr(loss, "dtype") or loss.shape or not _is_floating(loss):
            raise TypeError(
                f"the function must return a scalar loss of a floating dtype; it "
                f"returned {shape_text(loss)}; for (loss, aux) type has_aux=True, for "
                f"(total, weight) reduction='weighted'"
            )
        weights = [as_loss_weight(weight, loss) for weight in weights]
        return loss, weights, jax.tree.map(jnp.asarray, aux)

    index_spec = jax.ShapeDtypeStruct((), jnp.int32)
    with _user_context(object()):
        closed, (_, _, aux) = _jaxpr.trace(run, params, tuple(args), index_spec)
    num_params = len(jax.tree.leaves(params))
    closed = _checkpoints.inline_checkpoints(closed, num_stages)
    closed = _with_raw_keys_folded(closed, 0 if folds_params else num_params)
    closed, numbers = lift_folded_numbers(closed)
    closed, constants = _with_arrays_as_inputs(closed, num_params)
    return TracedFunction(
        closed=closed,
        num_params=num_params + len(constants),
        aux=aux,
        constants=constants,
        has_loss=has_loss,
        is_weighted=is_weighted,
        numbers=numbers,
    )


def _with_arrays_as_inputs(
    closed: core.ClosedJaxpr, num_params: int
) -> tuple[core.ClosedJaxpr, list[Any]]:
    """Turns arrays that a jaxpr closes over into inputs behind the parameters.

    Keys and refs stay in the programs that read them.

    Returns:
      The jaxpr, and the arrays.
    """
    jaxpr = closed.jaxpr
    constants = [*zip(jaxpr.constvars, closed.consts, strict=True)]
    arrays = {var: value for var, value in constants if _is_array(value)}
    kept = {var: value for var, value in constants if var not in arrays}
    invars = [*jaxpr.invars[:num_params], *arrays, *jaxpr.invars[num_params:]]
    jaxpr = jaxpr.replace(constvars=[*kept], invars=invars)
    return core.ClosedJaxpr(jaxpr, [*kept.values()]), [*arrays.values()]


def _is_array(constant: Any) -> bool:
    is_array = isinstance(constant, jax.Array | np.ndarray)
    return is_array and not jnp.issubdtype(constant.dtype, jax.dtypes.extended)


def with_equal_arrays(
    traced_functions: Mapping[int, TracedFunction],
) -> Mapping[int, TracedFunction]:
    """Makes programs close over equal arrays, in the same order.

    Args:
      traced_functions: micro-batch size -> trace.

    Raises:
      ValueError: if they close over others, but for arrays of NumPy, which become
        constants of the programs.
    """
    if _have_equal_arrays([*traced_functions.values()]):
        return traced_functions
    traced_functions = {
        size: _with_numpy_as_constants(traced)
        for size, traced in traced_functions.items()
    }
    if not _have_equal_arrays([*traced_functions.values()]):
        raise ValueError(OTHER_READS)
    return traced_functions


def _have_equal_arrays(traced_functions: Sequence[TracedFunction]) -> bool:
    first = traced_functions[0]
    return all(
        _are_equal(first.constants, traced.constants) for traced in traced_functions[1:]
    )


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True if two lists hold equal arrays."""
    return len(first) == len(second) and all(
        a is b or np.array_equal(a, b, equal_nan=is_inexact(a))
        for a, b in zip(first, second, strict=True)
    )


def _with_numpy_as_constants(traced: TracedFunction) -> TracedFunction:
    """The program with arrays of NumPy as constants, and not as inputs."""
    jaxpr = traced.closed.jaxpr
    arrays = [*zip(traced.closed_over, traced.constants, strict=True)]
    numpy_arrays = {
        var: array for var, array in arrays if isinstance(array, np.ndarray)
    }
    jaxpr = jaxpr.replace(
        constvars=[*jaxpr.constvars, *numpy_arrays],
        invars=[var for var in jaxpr.invars if var not in numpy_arrays],
    )
    consts = [*traced.closed.consts, *numpy_arrays.values()]
    return replace(
        traced,
        closed=core.ClosedJaxpr(jaxpr, consts),
        num_params=traced.num_params - len(numpy_arrays),
        constants=[array for var, array in arrays if var not in numpy_arrays],
    )


def _with_raw_keys_folded(closed: core.ClosedJaxpr, first: int) -> core.ClosedJaxpr:
    """Folds the micro-batch's index into raw keys, where these are wrapped.

    Args:
      closed: the jaxpr; its last input is the index.
      first: the index of the first input that may be such a key.
    """
    # Inputs, and what hands them on to the next stage.
    inputs = _jaxpr.descendants(
        closed.jaxpr,
        closed.jaxpr.invars[first:],
        lambda eqn, _: _boundaries.is_mark(eqn),
    )
    wraps = {
        id(eqn)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "random_wrap"
        and eqn.invars[0] in inputs
        and _rng.is_single_key(eqn.outvars[0].aval)
    }
    if not wraps:
        return closed

    def run(*args: Any) -> list[Any]:
        def folded(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
            (key,) = _jaxpr.bind(closed.jaxpr, eqn, operands)
            return [_rng.microbatch_key(key, args[-1])]

        def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
            return functools.partial(folded, eqn) if id(eqn) in wraps else None

        return _jaxpr.evaluate(closed, args, rule)

    return _jaxpr.retrace(closed, run)


def pair(result: Any, needed: str) -> Any:
    """Checks that a function returned a pair; gives it back.

    Raises:
      TypeError: if it did not, with what it needed to return.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"the function must return {needed}; it returned {shape_text(result)}"
        )
    return result


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)

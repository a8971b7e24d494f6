"""Traces the user's function as one jaxpr, and says which stages run each equation.

    (*params, *captured arrays, *batch, micro-batch index, *folded numbers)
        -> (*loss, *loss weight, *aux, *penalty)

or, where the loss is that of the mini-batch at once, which `_whole_batch` splits off,

        -> (*arrays that are joined, *state, *values that are computed once per step)

The arrays that the function captures, as it closes over them, count as parameters that
are not trained.

An equation is run by one stage, by each stage that reads its results, or once per step:

    has effects   of a batch   is cheap   reduces parameters    EqnKind
    yes           any          any        any                   STAGE
    no            yes          no         any                   STAGE
    no            yes          yes        any                   COPY, behind copies
    no            no           no         any                   ONCE
    no            no           yes        yes                   ONCE
    no            no           yes        no                    COPY

Here *of a batch* is what follows from the inputs of a micro-batch or from an effect. A
cheap equation of a batch behind one of a stage is of a stage too. Each stage that reads
a copy computes it. Equations of the kind STAGE are divided among stages.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments._objective import as_loss_weight
from .._jaxprs import _inlining, _jaxpr, _min_cut
from .._jaxprs._counted_rows import scan_along_counted
from .._jaxprs._jaxpr import is_inexact
from .._jaxprs._primitives import REDUCTIONS
from .._layers import _rng
from .._layers._text import shape_text
from . import _boundaries, _checkpoints
from ._folded_numbers import lift_folded_numbers
from ._raw_keys import fold_raw_keys
from ._refs import replace_refs

PyTree = Any

_user_context = jax.make_user_context()
READS_DEPEND_ON_SIZE = (
    "the function reads other parameters, or other arrays from outside, for "
    "micro-batches of another size; give a batch that num_microbatches divides"
)


class EqnKind(enum.StrEnum):
    """The way in which stages run an equation."""

    STAGE = "stage"  # in one stage
    COPY = "copy"  # in each stage that reads its results, since it is cheap
    ONCE = "once"  # in no stage: once per step, where its parameters are


class StateInput(NamedTuple):
    """State that a function changes, as an input of its micro-batches.

    Attributes:
      param_index: its index among the parameters, of which nobody reads this one.
      batch_index: the index among the batch inputs of what is read in its place.
      aux_index: the index of its new value among the results besides the loss.
    """

    param_index: int
    batch_index: int
    aux_index: int


@dataclass(frozen=True)
class Tail:
    """The part of a function that runs once per step: see `_whole_batch`.

    Attributes:
      closed: ``(*weights, *joined arrays) -> (loss, *aux)``.
      weights: the parameters that it reads, and values that are computed once per step,
        as variables of the function that it was split off.
      axes: the axis on which each array is joined, or a `Reduction` of it; ``None``: it
        is the same for all micro-batches.
      aux: specs of aux.
    """

    closed: core.ClosedJaxpr
    weights: Sequence[core.Var]
    axes: Sequence[Any]
    aux: PyTree


@dataclass(frozen=True)
class TracedFunction:
    """A function on micro-batches of one size.

    `trace_function` makes one, and later steps of `_pipelined/_tracing` complete it. So
    what follows from an attribute is true from the step on that sets it:
    `vars_of_batch` and `eqn_kinds` from pass 3 on.

    Attributes:
      closed: its jaxpr: see the head of the file. The loss is the part that follows
        from examples; the penalty is the sum of its other terms, if there are any.
      num_params: the number of parameters, captured arrays among them: the inputs that
        are the same for all micro-batches.
      aux: specs of the results besides the loss.
      captured_arrays: the arrays that the function closes over, its last parameters.
      has_loss: True if its first result is a loss, or its tail computes one.
      is_weighted: True if the next result is the loss weight: the sum of losses is
        divided by the sum of loss weights.
      folded_numbers: the numbers that are folded into keys: see `_folded_numbers`.
      fixed_eqn_kinds: the kinds of the equations, once they are fixed for all sizes of
        micro-batches, or the equations were moved: see `_eqn_order`; ``None`` before.
      num_model_inputs: the number of leaves of the input of a model, which are the
        first batch inputs; 0 for a loss function, and before pass 3.
      num_uncopied_inputs: the number of batch inputs, the first ones, from which no
        equation is copied: the input of a list of layers, which the first stage alone
        reads, and its targets, which the last stage does; set in pass 3.
      has_pieces: True if parameters are in pieces: see `_layer_scans`; set in pass 5.
      captures_batch: True if no argument is split by examples, so that these are in the
        arrays that the function closes over; set in pass 3.
      tail: the loss of the mini-batch at once, if there is one; set in pass 7.
      state_inputs: state that it changes, and returns: see `_example_state`; set in
        pass 5.
    """

    closed: core.ClosedJaxpr
    num_params: int
    aux: PyTree
    captured_arrays: Sequence[Any] = ()
    has_loss: bool = True
    is_weighted: bool = False
    folded_numbers: Sequence[Any] = ()
    fixed_eqn_kinds: Sequence[EqnKind] | None = None
    num_model_inputs: int = 0
    num_uncopied_inputs: int = 0
    has_pieces: bool = False
    captures_batch: bool = False
    tail: Tail | None = None
    state_inputs: tuple[StateInput, ...] = ()

    @property
    def loss(self) -> list[Any]:
        """The loss, if a stage computes one."""
        return self.closed.jaxpr.outvars[: self._num_losses]

    @property
    def loss_dtype(self) -> Any:
        """The dtype of the loss, of a function that has one."""
        closed = self.closed if self.tail is None else self.tail.closed
        return closed.out_avals[0].dtype

    @property
    def joined(self) -> list[core.Var]:
        """The results that the tail reads, joined, if there is one."""
        num_joined = 0 if self.tail is None else len(self.tail.axes)
        return self.closed.jaxpr.outvars[:num_joined]

    @property
    def loss_weight(self) -> list[Any]:
        """The loss weight, if the loss is weighted."""
        end = self._num_losses + self.is_weighted
        return self.closed.jaxpr.outvars[self._num_losses : end]

    @property
    def aux_vars(self) -> list[Any]:
        """The results besides the loss and the loss weight."""
        end = self._num_loss_results + len(jax.tree.leaves(self.aux))
        return self.closed.jaxpr.outvars[self._num_loss_results : end]

    @property
    def _num_losses(self) -> int:
        return self.has_loss and self.tail is None

    @property
    def _num_loss_results(self) -> int:
        """The number of results before aux."""
        if self.tail is not None:
            return len(self.joined)
        return self._num_losses + self.is_weighted

    @property
    def outputs(self) -> list[Any]:
        """The results that stages compute: all of a loss, or of a tail, and aux."""
        return self.closed.jaxpr.outvars[: self._num_loss_results] + self.aux_vars

    @property
    def ends(self) -> list[Any]:
        """The results of stages that have a cotangent, if they follow from parameters.

        They are the loss; or what the tail reads; without a loss, all results.
        """
        if self.tail is not None:
            return self.joined
        return self.loss if self.has_loss else self.aux_vars

    @property
    def once_results(self) -> list[core.Var]:
        """The results that are computed once per step: a penalty, or what a tail reads.

        A penalty is the sum of the terms of the loss that depend on no example.
        """
        return self.closed.jaxpr.outvars[len(self.outputs) :]

    @property
    def penalty(self) -> list[core.Var]:
        """The penalty, if there is one."""
        return self.once_results if self.tail is None else []

    @cached_property
    def params(self) -> list[core.Var]:
        """The parameters, and behind them the captured arrays."""
        return self.closed.jaxpr.invars[: self.num_params]

    @cached_property
    def batch_inputs(self) -> list[core.Var]:
        """The inputs that a micro-batch brings."""
        return self.closed.jaxpr.invars[self.num_params :]

    @cached_property
    def model_inputs(self) -> set[core.Var]:
        """The batch inputs that are the input of a model."""
        return set(self.batch_inputs[: self.num_model_inputs])

    @cached_property
    def captured_vars(self) -> list[core.Var]:
        """The parameters that are captured arrays."""
        return self.params[self.num_params - len(self.captured_arrays) :]

    @cached_property
    def vars_of_batch(self) -> set[core.Var]:
        """The variables that a micro-batch computes, anew from its inputs or an effect.

        A captured batch is such an input.
        """
        captured = self.captured_vars if self.captures_batch else []
        effects = _jaxpr.outvars_of(
            eqn for eqn in self.closed.jaxpr.eqns if eqn.effects
        )
        return self.descendants([*self.batch_inputs, *captured, *effects])

    @cached_property
    def vars_of_params(self) -> set[core.Var]:
        """The variables that are computed after parameters."""
        return self.descendants(self.params)

    def descendants(self, inputs: Sequence[core.Var]) -> set[core.Var]:
        """The variables that are computed after some inputs, and these."""
        return _jaxpr.descendants(self.closed.jaxpr, inputs)

    def constant_jaxpr(self, atom: Any) -> core.ClosedJaxpr | None:
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
    def eqn_kinds(self) -> Sequence[EqnKind]:
        """The kind of each equation.

        See the table at the head of the file.
        """
        if self.fixed_eqn_kinds is not None:
            return self.fixed_eqn_kinds
        return [self.classify(eqn) for eqn in self.closed.jaxpr.eqns]

    def classify(self, eqn: core.JaxprEqn) -> EqnKind:
        """The kind of an equation, if it is not fixed."""
        operands = _jaxpr.variables(eqn.invars)
        if eqn.effects:
            return EqnKind.STAGE
        if not operands.isdisjoint(self.vars_of_batch):
            # A copy must follow from the batch through copies.
            is_copied = is_copyable(eqn) and operands <= self._copyable_vars
            return EqnKind.COPY if is_copied else EqnKind.STAGE
        is_constant = operands.isdisjoint(self.vars_of_params)
        is_reduction = eqn.primitive.name in REDUCTIONS
        is_copied = is_copyable(eqn) and (is_constant or not is_reduction)
        return EqnKind.COPY if is_copied else EqnKind.ONCE

    @cached_property
    def _copyable_vars(self) -> set[core.Var]:
        """The variables that follow from the batch by cheap equations alone."""
        jaxpr = self.closed.jaxpr
        roots = [*jaxpr.constvars, *self.batch_inputs[self.num_uncopied_inputs :]]
        if self.captures_batch:
            roots += self.captured_vars
        of_inputs = self.vars_of_batch | self.vars_of_params

        def may_copy(eqn: core.JaxprEqn) -> bool:
            is_constant = of_inputs.isdisjoint(_jaxpr.variables(eqn.invars))
            return not eqn.effects and (is_constant or is_copyable(eqn))

        return _jaxpr.computable_from(jaxpr, roots, may_copy)


def is_copyable(eqn: core.JaxprEqn) -> bool:
    """True if each stage may compute an equation for itself.

    It is cheap, or makes keys, which stay in the programs that read them. It is no
    `jax.custom_vjp`, whose backward need not be linear: what adds up cotangents of
    several stages and micro-batches must call it once.
    """
    avals = list[Any](var.aval for var in eqn.outvars)
    if all(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
        return True
    return _min_cut.is_cheap(eqn) and not _has_custom_vjp(eqn)


def _has_custom_vjp(eqn: core.JaxprEqn) -> bool:
    """True if an equation is a `jax.custom_vjp`, or calls one."""
    is_custom_vjp = eqn.primitive.name.startswith("custom_vjp_call")
    return is_custom_vjp or any(map(_has_custom_vjp, _jaxpr.inner_eqns(eqn)))


def trace_function(
    function: Callable[..., Any],
    params: PyTree,
    args: Sequence[PyTree],
    *,
    is_split: Sequence[bool],
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
      is_split: one bool per leaf of these; True if it is split by examples.
      num_stages: the number of stages that it will be divided into, or about that.
      has_aux: True if it returns something besides the loss.
      has_loss: True if it returns a loss; else all that it returns is aux.
      is_weighted: True if the loss is a pair, of a total and a weight.
      folds_params: True if keys among the parameters are folded too.

    Returns:
      The function. The index of the micro-batch is folded into its keys, and its loss
      is not scaled yet: see `_penalty`.
    """

    @functools.wraps(function)
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
        loss, aux = check_pair(result, "(loss, aux)") if has_aux else (result, ())
        weights = []
        if is_weighted:
            loss, *weights = check_pair(loss, "(total, weight) in place of a loss")
        if not hasattr(loss, "dtype") or loss.shape or not _is_floating(loss):
            raise TypeError(
                f"the function must return a scalar loss of a floating dtype; it "
                f"returned {shape_text(loss)}; for a loss of each example type "
                f".mean(), for (loss, aux) has_aux=True, for (total, weight) "
                f"reduction='weighted'"
            )
        weights = [as_loss_weight(weight, loss) for weight in weights]
        return loss, weights, jax.tree.map(jnp.asarray, aux)

    index_spec = jax.ShapeDtypeStruct((), jnp.int32)
    with _user_context(object()):
        closed, (_, _, aux) = _inlining.trace(run, params, tuple(args), index_spec)
    # First, as it tells what nobody reads but a mark.
    closed = _boundaries.read_first_marks(closed)
    num_params = len(jax.tree.leaves(params))
    # Then, as refs hide what follows from what, and what nobody reads would hold
    # parameters in its stage, or a stack of them together.
    closed = replace_refs(closed)
    closed = _boundaries.drop_unread_eqns(closed)
    # A scan inside of a call goes along nothing: only those outside are looked at.
    closed = _checkpoints.inline_checkpoints(closed, num_stages)
    if num_stages > 1:
        closed = scan_along_counted(closed)
    may_be_key = [folds_params] * num_params
    may_be_key += [not split for split in is_split]
    # Raw keys are folded while the index, which is no key, is the last input. Numbers
    # come behind it, and arrays at last, since they shift the inputs of a micro-batch.
    closed = fold_raw_keys(closed, [*may_be_key, False])
    closed, numbers = lift_folded_numbers(closed)
    closed, constants = _with_arrays_as_inputs(closed, num_params)
    return TracedFunction(
        closed=closed,
        num_params=num_params + len(constants),
        aux=aux,
        captured_arrays=constants,
        has_loss=has_loss,
        is_weighted=is_weighted,
        folded_numbers=numbers,
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
        raise ValueError(READS_DEPEND_ON_SIZE)
    return traced_functions


def _have_equal_arrays(traced_functions: Sequence[TracedFunction]) -> bool:
    first = traced_functions[0]
    return all(
        _are_equal(first.captured_arrays, traced.captured_arrays)
        for traced in traced_functions[1:]
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
    arrays = [*zip(traced.captured_vars, traced.captured_arrays, strict=True)]
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
        captured_arrays=[array for var, array in arrays if var not in numpy_arrays],
    )


def check_pair(result: Any, needed: str) -> Any:
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

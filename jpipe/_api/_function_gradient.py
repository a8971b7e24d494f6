"""`jpipe.value_and_grad`: any loss function through a pipeline."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._arguments import _call, _stacked
from .._arguments._static import StaticArgument, without_statics
from .._arguments._trainable import Trainable
from .._arguments._wrong_call import (
    describe_argument,
    explain_function_call,
    note_arguments,
    signature_of,
)
from .._check._report import CheckReport
from .._instructions._program import Program
from .._jaxprs._jaxpr import is_inexact
from .._lower import _join
from .._lower._microbatch_outputs import MicrobatchOutputs
from .._messages import WarnOnce
from .._partition._partition import Partition
from .._partition._stage_placement import StagePlacement
from .._pipelined._feed import Feed
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._user_function import PlainFunction
from .._placed._mesh_context import outside_of_meshes
from ..planning._describe import describe, describe_function, describe_tail
from ..planning._plan_record import Plan
from ..schedules import Timeline
from . import _loss_function_check
from ._compile_report import Report, compile_report
from ._custom_loop import CustomLoop
from ._handle import Handle, explain_method
from ._step_profile import profile_actions

PyTree = Any
_UNKNOWN = "the stages of a function are known once it was placed or called"
# An argument of so many different numbers may be meant as a constant of the function.
_MOST_NUMBERS = 3


class FunctionGradient(CustomLoop, Handle):
    """``grad_fn(params, *args) -> (loss, grads)``: see `jpipe.value_and_grad`.

    Args:
      function: the loss function.
      partition: the stages in which it is divided.
      argnums: the position of the parameters among its arguments, or several positions.
      has_aux: True if it returns aux beside the loss.
      aux_axes: the axes on which aux of micro-batches is joined.
      in_axes: the axes of the examples in its arguments.
      reduction: the reduction over the examples that the loss is.
      trainable: the selection of parameters that have a gradient.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        partition: Partition,
        *,
        argnums: int | Sequence[int],
        has_aux: bool,
        aux_axes: Any,
        in_axes: Any,
        reduction: str,
        trainable: Trainable,
    ) -> None:
        super().__init__(partition.devices)
        self._function = function
        self._partition = partition
        self._reduction = reduction
        self._has_aux = has_aux
        self._trainable = trainable
        self._in_axes = in_axes
        self._has_one_argnum = not isinstance(argnums, Sequence)
        self._argnums = _positions(argnums)
        self._argument_names = _positional_names(function)

        def make_joins(results: MicrobatchOutputs) -> list[_join.Join]:
            return _join.join_aux(aux_axes, results)

        @functools.wraps(function)
        def call(params: PyTree, *trees: PyTree) -> Any:
            args, kwargs = self._join_args(params, trees)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                names = _call.argument_names(len(args), (), self._argument_names)
                arguments = {**dict(zip(names, args, strict=False)), **kwargs}
                note_arguments(error, "fun", function, arguments)
                raise

        self._user_function = PlainFunction(
            call,
            make_joins,
            argnums=self._argnums,
            argument_names=self._argument_names,
            in_axes=in_axes,
            has_aux=has_aux,
            reduction=reduction,
            check_signature=_VaryingNumbersWarning(self._argnums, self._argument_names),
            explain=self._explain,
        )
        self._pipelined_function = PipelinedFunction(
            self._user_function, partition, self._trained
        )
        self._feed = Feed(
            self._last_placement, "jpipe.value_and_grad(fun)", is_local=False
        )

    @outside_of_meshes
    @explain_method("grad_fn(params, *args, **kwargs), parameters by position")
    def __call__(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Computes the loss and its gradients; returns as soon as both are dispatched.

        Args:
          params: the parameters, each leaf in its place: see `place`. With ``argnums``
            they stand at these positions among all arguments.
          *args: the mini-batch, on the host or any device.
          **kwargs: arguments that the function takes by name.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``; the gradients have the
          structure of ``params`` and are on the same devices.

        Raises:
          ValueError: if parameters are not in place, or the batch does not fit.
          TypeError: if a leaf is not an array.
        """
        params, trees = self._split_args((params, *args), kwargs)
        specialization = self._pipelined_function.specialize(params, *trees)
        leaves = specialization.check_arguments(params, trees, "params")
        self._feed(trees)  # which compares the mini-batches of all processes
        outputs = specialization.program(leaves)

        results = specialization.unpack(outputs)
        (loss,) = results.loss
        aux = specialization.aux_tree.unflatten(results.aux)
        param_indices = specialization.layout.param_indices
        grads = [results.grads.get(index) for index in param_indices]
        value = (loss, aux) if self._has_aux else loss
        return value, specialization.layout.join_params(grads)

    @outside_of_meshes
    @explain_method("grad_fn.place(params, *args, **kwargs), parameters by position")
    def place(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Puts each parameter onto the device of the first stage that reads it.

        Args:
          params: the parameters, anywhere.
          *args: a mini-batch, or `jax.ShapeDtypeStruct` leaves like it.
          **kwargs: arguments that the function takes by name, likewise.

        Returns:
          The parameters in place; with a sequence of ``argnums`` a tuple of them.
        """
        params, trees = self._split_args((params, *args), kwargs)
        return self._pipelined_function.place(params, *trees)

    @outside_of_meshes
    @explain_method("grad_fn.compile(params, *args, **kwargs), parameters by position")
    def compile(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Report:
        """Compiles all programs of a call ahead.

        Args:
          params: the parameters, or `jax.ShapeDtypeStruct` leaves like them.
          *args: a mini-batch, likewise.
          **kwargs: arguments that the function takes by name, likewise.

        Returns:
          A report of bytes, flops and seconds. It prints as a table.
        """
        return compile_report(lambda: self._program(params, *args, **kwargs))

    @outside_of_meshes
    @explain_method("grad_fn.check(params, *args, **kwargs), parameters by position")
    def check(
        self,
        params: PyTree,
        /,
        *args: PyTree,
        microbatch_sizes: Sequence[int] | None = None,
        tolerance: float | None = None,
        **kwargs: PyTree,
    ) -> CheckReport:
        """Runs the function at once and in micro-batches, and compares.

        It compares the loss and its gradient by ``params``, on the first device, which
        needs room for all parameters: a few examples will do. All random numbers that
        follow from keys are the middle one: a dropout drops nothing.

        Args:
          params: the parameters, anywhere.
          *args: a mini-batch, of two examples at least.
          microbatch_sizes: the number of examples of each micro-batch, such as
            ``(4, 8)``; default: two of different sizes.
          tolerance: the largest difference that passes, relative to the largest number
            of the same array; default: rounding errors.
          **kwargs: arguments that the function takes by name.

        Returns:
          A report. It prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch or ``microbatch_sizes`` do not fit.
        """
        params, trees = self._split_args((params, *args), kwargs)
        params = _stacked.gather_tree(params)
        return _loss_function_check.check_loss_function(
            self._user_function,
            self._partition,
            self._trained,
            params,
            trees,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )

    @outside_of_meshes
    @explain_method("grad_fn.profile(params, *args, **kwargs), parameters by position")
    def profile(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Timeline:
        """Runs a call with each action timed.

        Each action is waited for, so the whole takes somewhat longer than a call.

        Args:
          params: as for a call.
          *args: as for a call.
          **kwargs: as for a call.

        Returns:
          The measured timeline, in seconds and bytes: see `TrainStep.profile`.

        Raises:
          ValueError: if parameters are not in place, the batch does not fit, or there
            are several processes.
          TypeError: if a leaf is not an array.

        Example:
          >>> import jax.numpy as jnp, jpipe
          >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
          >>> grad_fn = jpipe.value_and_grad(loss_fn, num_microbatches=2, num_stages=1)
          >>> x = jnp.ones((4, 3))
          >>> w = grad_fn.place(jnp.ones((3, 2)), x)
          >>> grad_fn.profile(w, x).makespan > 0
          True
        """
        params, trees = self._split_args((params, *args), kwargs)
        specialization = self._pipelined_function.specialize(params, *trees)
        leaves = specialization.check_arguments(params, trees, "params")
        return profile_actions(specialization, leaves)

    @outside_of_meshes
    def _program(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Program:
        """The program that a call with such arguments runs."""
        params, trees = self._split_args((params, *args), kwargs)
        return self._pipelined_function.specialize(params, *trees).program

    def _split_args(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The parameters, and the mini-batch as one tree of arrays per argument.

        Raises:
          ValueError: if there are too few arguments.
          TypeError: if a static value is not hashable.
        """
        if len(args) <= max(self._argnums):
            signature = signature_of(self._function) or "(params, *args)"
            raise ValueError(
                f"argnums={max(self._argnums)} is argument {max(self._argnums)} of the "
                f"function, by position, and {len(args)} are given so; type "
                f"grad_fn{signature}, parameters by position"
            )
        param_args = [args[i] for i in self._argnums]
        batch_args = [arg for i, arg in enumerate(args) if i not in self._argnums]
        names = _call.argument_names(
            len(batch_args), self._argnums, self._argument_names
        )
        trees = _call.as_arrays(self._in_axes, batch_args, kwargs, names)
        return param_args[0] if self._has_one_argnum else tuple(param_args), trees

    def _join_args(
        self, params: PyTree, trees: Sequence[PyTree]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """The arguments of the loss function: undoes `_split_args`."""
        *args, kwargs = without_statics(trees)
        param_args = [params] if self._has_one_argnum else params
        for i, tree in sorted(zip(self._argnums, param_args, strict=True)):
            args.insert(i, tree)
        return args, kwargs

    def _explain(
        self, error: Exception, params: PyTree, trees: Sequence[PyTree]
    ) -> None:
        """Explains an error by arguments that the loss function does not take."""
        if isinstance(error, TypeError) or not jax.tree.leaves(trees):
            args, kwargs = self._join_args(params, trees)
            explain_function_call(self._function, args, kwargs)

    @property
    @outside_of_meshes
    def plan(self) -> Plan:
        """The plan of the pipeline, in names and numbers.

        Raises:
          ValueError: if the function was not placed or called yet.
        """
        specialization = self._pipelined_function.last_specialization
        if specialization is None:
            raise ValueError(_UNKNOWN)
        return describe(describe_function(specialization))

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return (
            f"<jpipe.FunctionGradient: {name}, {self._partition.num_microbatches} "
            f"micro-batches, reduction {self._reduction!r}>"
        )

    @outside_of_meshes
    def __str__(self) -> str:
        if self._pipelined_function.last_specialization is None:
            description = f"{self!r}\n{_UNKNOWN}"
        else:
            specialization = self._pipelined_function.last_specialization
            description = f"{self.plan}{describe_tail(specialization)}"
        return (
            f"{description}\na call does not check the loss; "
            f"grad_fn.check(params, *args) runs it at once and in micro-batches, and "
            f"compares"
        )

    def _last_placement(self) -> StagePlacement | None:
        """Returns the placement of the last call; ``None`` before the first."""
        specialization = self._pipelined_function.last_specialization
        return None if specialization is None else specialization.placement

    def _trained(self, specs: PyTree) -> list[bool]:
        _check_params(specs)
        (is_trained,) = self._trainable.is_trained([], ({"params": specs},))
        return jax.tree.leaves(is_trained)


class _VaryingNumbersWarning:
    """Warns of a Python number that differs from call to call.

    Args:
      argnums: the positions of the parameters among the arguments.
      argument_names: the names of the arguments by position, as far as they are known.
    """

    def __init__(self, argnums: Sequence[int], argument_names: Sequence[str]) -> None:
        self._argnums = argnums
        self._argument_names = argument_names
        # name of an argument -> the different numbers that were passed
        self._numbers: dict[str, set[complex]] = {}
        self._warn_once = WarnOnce()

    def __call__(self, params: PyTree, args: Sequence[PyTree]) -> None:
        """Warns of an argument for whose different numbers programs were built."""
        *by_position, keywords = args
        names = _call.argument_names(
            len(by_position), self._argnums, self._argument_names
        )
        arguments = {**dict(zip(names, by_position, strict=False)), **keywords}
        for name, value in arguments.items():
            if not isinstance(value, StaticArgument):
                continue
            if value.value_type not in (int, float, complex):
                continue
            numbers = self._numbers.setdefault(name, set())
            numbers.add(value.value)
            if len(numbers) > _MOST_NUMBERS:
                self._warn_once(
                    name,
                    f"{name} was {len(numbers)} different numbers, and the function is "
                    f"compiled for each; to compile it once, type None for it in "
                    f"in_axes=, as in in_axes=(0, None), or by name in_axes="
                    f"jpipe.inputs(0, scale=None)",
                )


def _positional_names(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a function that may be given by position."""
    signature = signature_of(function)
    if signature is None:
        return []
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _positions(argnums: Any) -> tuple[int, ...]:
    """The positions of the parameters among the arguments of a function.

    Raises:
      TypeError: if these are no integers.
      ValueError: if there is none, or one is negative or named twice.
    """
    argnums_list = argnums if isinstance(argnums, Sequence) else [argnums]
    try:
        positions = tuple(operator.index(argnum) for argnum in argnums_list)
    except TypeError:
        raise TypeError(
            f"argnums is {describe_argument(argnums)}; needs the position of an "
            f"argument, such as argnums=0, or several, such as argnums=(0, 1)"
        ) from None
    if not positions or min(positions) < 0 or len({*positions}) < len(positions):
        raise ValueError(
            f"argnums={argnums!r}: needs the position of an argument, from 0 on, or "
            f"several different ones, such as argnums=(0, 1)"
        )
    return positions


def _check_params(specs: PyTree) -> None:
    """Checks that all leaves of the parameters have a gradient."""
    from flax import nnx

    if isinstance(specs, nnx.Module):
        raise TypeError(
            "params is an nnx.Module, whose state would be lost; split it: graphdef, "
            "params, rest = nnx.split(module, nnx.Param, ...), give params first and "
            "rest with in_axes=None, and return in aux what changes"
        )
    not_floating = [
        f"params{jax.tree_util.keystr(path)} is {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(specs)
        if not is_inexact(leaf)
    ]
    if not_floating:
        raise TypeError(
            f"parameters need a floating dtype: {'; '.join(not_floating[:8])}; give "
            f"the others as an argument of their own, with in_axes=None"
        )

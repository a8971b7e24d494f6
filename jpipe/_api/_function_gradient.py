"""`jpipe.value_and_grad`: any loss function through a pipeline."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._arguments import _call
from .._arguments._static import StaticArgument, without_statics
from .._arguments._trainable import Trainable
from .._check._report import CheckReport
from .._instructions._program import Program
from .._jaxprs._jaxpr import is_inexact
from .._lower import _join
from .._messages import WarnOnce
from .._partition._partition import Partition
from .._pipelined._feed import Feed
from .._pipelined._function_spec import FunctionSpec
from .._pipelined._pipelined_function import PipelinedFunction
from .._placed._mesh_context import outside_of_meshes
from .._trace._microbatch_outputs import MicrobatchOutputs
from ..planning._describe import describe, describe_function
from ..planning._plan import Plan
from . import _loss_function_check
from ._compile_report import Report, compile_report
from ._custom_loop import CustomLoop

PyTree = Any
# So many values of an argument may be meant as constants of the function.
_MOST_NUMBERS = 3


class FunctionGradient(CustomLoop):
    """``grad_fn(params, *args) -> (loss, grads)``: see `jpipe.value_and_grad`.

    Args:
      function: the loss function.
      partition: in which stages it is divided.
      argnums: which argument is the parameters, or which ones are.
      has_aux: whether it returns something besides the loss.
      aux_axes: on which axes that is joined.
      in_axes: where the examples are.
      reduction: what the loss is.
      trainable: what has a gradient.
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
        super().__init__(partition.places)
        self._function = function
        self._partition = partition
        self._reduction = reduction
        self._has_aux = has_aux
        self._trainable = trainable
        self._in_axes = in_axes
        self._is_one = not isinstance(argnums, Sequence)
        self._argnums = _positions(argnums)

        def joins(results: MicrobatchOutputs) -> list[_join.Join]:
            return _join.of_aux(aux_axes, results)

        self._spec = FunctionSpec(
            self._composed,
            joins,
            argnums=self._argnums,
            in_axes=in_axes,
            has_aux=has_aux,
            reduction=reduction,
            check=_FixedNumbers(self._argnums),
        )
        self._pipelined = PipelinedFunction(self._spec, partition, self._trained)
        self._feed = Feed(
            lambda: self._pipelined.last and self._pipelined.last.pipe, False
        )

    @outside_of_meshes
    def __call__(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Returns as soon as the work is dispatched.

        Args:
          params: the parameters, each leaf in its place: see `place`. With ``argnums``
            these are where the function has them.
          *args: the rest of a mini-batch, on the host or any device.
          **kwargs: what the function takes by name.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``; the gradients have the
          structure of ``params`` and are where these are.

        Raises:
          ValueError: if parameters are not in place, or the batch does not fit.
          TypeError: if a leaf is not an array.
        """
        params, trees = self._apart((params, *args), kwargs)
        built = self._pipelined(params, *trees)
        given = built.given(params, trees, "params")
        self._feed(trees)
        loss, aux, found = built.returned(built.program(given))
        grads = [next(found) if yes else None for yes in built.layout.trained]
        value = (loss, aux) if self._has_aux else loss
        return value, jax.tree.structure(params).unflatten(grads)

    @outside_of_meshes
    def place(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Puts each parameter onto the device of the first stage that reads it.

        Args:
          params: the parameters, anywhere.
          *args: the rest of a mini-batch, or `jax.ShapeDtypeStruct` leaves like it.
          **kwargs: what the function takes by name, likewise.

        Returns:
          The parameters in place; with several ``argnums`` a tuple of them.
        """
        params, trees = self._apart((params, *args), kwargs)
        return self._pipelined.place(params, *trees)

    @outside_of_meshes
    def program(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Program:
        """What a call with such arguments runs."""
        params, trees = self._apart((params, *args), kwargs)
        return self._pipelined(params, *trees).program

    @outside_of_meshes
    def compile(self, params: PyTree, /, *args: PyTree, **kwargs: PyTree) -> Report:
        """Compiles all programs ahead, and returns what is known of them.

        Args:
          params: the parameters, or `jax.ShapeDtypeStruct` leaves like them.
          *args: the rest of a mini-batch, likewise.
          **kwargs: what the function takes by name, likewise.
        """
        return compile_report(lambda: self.program(params, *args, **kwargs))

    @outside_of_meshes
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

        Compared are the loss and its gradient by ``params``, on the first device, which
        needs room for all of them: a few examples will do. Of keys all random numbers
        are the middle one: a dropout leaves out nothing.

        Args:
          params: the parameters, anywhere.
          *args: the rest of a mini-batch, of two examples at least.
          microbatch_sizes: how many examples each micro-batch has, such as
            ``(4, 8)``; default: two of different sizes.
          tolerance: how far numbers may be apart, relative to the largest beside them;
            default: as far as rounding explains.
          **kwargs: what the function takes by name.

        Returns:
          What was found: prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch or ``microbatch_sizes`` do not fit.
        """
        params, trees = self._apart((params, *args), kwargs)
        return _loss_function_check.check_loss_function(
            self._spec,
            self._partition,
            self._trained,
            params,
            trees,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )

    def _apart(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The parameters, and the other arguments as trees of arrays.

        Raises:
          ValueError: if there are too few arguments.
          TypeError: if a value is fixed and not hashable.
        """
        if len(args) <= max(self._argnums):
            raise ValueError(
                f"argnums={max(self._argnums)} is argument {max(self._argnums)} of the "
                f"function, by position, and {len(args)} are given so"
            )
        chosen = [args[i] for i in self._argnums]
        others = [arg for i, arg in enumerate(args) if i not in self._argnums]
        trees = _call.as_arrays(self._in_axes, others, kwargs, self._argnums)
        return chosen[0] if self._is_one else tuple(chosen), trees

    def _composed(self, params: PyTree, *trees: PyTree) -> Any:
        """The loss function of what `_apart` gives."""
        *args, kwargs = without_statics(trees)
        chosen = [params] if self._is_one else params
        for i, tree in sorted(zip(self._argnums, chosen, strict=True)):
            args.insert(i, tree)
        return self._function(*args, **kwargs)

    @property
    @outside_of_meshes
    def plan(self) -> Plan:
        """Who runs what, in names and numbers; with more details the more is known.

        Raises:
          ValueError: before it is known in how many stages the function is divided.
        """
        if self._pipelined.last is None:
            raise ValueError(
                "the stages of a function are known once it was placed or called"
            )
        return describe(describe_function(self._pipelined.last))

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return (
            f"<jpipe.value_and_grad: {name}, {self._partition.num_microbatches} "
            f"micro-batches, reduction {self._reduction!r}>"
        )

    @outside_of_meshes
    def __str__(self) -> str:
        known = f"{self!r}\nthe stages are known once it is called or placed"
        if self._pipelined.last is not None:
            known = str(self.plan)
        return (
            f"{known}\na call does not check the loss; grad_fn.check(params, *args) "
            f"runs it at once and in micro-batches, and compares"
        )

    def _trained(self, specs: PyTree) -> list[bool]:
        _check_params(specs)
        (marks,) = self._trainable.marks([], ({"params": specs},))
        return jax.tree.leaves(marks)


class _FixedNumbers:
    """Warns of a Python number that is another one at each call.

    Args:
      argnums: the positions of the parameters among the arguments.
    """

    def __init__(self, argnums: Sequence[int]) -> None:
        self._argnums = argnums
        # name of an argument -> the numbers that it was
        self._numbers: dict[str, set[complex]] = {}
        self._warn_once = WarnOnce()

    def __call__(self, params: PyTree, args: Sequence[PyTree]) -> None:
        """Warns where a program was built for each of several numbers."""
        *by_position, keywords = args
        names = _call.argument_names(len(by_position), self._argnums)
        arguments = {**dict(zip(names, by_position, strict=False)), **keywords}
        for name, value in arguments.items():
            if not isinstance(value, StaticArgument) or value.kind not in (
                int,
                float,
                complex,
            ):
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


def _positions(argnums: Any) -> tuple[int, ...]:
    """The positions of the parameters among the arguments of a function.

    Raises:
      TypeError: if these are no integers.
      ValueError: if there is none, or one is negative or named twice.
    """
    listed = argnums if isinstance(argnums, Sequence) else [argnums]
    positions = tuple(map(operator.index, listed))
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
    others = [
        f"params{jax.tree_util.keystr(path)} is {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(specs)
        if not is_inexact(leaf)
    ]
    if others:
        raise TypeError(
            f"parameters need a floating dtype: {'; '.join(others[:8])}; give the "
            f"others as an argument of their own, with in_axes=None"
        )

"""`jpipe.value_and_grad`: any loss function through a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._check._report import CheckReport
from ._functions._trainable import Trainable
from ._functions._weights import is_inexact
from ._instructions._program import Program
from ._loop import OwnLoop
from ._report import Report, compiled
from ._run._context import outside_of_meshes
from ._run._feed import Feed
from ._slices import _checked, _join
from ._slices._division import Division
from ._slices._sliced import Sliced, Work
from .planning._describe import describe, of_function
from .planning._plan import Plan

PyTree = Any


class FunctionGradient(OwnLoop):
    """``grad_fn(params, *args) -> (loss, grads)``: see `jpipe.value_and_grad`.

    Args:
      function: the loss function.
      division: in which stages it is divided.
      has_aux: whether it returns something besides the loss.
      aux_axes: on which axes that is joined.
      in_axes: where the examples are.
      reduction: what the loss is.
      trainable: what has a gradient.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        division: Division,
        *,
        has_aux: bool,
        aux_axes: Any,
        in_axes: Any,
        reduction: str,
        trainable: Trainable,
    ) -> None:
        self._function, self._division, self._reduction = function, division, reduction
        self._has_aux, self._trainable = has_aux, trainable
        self._places = division.places

        def joins(aux: PyTree, last: PyTree, sizes: Sequence[int]) -> list[_join.Join]:
            return _join.of_aux(aux_axes, aux, last, sizes)

        work = Work(
            function,
            joins,
            in_axes=in_axes,
            has_aux=has_aux,
            reduction=reduction,
        )
        self._sliced = Sliced(work, division, self._trained)
        self._feed = Feed(lambda: self._sliced.last and self._sliced.last.pipe, False)

    @outside_of_meshes
    def __call__(self, params: PyTree, *args: PyTree) -> Any:
        """Returns as soon as the work is dispatched.

        Args:
          params: the parameters, each leaf in its place: see `place`.
          *args: the rest of a mini-batch, on the host or any device.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``; the gradients have the
          structure of ``params`` and are where these are.

        Raises:
          ValueError: if parameters are not in place, or the batch does not fit.
          TypeError: if a leaf is not an array.
        """
        built = self._sliced(params, *args)
        given = built.given(params, args, "params")
        self._feed(args)
        loss, aux, found = built.returned(built.program(given))
        grads = [next(found) if yes else None for yes in built.layout.trained]
        value = (loss, aux) if self._has_aux else loss
        return value, jax.tree.structure(params).unflatten(grads)

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the first stage that reads it.

        Args:
          params: the parameters, anywhere.
          *args: the rest of a mini-batch, or `jax.ShapeDtypeStruct` leaves like it.

        Returns:
          The parameters in place.
        """
        return self._sliced.place(params, *args)

    @outside_of_meshes
    def program(self, params: PyTree, *args: PyTree) -> Program:
        """What a call with such arguments runs."""
        return self._sliced(params, *args).program

    @outside_of_meshes
    def compile(self, params: PyTree, *args: PyTree) -> Report:
        """Compiles all programs ahead, and returns what is known of them.

        Args:
          params: the parameters, or `jax.ShapeDtypeStruct` leaves like them.
          *args: the rest of a mini-batch, likewise.
        """
        return compiled(lambda: self.program(params, *args))

    @outside_of_meshes
    def check(
        self,
        params: PyTree,
        *args: PyTree,
        parts: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs the function at once and in micro-batches, and compares.

        Compared are the loss and its gradient by ``params``, on the first device, which
        needs room for all of them: a few examples will do. Of keys all random numbers
        are the middle one: a dropout leaves out nothing.

        Args:
          params: the parameters, anywhere.
          *args: the rest of a mini-batch, of two examples at least.
          parts: how many examples each micro-batch has, such as ``(4, 8)``; default:
            two of different sizes.
          tolerance: how far numbers may be apart, relative to the largest beside them;
            default: as far as rounding explains.

        Returns:
          What was found: prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch or ``parts`` do not fit.
        """
        return _checked.check(self._sliced, params, args, parts, tolerance)

    @property
    def plan(self) -> Plan:
        """Who runs what, in names and numbers; with more details the more is known.

        Raises:
          ValueError: before it is known in how many stages the function is divided.
        """
        if self._sliced.last is None:
            raise ValueError(
                "the stages of a function are known once it was placed or called"
            )
        return describe(of_function(self._sliced.last))

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return (
            f"<jpipe.value_and_grad: {name}, {self._division.num_microbatches} "
            f"micro-batches, reduction {self._reduction!r}>"
        )

    @outside_of_meshes
    def __str__(self) -> str:
        known = f"{self!r}\nthe stages are known once it is called or placed"
        if self._sliced.last is not None:
            known = str(self.plan)
        return (
            f"{known}\na call does not check the loss; grad_fn.check(params, *args) "
            f"runs it at once and in micro-batches, and compares"
        )

    def _trained(self, specs: PyTree) -> list[bool]:
        _check_params(specs)
        (marks,) = self._trainable.marks([], ({"params": specs},))
        return jax.tree.leaves(marks)


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

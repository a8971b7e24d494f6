"""Forward passes of one model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import errors

from ._cache import Axes
from ._functions import _microbatch
from ._layers import _linen, _rng
from ._layers._layer import Layer
from ._model_step import ADVICE, Apply, written
from ._slices import _join, _left
from ._slices._division import Division
from ._slices._program import Traced
from ._slices._sliced import Sliced, Work
from ._slices._state import Written

PyTree = Any


def forward(
    layer: Layer, division: Division, axes: Axes, apply: Apply, train: bool
) -> Sliced:
    """``(variables, x, rngs) -> (y, changed)``, of which ``changed`` is not computed.

    Args:
      layer: the model.
      division: in which stages it is divided.
      axes: where the examples are.
      apply: ``(variables, x, rngs, train) -> (y, changed)``.
      train: whether it is as in training.
    """

    def call(variables: PyTree, x: PyTree, rngs: _rng.Rngs) -> tuple[PyTree, PyTree]:
        return apply(variables, x, rngs, train)

    def joins(traced: Traced, sizes: Sequence[int]) -> list[_join.Join]:
        (y, _), shares = traced.aux, [size / sum(sizes) for size in sizes]
        if len(sizes) > 1:
            flat = _microbatch.flat_axes(axes.out_axes, y, "outputs", "out_axes")
            _microbatch.check_joinable(y, flat, sizes[0], axes.out_axes)
        return _join.by_axes(axes.out_axes, y, shares, "out")

    def writes(traced: Traced, specs: PyTree) -> tuple[int, list[Written]]:
        y, changed = traced.aux
        return len(jax.tree.leaves(y)), written(specs, changed)

    work = Work(
        call,
        joins,
        (axes.in_axes, None),
        has_loss=False,
        owner=layer.owner,
        names=("x", "rngs"),
        advice=ADVICE,
        writes=writes,
        left=partial(_left.say, train=train),
    )
    return Sliced(work, division)


def refuse_writes(error: Exception, owner: Any, variables: PyTree, train: bool) -> None:
    """Says what to type where a model of linen writes in evaluation, as caches do.

    Args:
      error: what a call of it raised.
      owner: the model.
      variables: what it was given.
      train: whether this is training.

    Raises:
      ValueError: if the error is one of these.
    """
    if train or not _linen.is_module(owner):
        return
    if "cache" in variables or isinstance(error, errors.ModifyScopeVariableError):
        raise ValueError(
            "a model of linen writes its variables in evaluation, as attention with a "
            "cache does (decode=True); a pipeline finds in evaluation where they stay, "
            "and gives outputs alone. Give it the model with decode=False, which has "
            "the same parameters; decode by model.apply({**cache, "
            "**jax.device_put(variables, device)}, token, mutable=['cache']), or list "
            "its layers. A batch norm needs use_running_average=not train"
        ) from error

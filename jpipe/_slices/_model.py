"""One model as a function of its variables and a mini-batch."""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
from flax import errors
from jax.tree_util import keystr

from .._functions import _microbatch
from .._functions._batch import Axes
from .._functions._objective import Objective
from .._jaxprs import _jaxpr
from .._layers import _batchnorm, _linen, _rng
from .._layers._layer import Layer, check_unchanged
from .._layers._parent import Parent
from .._layers._sequence import Made, called
from .._layers._stage import shapes
from . import _join, _left
from ._program import Traced
from ._sliced import Work
from ._state import Written

PyTree = Any
ADVICE = "variables = pipe.place(variables, x)"


class Model:
    """A model, and what is computed with it.

    Args:
      layer: the model.
      axes: where the examples are.
      num_parts: how many micro-batches there are, of all shards together.
    """

    def __init__(self, layer: Layer, axes: Axes, num_parts: int) -> None:
        self.layer, self.axes, self._num_parts = layer, axes, num_parts
        self.parent = Parent([layer], is_list=False)

    def init(self, key: chex.PRNGKey, x: PyTree, given: Sequence[PyTree]) -> Made:
        """Makes the variables: see `Sequential.init`."""
        (entry,) = given

        def run(handles: Sequence[Any], _: Any) -> Any:
            return called(self.layer, handles[0], entry, key, x)

        (y, own), (made,) = self.parent.init(key, given, run)
        return Made(y, [made or own], ())

    def _applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """What the model makes of a micro-batch, and what it changes."""
        check_unchanged([self.layer], "the model")
        with _batchnorm.merging(self._num_parts > 1), _batchnorm.recording():
            try:
                keys = _rng.streams(rngs)
                run = functools.partial(self._call, x, keys, train)
                y, (changed,) = self.parent((variables,), keys, train, run)
                return y, changed
            except Exception as error:
                _refuse_writes(error, self.layer.owner, variables, train)
                error.add_note(
                    f"raised by the model ({self.layer.name}), whose input was "
                    f"{shapes(x)}; x comes before the targets"
                )
                raise

    def _call(self, x: PyTree, keys: Any, train: bool, handles: Sequence[Any]) -> Any:
        return self.layer.call(handles[0], x, keys, train)

    def forward(self, train: bool) -> Work:
        """``(variables, x, rngs) -> (outputs, changed)``; nobody keeps what changed."""

        def call(variables: PyTree, x: PyTree, rngs: _rng.Rngs) -> Any:
            return self._applied(variables, x, rngs, train)

        def joins(traced: Traced, sizes: Sequence[int]) -> list[_join.Join]:
            (y, _), axes = traced.aux, self.axes.out_axes
            if len(sizes) > 1:
                flat = _microbatch.flat_axes(axes, y, "outputs", "out_axes")
                _microbatch.check_joinable(y, flat, sizes[0], axes)
            return _join.by_axes(axes, y, [size / sum(sizes) for size in sizes], "out")

        return Work(
            call,
            joins,
            (self.axes.in_axes, None),
            has_loss=False,
            has_input=True,
            is_of_model=True,
            owner=self.layer.owner,
            names=("x", "rngs"),
            advice=ADVICE,
            writes=_writes,
            left=functools.partial(_left.check, train=train),
        )

    def loss(self, objective: Objective, train: bool, outputs: list[PyTree]) -> Work:
        """``(variables, x, targets, rngs) -> (loss, (aux, what is written))``.

        Args:
          objective: the loss.
          train: whether this is training; evaluation writes nothing.
          outputs: receives specs of what the loss is given, of each trace.
        """

        def loss(variables: PyTree, x: PyTree, targets: PyTree, rngs: Any) -> Any:
            y, changed = self._applied(variables, x, rngs, train)
            outputs.append(jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y))
            value, aux = objective.of_part(y, targets)
            return value, (aux, changed)

        def joins(traced: Traced, sizes: Sequence[int]) -> list[_join.Join]:
            shares, (aux, _) = [size / sum(sizes) for size in sizes], traced.aux
            return _join.by_axes(objective.aux_axes, aux, shares)

        return Work(
            loss,
            joins,
            (self.axes.in_axes, self.axes.target_axes, None),
            has_aux=True,
            reduction=objective.reduction,
            has_input=True,
            is_of_model=True,
            owner=self.layer.owner,
            names=("x", "targets", "rngs"),
            advice=ADVICE,
            writes=_writes if train else None,
        )


def _writes(traced: Traced, variables: PyTree) -> tuple[int, list[Written]]:
    """What a call writes, by what it returns besides its output or the loss."""
    aux, changed = traced.aux
    flat = jax.tree_util.tree_leaves_with_path(variables)
    number = {path: i for i, (path, _) in enumerate(flat)}
    own = jax.tree_util.tree_leaves_with_path(changed, is_leaf=lambda x: x is None)
    return len(jax.tree.leaves(aux)), [
        Written(
            number[path], path, keystr(path, simple=True, separator="/"), path[0].key
        )
        for path, _ in own
    ]


def _refuse_writes(
    error: Exception, owner: Any, variables: PyTree, train: bool
) -> None:
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

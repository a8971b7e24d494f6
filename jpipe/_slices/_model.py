"""One model as a function of its variables and a mini-batch."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from .._functions import _microbatch
from .._functions._batch import Axes
from .._functions._objective import Objective
from .._jaxprs import _jaxpr
from .._layers import _batchnorm, _rng
from .._layers._layer import Layer, check_unchanged
from .._layers._stage import shapes
from . import _join
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
        # By the structures of variables and what a call writes, which leaves these are.
        self._written: dict[Any, list[tuple[int, Any]]] = {}

    def _applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """What the model makes of a micro-batch, and what it changes."""
        check_unchanged([self.layer], "the model")
        with _batchnorm.merging(self._num_parts > 1), _batchnorm.recording():
            try:
                return self.layer.apply(variables, x, _rng.streams(rngs), train)
            except Exception as error:
                error.add_note(
                    f"raised by the model ({self.layer.name}), whose input was "
                    f"{shapes(x)}; x comes before the targets"
                )
                raise

    def forward(self, train: bool) -> Work:
        """``(variables, x, rngs) -> outputs``."""

        def call(variables: PyTree, x: PyTree, rngs: _rng.Rngs) -> PyTree:
            return self._applied(variables, x, rngs, train)[0]

        def joins(traced: Traced, sizes: Sequence[int]) -> list[_join.Join]:
            shares, axes = [size / sum(sizes) for size in sizes], self.axes.out_axes
            if len(sizes) > 1:
                flat = _microbatch.flat_axes(axes, traced.aux, "outputs", "out_axes")
                _microbatch.check_joinable(traced.aux, flat, sizes[0], axes)
            return _join.by_axes(axes, traced.aux, shares, "out")

        axes, names = (self.axes.in_axes, None), ("x", "rngs")
        known = {"owner": self.layer.owner, "names": names, "advice": ADVICE}
        return Work(call, joins, axes, has_loss=False, has_input=True, **known)

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

        def writes(traced: Traced, specs: PyTree) -> tuple[int, list[Written]]:
            aux, changed = traced.aux
            found = [
                Written(at, path, keystr(path, simple=True, separator="/"), path[0].key)
                for at, path in self.written(specs, changed)
            ]
            return len(jax.tree.leaves(aux)), found

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
            writes=writes if train else None,
        )

    def written(self, variables: PyTree, changed: PyTree) -> list[tuple[int, Any]]:
        """Of what a call writes which leaves of the variables these are, and paths."""
        structures = jax.tree.structure(variables), jax.tree.structure(changed)
        if structures not in self._written:
            flat = jax.tree_util.tree_leaves_with_path(variables)
            number = {path: i for i, (path, _) in enumerate(flat)}
            own = jax.tree_util.tree_leaves_with_path(
                changed, is_leaf=lambda leaf: leaf is None
            )
            self._written[structures] = [(number[path], path) for path, _ in own]
        return self._written[structures]

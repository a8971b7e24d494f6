"""A model on abstract values: its layers as stages of their own, or as those of a cut.

What layers share, stash, draw and change is found here as it is for a pipeline.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._functions import _microbatch
from .._functions._batch import Batch
from .._functions._objective import Objective
from .._functions._trainable import Trainable
from .._functions._weights import is_params
from .._layers import _rng
from .._layers._layer import Layer
from .._layers._walk import Visit, walk
from .._run._layout import Layout
from .._run._pipe import Pipe
from .._slices._functions import StageFunctions
from .._slices._listed import Listed, listed

PyTree = Any


class Sample(NamedTuple):
    """A mini-batch, in arrays or specs, and where its examples are.

    Attributes:
      x: its input.
      targets: its targets, ``()`` without a loss.
      rngs: the keys of a step, or ``None``.
      in_axes: the batch axis of the input, as `jpipe.pipeline` takes it.
      target_axes: that of the targets.
      num_microbatches: into how many micro-batches it is cut.
    """

    x: PyTree
    targets: PyTree
    rngs: PyTree
    in_axes: Any
    target_axes: Any
    num_microbatches: int

    def batch(self, whole: bool = False, num_shards: int = 1) -> Batch:
        """Its specs, with the first micro-batch only: no other is larger.

        Args:
          whole: whether all micro-batches are meant.
          num_shards: over how many shards each is spread.

        Raises:
          TypeError: if a leaf is not an array.
          ValueError: if it cannot be cut.
        """
        x = _microbatch.specs(self.x, "sample")
        targets = _microbatch.specs(self.targets, "targets")
        x_axes = _microbatch.flat_axes(self.in_axes, x, "sample", "in_axes")
        axes = self.target_axes if jax.tree.leaves(targets) else 0
        target_axes = _microbatch.flat_axes(axes, targets, "targets", "target_axes")
        parts = [("sample", x, x_axes), ("targets", targets, target_axes)]
        number = self.num_microbatches
        size = _microbatch.batch_size(parts, number)
        sizes = _microbatch.sizes(_microbatch.shard(size, number, num_shards), number)
        keys = None if self.rngs is None else _microbatch.specs(self.rngs, "rngs")
        own = sizes if whole else sizes[:1]
        return Batch(x, x_axes, targets, target_axes, keys, own, num_shards)


@dataclass(frozen=True)
class Traced:
    """Layers that are traced; nothing is compiled.

    Attributes:
      layers: all layers, in order.
      visits: what was met at each.
      batch: the mini-batch.
      listed: what each layer does.
    """

    layers: tuple[Layer, ...]
    visits: Sequence[Visit]
    batch: Batch
    listed: Listed

    @classmethod
    def of(
        cls,
        pipe: Pipe,
        batch: Batch,
        objective: Objective | None,
        trainable: Trainable,
        train: bool,
    ) -> "Traced":
        """Traces layers.

        Args:
          pipe: their stages.
          batch: the mini-batch, or its first micro-batch.
          objective: the loss, a part of the last layer; ``None``: without.
          trainable: which parameters have gradients.
          train: whether this is training.

        Raises:
          ValueError: as a pipeline of these layers.
          TypeError: likewise.
        """
        own = tuple(layer for stage in pipe.stages for layer in stage.layers)
        visits, routes = walk(pipe.stages, _rng.key_spec(), batch.first)
        variables = [visit.variables for visit in visits]
        marks = trainable.marks(own, variables)
        layout = Layout(pipe, visits, variables, marks)
        given = pipe, layout, batch, routes
        found = listed(*given, train=train, objective=objective)
        return cls(own, visits, batch, found)

    def functions(self, layer: int, mode: str = "none") -> StageFunctions:
        """What a layer computes; of equal layers one."""
        return self.listed.stages.functions(layer, 0, mode)

    def alike(self) -> Mapping[StageFunctions, list[int]]:
        """The numbers of the layers that have the same functions."""
        found: dict[StageFunctions, list[int]] = {}
        for i in range(len(self.layers)):
            found.setdefault(self.functions(i), []).append(i)
        return found

    def ties(self) -> Iterator[tuple[int, ...]]:
        """The layers that use parameters of the same layer, that one first."""
        users: dict[int, set[int]] = {}
        layout = self.listed.layout
        for i, (order, weights) in enumerate(
            zip(layout.order, layout.weights, strict=True)
        ):
            for leaf, path in zip(order, weights.paths, strict=True):
                if is_params(path):
                    users.setdefault(leaf, set()).add(i)
        groups: dict[int, set[int]] = {}
        for found in users.values():
            if len(found) > 1:  # the first of them owns it
                groups.setdefault(min(found), set()).update(found)
        for i in sorted(groups):
            yield i, *sorted(groups[i] - {i})

"""Layers, or pieces of a model, on abstract values: what each computes and reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from .._functions import _microbatch
from .._functions._batch import Batch
from .._functions._objective import Objective
from .._slices._functions import StageFunctions
from .._slices._stages import Stages

PyTree = Any


class Sample(NamedTuple):
    """A mini-batch, in arrays or specs, and what is done with it.

    Attributes:
      x: its input.
      targets: its targets, ``()`` without a loss.
      rngs: the keys of a step, or ``None``.
      in_axes: the batch axis of the input, as `jpipe.pipeline` takes it.
      target_axes: that of the targets.
      num_microbatches: into how many micro-batches it is cut.
      objective: the loss, a part of the last layer; ``None``: without.
      trainable: which parameters have gradients: see `Trainable`.
      train: whether this is training.
    """

    x: PyTree
    targets: PyTree
    rngs: PyTree
    in_axes: Any
    target_axes: Any
    num_microbatches: int
    objective: Objective | None
    trainable: Any
    train: bool

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

    def resized(self, batch_size: int) -> "Sample":
        """The same in one micro-batch of another size, of which nothing has values."""
        batch = self._replace(num_microbatches=1).batch()

        def part(tree: PyTree, axes: Sequence[int | None]) -> PyTree:
            specs, structure = jax.tree.flatten(tree)
            return structure.unflatten(_microbatch.part_specs(specs, axes, batch_size))

        x, targets = part(batch.x, batch.x_axes), part(batch.targets, batch.target_axes)
        return self._replace(x=x, targets=targets, num_microbatches=1)


@dataclass(frozen=True)
class Traced:
    """Layers, or pieces of a model, each a stage; nothing is compiled.

    Attributes:
      names: what they are called.
      batch: the mini-batch, all that is given of it as one tree.
      stages: what each computes.
      homes: of each leaf of the variables the layer that owns it.
      paths: where it stands among them.
      params: the numbers of the parameters among these leaves, in the tree of which an
        optimizer is given the parameters.
      outputs: specs of what the last returns, beside the loss if it makes one.
      skips: by what a layer makes for a later one than the next, what that is called.
    """

    names: tuple[str, ...]
    batch: Batch
    stages: Stages
    homes: Sequence[int]
    paths: Sequence[str]
    params: PyTree
    outputs: Sequence[Any]
    skips: Mapping[Any, str]

    def functions(self, layer: int, mode: str = "none") -> StageFunctions:
        """What a layer computes; of equal layers one."""
        return self.stages.functions(self.first_alike[layer], 0, mode)

    @cached_property
    def first_alike(self) -> list[int]:
        """Of each layer the first one whose operations are the same."""
        known: dict[Any, int] = {}
        count = range(len(self.names))
        return [known.setdefault(self.stages.kind(i), i) for i in count]

    def alike(self) -> Mapping[StageFunctions, list[int]]:
        """The numbers of the layers that have the same functions."""
        found: dict[StageFunctions, list[int]] = {}
        for i in range(len(self.names)):
            found.setdefault(self.functions(i), []).append(i)
        return found

    def variables(self, layer: int, are_params: bool) -> list[int]:
        """The numbers of the parameters that a layer owns, or of its other state."""
        params = set(jax.tree.leaves(self.params))
        pairs = enumerate(self.homes)
        return [i for i, own in pairs if own == layer and (i in params) == are_params]

    def specs(self, numbers: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """What variables are like."""
        return [self.stages.spec_of(i) for i in numbers]

    def ties(self) -> Iterator[tuple[int, ...]]:
        """The layers that use parameters of the same layer, that one first."""
        users: dict[int, set[int]] = {}
        params = set(jax.tree.leaves(self.params))
        for i in range(len(self.names)):
            for weight in params.intersection(self.stages.weights(i)):
                users.setdefault(weight, set()).add(i)
        groups: dict[int, set[int]] = {}
        for found in users.values():
            if len(found) > 1:  # the first of them owns it
                groups.setdefault(min(found), set()).update(found)
        for i in sorted(groups):
            yield i, *sorted(groups[i] - {i})

    def entering(self, layer: int) -> list[Any]:
        """What a layer reads of the output of the one before it, or of the input."""
        if not layer:
            return self.stages.part(0).inputs
        arrives = self.stages.part(layer).arrives
        made = self._made[layer - 1]
        return [var for var in arrives if var in made and var not in self.skips]

    def skipping(self, layer: int) -> dict[tuple[int, str], list[Any]]:
        """What else it reads of earlier layers, by these and by name."""
        entering, found = set(self.entering(layer)), dict[tuple[int, str], list[Any]]()
        for var in self.stages.part(layer).arrives:
            if var not in entering:
                source = next(s for s, made in enumerate(self._made) if var in made)
                number = [*self._made[source]].index(var)
                name = self.skips.get(var) or f"{var.aval.str_short()} ({number})"
                found.setdefault((source, name), []).append(var)
        return found

    def wanted(self, variables: Sequence[Any]) -> list[Any]:
        """Those that have a cotangent."""
        return [var for var in variables if self.stages.has_gradient(var, 0)]

    @cached_property
    def _made(self) -> list[dict[Any, int]]:
        """What each layer makes for others; and of equal ones, as which value."""
        found = []
        for i in range(len(self.names)):
            part = self.stages.part(i)
            ends = zip(
                [*part.leaves, *part.beside], part.closed.jaxpr.outvars, strict=True
            )
            found.append({var: id(end) for var, end in ends})
        return found

    def is_output(self, source: int, variables: Sequence[Any]) -> bool:
        """Whether what a later layer reads is given to the next one too."""
        made = self._made[source]
        given = {made[var] for var in self.entering(source + 1)}
        return all(made[var] in given for var in variables)

"""A mini-batch as abstract values, and what of it each micro-batch brings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from . import _microbatch

PyTree = Any


class Axes(NamedTuple):
    """Where the examples are: the arguments of `jpipe.pipeline` of these names."""

    in_axes: Any
    target_axes: Any
    out_axes: Any


@dataclass(frozen=True)
class Batch:
    """A mini-batch as abstract values: what a program is compiled for.

    Attributes:
      args: specs of all that is given of it: an input, or a tuple of it and others.
      axes: the batch axis of each of its leaves; ``None`` of what is not split.
      sizes: the number of examples in each micro-batch; of one shard.
      num_shards: over how many shards they are spread.
    """

    args: PyTree
    axes: list[int | None]
    sizes: tuple[int, ...]
    num_shards: int = 1

    @property
    def first(self) -> PyTree:
        """Specs of the first micro-batch; no other has more examples."""
        return self.part(self.sizes[0])

    @property
    def num_parts(self) -> int:
        """How many micro-batches there are, of all shards together."""
        return len(self.sizes) * self.num_shards

    def part(self, size: int) -> PyTree:
        """Specs of a micro-batch."""
        leaves, structure = jax.tree.flatten(self.args)
        parts = _microbatch.part_specs(leaves, self.axes, size)
        return jax.tree.unflatten(structure, parts)


@contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Adds to errors of micro-batches how many examples these have."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if batch.num_parts > 1:
            sizes = " or ".join(map(str, dict.fromkeys(batch.sizes)))
            error.add_note(
                f"micro-batches have {sizes} of the "
                f"{sum(batch.sizes) * batch.num_shards} examples: where that is too "
                f"few, give a larger batch or a smaller num_microbatches="
            )
        raise

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


def of_input(
    x: PyTree, axes: list[int | None], num_microbatches: int, num_shards: int
) -> Batch:
    """The input from which variables are made, as a mini-batch.

    Args:
      x: specs of the input.
      axes: the batch axis of each of its leaves.
      num_microbatches: M.
      num_shards: over how many shards examples are spread.

    Returns:
      The mini-batch; in one part if it cannot be cut, as a single example cannot.
    """
    pairs = list(zip(jax.tree.leaves(x), axes, strict=True))
    has_axis = all(a is None or -leaf.ndim <= a < leaf.ndim for leaf, a in pairs)
    found = {leaf.shape[a] for leaf, a in pairs if a is not None} if has_axis else ()
    if len(found) > 1:  # says which
        _microbatch.batch_size([("x", x, axes)], 1)
    number = num_microbatches * num_shards
    if len(found) != 1 or min(found) < number:
        return Batch(x, [None] * len(axes), (1,))
    sizes = _microbatch.sizes(min(found), number)
    return Batch(x, axes, sizes[::num_shards], num_shards)


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

"""A mini-batch as abstract values, and those of its micro-batches."""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from .._messages import is_library
from . import _microbatch

PyTree = Any


class Axes(NamedTuple):
    """The axes of examples: the arguments of `jpipe.pipeline` of these names."""

    in_axes: Any
    target_axes: Any
    out_axes: Any


@dataclass(frozen=True)
class Batch:
    """A mini-batch as abstract values, for which a program is compiled.

    Attributes:
      args: specs of the arguments of a call but its variables, in a tuple.
      names: the name of each argument, for errors.
      axes: the batch axis of each leaf; ``None``: it is not split.
      sizes: the number of examples of each micro-batch, on one shard.
      num_shards: the number of shards over which each micro-batch is spread.
    """

    args: tuple[PyTree, ...]
    names: Sequence[str]
    axes: list[int | None]
    sizes: tuple[int, ...]
    num_shards: int = 1

    @property
    def first(self) -> PyTree:
        """Specs of the first micro-batch; no other has more examples."""
        return self.microbatch_specs(self.sizes[0])

    @property
    def leaf_names(self) -> list[str]:
        """The name of each leaf, for errors."""
        leaf_names = list[str]()
        for name, tree in zip(self.names, self.args, strict=True):
            for path, _ in jax.tree_util.tree_leaves_with_path(tree):
                leaf_names.append(f"{name}{jax.tree_util.keystr(path)}")
        return leaf_names

    @property
    def num_microbatch_shards(self) -> int:
        """The number of shards of all micro-batches."""
        return len(self.sizes) * self.num_shards

    @property
    def num_examples(self) -> int:
        """The number of examples of the mini-batch."""
        return sum(self.sizes) * self.num_shards

    def with_argument(
        self, name: str, specs: PyTree, axes: Sequence[int | None]
    ) -> "Batch":
        """The mini-batch with one more argument.

        Args:
          name: its name.
          specs: its specs.
          axes: the batch axis of each of its leaves.
        """
        return replace(
            self,
            args=(*self.args, specs),
            names=[*self.names, name],
            axes=[*self.axes, *axes],
        )

    def microbatch_specs(self, size: int) -> PyTree:
        """Specs of a micro-batch of so many examples."""
        leaves, structure = jax.tree.flatten(self.args)
        leaf_specs = _microbatch.microbatch_specs(leaves, self.axes, size)
        return jax.tree.unflatten(structure, leaf_specs)


@contextmanager
def explain_sizes(batch: Batch) -> Iterator[None]:
    """Adds notes on the sizes of micro-batches to errors about sizes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        is_split = batch.num_microbatch_shards > 1
        if is_split and not _is_of_any_size(error):
            _add_sizes(error, batch)
        pairs = zip(jax.tree.leaves(batch.args), batch.axes, strict=True)
        batched = [leaf for leaf, axis in pairs if axis is not None]
        if any(map(_microbatch.is_like_raw_key, batched)):
            error.add_note(f"is a uint32[2] a raw key? {_microbatch.RAW_KEY}")
        raise


def _add_sizes(error: Exception, batch: Batch) -> None:
    """Adds advice to an error that has the size of a micro-batch."""
    text = str(error)
    if not any(_has_size(text, size) for size in batch.sizes):
        return
    num_examples = batch.num_examples
    sizes = " or ".join(map(str, dict.fromkeys(batch.sizes)))
    if _has_size(text, num_examples):
        advice = (
            f"an array of all {num_examples} that is closed over, or made in the "
            f"function, is not split; give it as an argument, of a pipeline in x or "
            f"in the targets; behind jpipe.whole_batch mark all that the loss reads of "
            f"examples; or type x.shape[0] in place of {num_examples}"
        )
    else:
        advice = (
            "where that is too few, give a larger batch or a smaller num_microbatches="
        )
    error.add_note(
        f"micro-batches have {sizes} of the {num_examples} examples: {advice}"
    )


def _is_of_any_size(error: Exception) -> bool:
    """True if an error holds for micro-batches of any size, whatever it says.

    Examples are that a tracer is no number, and all errors of the library.
    """
    if isinstance(error, jax.errors.JAXTypeError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return is_library(frames[-1])


def _has_size(text: str, size: int) -> bool:
    """True if a shape or a length in a text has a size: ``(4, 10)``, ``f32[4]``.

    One and two stand in most shapes, and count as a first size alone.
    """
    first_sizes = r"(?:\d+, ?)*" if size > 2 else ""
    return bool(re.search(rf"(?:[(\[]{first_sizes}|(?:size|length) ){size}\b", text))

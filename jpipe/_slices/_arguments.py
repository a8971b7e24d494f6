"""What a function that is divided is given, checked."""

from collections.abc import Sequence
from typing import Any

import jax

from .._functions import _microbatch
from .._functions._batch import Batch
from . import _program

PyTree = Any


def axes_of(
    in_axes: Any, given: Sequence[PyTree], names: Sequence[str]
) -> list[list[int | None]]:
    """Where the examples are in each leaf of each argument; keys have none."""
    each = list(in_axes) if isinstance(in_axes, tuple) else [in_axes] * len(given)
    if len(each) != len(given):
        raise ValueError(
            f"in_axes={in_axes!r} has {len(each)} entries for {len(given)} "
            f"arguments after params; give one for each, or one for all"
        )
    found = []
    for name, axes, tree in zip(names, each, given, strict=True):
        leaves = jax.tree.leaves(tree)
        option = "target_axes" if name == "targets" else "in_axes"
        own = axes if leaves else 0  # of nothing, whatever they would be
        leaf_axes = _microbatch.flat_axes(own, tree, name, option)
        found.append(
            [
                None if _program.is_single_key(leaf) else axis
                for leaf, axis in zip(leaves, leaf_axes, strict=True)
            ]
        )
    return found


def batch_size(
    given: Sequence[PyTree],
    axes: Sequence[Sequence[int | None]],
    count: int,
    names: Sequence[str],
) -> int:
    """How many examples there are, at least as many as micro-batches."""
    try:
        return _microbatch.batch_size([*zip(names, given, axes, strict=True)], count)
    except ValueError as error:
        if names[0] != "argument 1":
            raise
        error.add_note(
            "in_axes is a value for all arguments after params, or a tuple with one "
            "for each: None for what each micro-batch is given whole, such as a "
            "number, a table or running statistics"
        )
        raise


def batch(
    args: Sequence[PyTree],
    in_axes: Any,
    names: Sequence[str],
    num_microbatches: int,
    num_shards: int,
    few: bool = False,
) -> Batch:
    """A mini-batch, checked.

    Args:
      args: all that is given of it, in arrays or specs.
      in_axes: where the examples are in each.
      names: what errors call them.
      num_microbatches: M.
      num_shards: over how many shards examples are spread.
      few: whether it is one micro-batch where it cannot be split, as a single example.
    """
    given = tuple(map(_microbatch.specs, args, names))
    axes = axes_of(in_axes, given, names)
    flat = [axis for own in axes for axis in own]
    if few and all(axis is None for axis in flat):
        return Batch(given, flat, (1,))
    size = batch_size(given, axes, 1 if few else num_microbatches, names)
    if few and (size < num_microbatches * num_shards or size % num_shards):
        return Batch(given, flat, (size,))
    shard = _microbatch.shard(size, num_microbatches, num_shards)
    return Batch(given, flat, _microbatch.sizes(shard, num_microbatches), num_shards)

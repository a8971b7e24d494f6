"""The shapes of a mesh that a plan may choose: stages x devices that share examples.

A mini-batch is split into micro-batches, and each of these into as many shards as there
are devices that share it:

    num_microbatch_shards = num_microbatches * num_shards

One device computes one shard at once, so a layer has to be profiled once for each of
these products, whatever the shape of the mesh.
"""

from collections.abc import Sequence
from typing import NamedTuple

# By default the micro-batches have so many shards times the number of devices.
_SHARDS_PER_DEVICE = (1, 2, 4, 8)


class MeshShape(NamedTuple):
    """The numbers by which a mini-batch is split.

    Attributes:
      num_microbatches: the number of micro-batches.
      num_shards: the number of devices on which the examples of each are spread.
    """

    num_microbatches: int
    num_shards: int = 1

    @property
    def num_microbatch_shards(self) -> int:
        """The number of shards of all micro-batches; a device computes one at once."""
        return self.num_microbatches * self.num_shards


def mesh_shapes(
    data: Sequence[int] | None,
    num_microbatches: Sequence[int] | None,
    *,
    num_devices: int,
    num_examples: int,
    shard_size: int | None,
) -> tuple[MeshShape, ...]:
    """The shapes to choose from; all shards of a micro-batch have as many examples.

    Args:
      data: the numbers of devices that may share a micro-batch; ``None``: any number.
      num_microbatches: the numbers of micro-batches; ``None``: numbers with which each
        rank has something to do.
      num_devices: the number of devices.
      num_examples: the number of examples in the mini-batch.
      shard_size: the number of examples in a shard, if a profile of one size decides
        it.

    Returns:
      The shapes; those of one device per stage first.

    Raises:
      ValueError: if examples cannot be spread so, or nothing is left to choose.
    """
    # The number of shards of all micro-batches that a profile decides.
    profiled_count = None if shard_size is None else -(-num_examples // shard_size)
    shapes = []
    for num_shards in range(1, num_devices + 1) if data is None else sorted(set(data)):
        if num_devices % num_shards != 0 or num_examples % num_shards != 0:
            continue
        if num_microbatches is not None:
            counts = set(num_microbatches)
        elif profiled_count is not None:
            is_divisible = profiled_count % num_shards == 0
            counts = {profiled_count // num_shards} if is_divisible else set()
        else:
            counts = _default_counts(num_shards, num_devices, num_examples)
        for count in sorted(counts):
            shape = MeshShape(count, num_shards)
            if shape.num_microbatch_shards <= num_examples:
                shapes.append(shape)

    if profiled_count is not None:
        shapes = [x for x in shapes if x.num_microbatch_shards == profiled_count]
    if not shapes:
        note = ""
        if shard_size is not None:
            note = (
                f" in parts of {shard_size}, of which alone the profile is (jpipe."
                f"profile(..., num_microbatches=(4, 16)) makes one of several sizes)"
            )
        raise ValueError(
            f"plan: data={data!r} and num_microbatches={num_microbatches!r} leave "
            f"nothing to choose for {num_examples} examples{note}: data divides the "
            f"{num_devices} devices and the examples, and data times num_microbatches "
            f"is no more than {num_examples}"
        )
    return tuple(shapes)


def _default_counts(num_shards: int, num_devices: int, num_examples: int) -> set[int]:
    """The numbers of micro-batches to try if the user names none.

    Shards have the same sizes whatever the shape: a few profiles are enough.
    """
    counts = set()
    for shards_per_device in _SHARDS_PER_DEVICE:
        shard_count = min(num_devices * shards_per_device, num_examples)
        counts.add(shard_count // num_shards)
    if num_shards == 1:
        return counts | {1}
    return counts - {0}

"""The shapes of a mesh that a plan may choose: stages x devices that share examples.

A mini-batch is cut into micro-batches, and each of these into as many parts as there
are devices that share it:

    num_parts = num_microbatches * data

One device computes one part at once, so a layer has to be profiled once for each number
of parts, whatever the shape of the mesh.
"""

from collections.abc import Sequence
from typing import NamedTuple

# By default a mini-batch is cut into so many parts times the number of devices.
_PARTS_PER_DEVICE = (1, 2, 4, 8)


class MeshShape(NamedTuple):
    """The numbers by which a mini-batch is cut into parts.

    Attributes:
      num_microbatches: the number of micro-batches.
      data: the number of devices on which the examples of each are spread.
    """

    num_microbatches: int
    data: int = 1

    @property
    def num_parts(self) -> int:
        """The number of parts of a mini-batch; one device computes one at once."""
        return self.num_microbatches * self.data


def mesh_shapes(
    data: Sequence[int] | None,
    num_microbatches: Sequence[int] | None,
    *,
    num_devices: int,
    num_examples: int,
    part_size: int | None,
) -> tuple[MeshShape, ...]:
    """The shapes to choose from; all parts of a micro-batch have as many examples.

    Args:
      data: the numbers of devices that may share a micro-batch; ``None``: any number.
      num_microbatches: the numbers of micro-batches; ``None``: numbers with which each
        rank has something to do.
      num_devices: the number of devices.
      num_examples: the number of examples in the mini-batch.
      part_size: the number of examples in a part, if a profile decides it.

    Returns:
      The shapes; those of one device per stage first.

    Raises:
      ValueError: if examples cannot be spread so, or nothing is left to choose.
    """
    # The number of parts that a profile decides.
    num_parts = None if part_size is None else -(-num_examples // part_size)
    shapes = []
    for num_shards in range(1, num_devices + 1) if data is None else sorted(set(data)):
        if num_devices % num_shards != 0 or num_examples % num_shards != 0:
            continue
        if num_microbatches is not None:
            counts = set(num_microbatches)
        elif num_parts is not None:
            counts = {num_parts // num_shards} if num_parts % num_shards == 0 else set()
        else:
            counts = _default_counts(num_shards, num_devices, num_examples)
        for count in sorted(counts):
            shape = MeshShape(count, num_shards)
            if shape.num_parts <= num_examples:
                shapes.append(shape)

    if not shapes:
        note = ""
        if part_size is not None:
            note = f" in parts of {part_size}, as in the profile"
        raise ValueError(
            f"plan: data={data!r} and num_microbatches={num_microbatches!r} leave "
            f"nothing to choose for {num_examples} examples{note}: data divides the "
            f"{num_devices} devices and the examples, and data times num_microbatches "
            f"is no more than {num_examples}"
        )
    if num_parts is None:
        return tuple(shapes)
    profiled_shapes = [shape for shape in shapes if shape.num_parts == num_parts]
    if not profiled_shapes:
        # The profile is refused later: the message shows what it should be of.
        return tuple(shapes[:1])
    return tuple(profiled_shapes)


def _default_counts(num_shards: int, num_devices: int, num_examples: int) -> set[int]:
    """The numbers of micro-batches to try if the user names none.

    Parts have the same sizes whatever the shape: a few profiles are enough.
    """
    counts = set()
    for parts_per_device in _PARTS_PER_DEVICE:
        num_parts = min(num_devices * parts_per_device, num_examples)
        counts.add(num_parts // num_shards)
    if num_shards == 1:
        return counts | {1}
    return counts - {0}

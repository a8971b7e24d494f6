"""Which shapes of a mesh a plan may choose: stages, and devices that share examples."""

from collections.abc import Sequence
from typing import NamedTuple

# Times the number of devices: into so many parts a mini-batch is cut.
_TIMES = (1, 2, 4, 8)


class MeshShape(NamedTuple):
    """Into how many parts a mini-batch is cut.

    Attributes:
      microbatches: how many pass through the stages.
      data: on how many devices the examples of each are spread.
    """

    microbatches: int
    data: int = 1

    @property
    def parts(self) -> int:
        """How many there are: what one device computes at once is one of them."""
        return self.microbatches * self.data


def shapes(
    data: Sequence[int] | None,
    numbers: Sequence[int] | None,
    num_devices: int,
    examples: int,
    size: int | None,
) -> tuple[MeshShape, ...]:
    """The shapes to choose from; on several devices a part has as many examples.

    Args:
      data: over how many devices examples may be spread; ``None``: any number.
      numbers: of micro-batches; ``None``: such that each rank has some to do.
      num_devices: how many there are.
      examples: of the mini-batch.
      size: of a part, if it is known already.

    Returns:
      The shapes; those of one device per stage first.

    Raises:
      ValueError: if examples cannot be spread so, or nothing is left to choose.
    """
    parts = None if size is None else -(-examples // size)
    found = []
    for count in range(1, num_devices + 1) if data is None else sorted(set(data)):
        if numbers is not None:
            each = set(numbers)
        elif parts is not None:
            each = {parts // count} if parts % count == 0 else set()
        else:
            # Parts of the same sizes, whatever the shape: a few profiles are enough.
            each = {min(num_devices * times, examples) // count for times in _TIMES}
            each = each | {1} if count == 1 else each - {0}
        if num_devices % count == 0 == examples % count:
            found += [MeshShape(number, count) for number in sorted(each)]
    found = [own for own in found if own.parts <= examples]
    if not found:
        note = "" if size is None else f" in parts of {size}, as in the profile"
        raise ValueError(
            f"plan: data={data!r} and num_microbatches={numbers!r} leave nothing to "
            f"choose for {examples} examples{note}: data divides the {num_devices} "
            f"devices and the examples, and data times num_microbatches is no more "
            f"than {examples}"
        )
    # Else the message shows what the profile should be of.
    known = [own for own in found if own.parts == parts]
    return tuple(found if parts is None else known or found[:1])

"""Which shapes of a mesh a plan may choose: stages, and devices that share examples."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Times the number of devices: into so many parts a mini-batch is cut.
_TIMES = (1, 2, 4, 8)


class Shape(NamedTuple):
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
) -> tuple[Shape, ...]:
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
    if faults := list(_faults(data or (), numbers or (), num_devices, examples)):
        raise ValueError(f"plan: {'; '.join(faults)}")
    parts = None if size is None else -(-examples // size)
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    found = []
    for count in divisors if data is None else sorted(set(data)):
        if numbers is not None:
            each = set(numbers)
        elif parts is not None:
            each = {parts // count} if parts % count == 0 else set()
        else:
            # Parts of the same sizes, whatever the shape: a few profiles are enough.
            each = {min(num_devices * times, examples) // count for times in _TIMES}
            each = each | {1} if count == 1 else each - {0}
        if examples % count == 0:
            found += [Shape(number, count) for number in sorted(each)]
    found = [own for own in found if own.data == 1 or own.parts <= examples]
    if not found:
        note = "" if size is None else f" in parts of {size}, as in the profile"
        raise ValueError(
            f"plan: data={data!r} and num_microbatches={numbers!r} leave nothing to "
            f"choose for {examples} examples{note}"
        )
    # Else the message shows what the profile should be of.
    known = [own for own in found if own.parts == parts]
    return tuple(found if parts is None else known or found[:1])


def _faults(
    data: Sequence[int], numbers: Sequence[int], num_devices: int, examples: int
) -> Iterator[str]:
    """Why examples cannot be spread over so many devices, a line for each fault."""
    for number in numbers:
        if number > examples:
            yield f"num_microbatches={number} for {examples} examples"
    least = min(numbers, default=1)
    for count in data:
        if num_devices % count:
            yield f"data={count} does not divide num_devices={num_devices}"
        elif examples % count:
            yield f"data={count} does not divide {examples} examples"
        elif count > 1 and least * count > examples:
            yield (
                f"data={count} with num_microbatches={least} needs {least * count} "
                f"examples, there are {examples}"
            )

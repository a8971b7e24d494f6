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
    """
    parts = None if size is None else -(-examples // size)
    found = [
        Shape(number, count)
        for count in _listed(data, num_devices)
        if examples % count == 0
        for number in _numbers(numbers, count, num_devices, examples, parts)
        if count == 1 or number * count <= examples
    ]
    if parts is None:
        return tuple(found)
    # Of a profile that is of other parts it is told what it should be of.
    known = [shape for shape in found if shape.parts == parts]
    return tuple(known or found[:1])


def faults(
    data: Sequence[int] | None,
    numbers: Sequence[int] | None,
    num_devices: int,
    examples: int,
) -> Iterator[str]:
    """Why examples cannot be spread over so many devices, a line for each fault."""
    for number in numbers or ():
        if number > examples:
            yield f"num_microbatches={number} for {examples} examples"
    least = min(numbers or [1])
    for count in data or ():
        if num_devices % count:
            yield f"data={count} does not divide num_devices={num_devices}"
        elif examples % count:
            yield f"data={count} does not divide {examples} examples"
        elif count > 1 and least * count > examples:
            yield (
                f"data={count} with num_microbatches={least} needs {least * count} "
                f"examples, there are {examples}"
            )


def _listed(data: Sequence[int] | None, num_devices: int) -> Sequence[int]:
    if data is not None:
        return sorted(set(data))
    return [n for n in range(1, num_devices + 1) if num_devices % n == 0]


def _numbers(
    given: Sequence[int] | None,
    data: int,
    num_devices: int,
    examples: int,
    parts: int | None,
) -> Sequence[int]:
    """The numbers of micro-batches to choose from, spread over so many devices."""
    if given is not None:
        return given
    if parts is not None:
        return [] if parts % data else [parts // data]
    # Parts of the same sizes, whatever the shape: so many profiles are enough.
    some = {min(num_devices * times, examples) // data for times in _TIMES}
    return sorted(some | {1} if data == 1 else some - {0})

"""From the order of every rank, as a builder states it, to a schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ._placement import loop, stages_of
from ._schedule import Schedule
from ._simulate import ScheduleError

# An op, the chunk of the rank's layers that it is of, and a micro-batch.
Cell = tuple[str, int, int]


def check(name: str, numbers: Mapping[str, Any]) -> None:
    """Refuses what is not a number of at least one, naming all of them."""
    faults = [
        f"{key}={value!r}" for key, value in numbers.items() if not _counts(value)
    ]
    if faults:
        raise ScheduleError(f"{name}: {', '.join(faults)}: must be ints of at least 1")


def _counts(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 1


def build(
    name: str,
    num_microbatches: int,
    placement: Sequence[int],
    row: Callable[[int], Iterable[Cell]],
) -> Schedule:
    """Makes a schedule.

    Args:
      name: what to call it.
      num_microbatches: the number of micro-batches.
      placement: the rank of each stage.
      row: the cells of a rank, in order; those of micro-batches that are not there
        are dropped.

    Returns:
      The schedule.
    """
    rows = tuple(
        tuple(
            Action(op, stages[chunk], i)
            for op, chunk, i in row(rank)
            if i < num_microbatches
        )
        for rank, stages in enumerate(stages_of(placement))
    )
    return Schedule(name, len(placement), num_microbatches, tuple(placement), rows)


def warmed_up(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
    num_chunks: int = 1,
    group: int | None = None,
) -> Schedule:
    """Forwards first, then a forward and a backward in turns, then what is left.

    Micro-batches pass in groups through the chunks of a rank; backwards follow in the
    order of the forwards, from the last chunk to the first.

    Args:
      name: what to call it.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      warmup: how many forwards a rank runs before the first in turns.
      lag: splits backwards, and is by how many turns the weight gradients of a rank
        come later than its input gradients; ``None``: backwards are whole.
      num_chunks: how many stages each rank runs, round the ranks.
      group: the micro-batches of a group; default: all of them. The last group is
        filled up with micro-batches that are dropped: with a short one, ranks could
        wait for each other.

    Returns:
      The schedule, not validated.
    """
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check(name, numbers | {"num_chunks": num_chunks})
    size = group or num_microbatches
    forwards = [
        (chunk, i)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for i in range(first, first + size)
    ]
    backwards = [(num_chunks - 1 - chunk, i) for chunk, i in forwards]

    def row(rank: int) -> Iterator[Cell]:
        own_lag = None if lag is None else lag(rank)
        return in_turns(forwards, backwards, warmup(rank), own_lag)

    return build(name, num_microbatches, loop(num_ranks, num_chunks), row)


def in_turns(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warmup: int,
    lag: int | None = None,
) -> Iterator[Cell]:
    """The row of one rank: see `warmed_up`."""
    yield from ((FORWARD, *cell) for cell in forwards[:warmup])
    for turn, cell in enumerate(backwards):
        if warmup + turn < len(forwards):
            yield FORWARD, *forwards[warmup + turn]
        yield (BACKWARD if lag is None else INPUT), *cell
        if lag is not None and turn >= lag:
            yield WEIGHT, *backwards[turn - lag]
    if lag is not None:
        left = max(len(backwards) - lag, 0)
        yield from ((WEIGHT, *cell) for cell in backwards[left:])

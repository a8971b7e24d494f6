"""Builds a schedule from the order of each rank, as a builder states it.

Most orders of the literature alternate: a rank runs some forwards as warm-up, then one
forward and one backward in turns, then what is left.

    warm-up 2  |F0 F1   F2 B0  F3 B1   B2 B3|
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ._placement import group_by_rank, place_in_loop
from ._schedule import Schedule
from ._simulate import ScheduleError

# An op, the index of the stage among those of its rank, and a micro-batch.
Cell = tuple[str, int, int]


def check_counts(name: str, counts: Mapping[str, Any]) -> None:
    """Refuses what is not an int of at least 1, naming all of it.

    Args:
      name: the name of the schedule, with which the error begins.
      counts: the value of each argument, by its name.
    """
    faults = [
        f"{key}={value!r}" for key, value in counts.items() if not _is_count(value)
    ]
    if faults:
        raise ScheduleError(f"{name}: {', '.join(faults)}: must be ints of at least 1")


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 1


def build(
    name: str,
    num_microbatches: int,
    *,
    placement: Sequence[int],
    row: Callable[[int], Iterable[Cell]],
) -> Schedule:
    """Builds a schedule, without validating it.

    Args:
      name: the name of the schedule.
      num_microbatches: the number of micro-batches.
      placement: the rank of each stage.
      row: ``rank -> cells``, in order; cells of micro-batches beyond the last are
        dropped.
    """
    rows: list[tuple[Action, ...]] = []
    for rank, stages in enumerate(group_by_rank(placement, max(placement) + 1)):
        actions = [
            Action(op, stages[chunk], microbatch)
            for op, chunk, microbatch in row(rank)
            if microbatch < num_microbatches
        ]
        rows.append(tuple(actions))
    return Schedule(
        name=name,
        num_stages=len(placement),
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        rows=tuple(rows),
    )


def build_with_warmup(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Builds a schedule whose ranks warm up with forwards, then alternate.

    Micro-batches pass in groups through the chunks of a rank; backwards follow in the
    order of the forwards, from the last chunk to the first.

    Args:
      name: the name of the schedule.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      warmup: ``rank -> number`` of forwards before forwards and backwards alternate.
      lag: ``rank -> number`` of turns by which the weight gradients come later than
        the input gradients; ``None``: backwards are whole.
      num_chunks: the stages per rank, placed in a loop.
      group_size: the micro-batches of a group; default: all of them. The last group is
        filled up with micro-batches that are dropped: with a short one, ranks could
        wait for each other.

    Returns:
      The schedule, not validated.
    """
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
    }
    check_counts(name, counts)
    step = num_microbatches if group_size is None else group_size

    forwards: list[tuple[int, int]] = []
    for first in range(0, num_microbatches, step):
        for chunk in range(num_chunks):
            forwards += [(chunk, first + i) for i in range(step)]
    backwards = [(num_chunks - 1 - chunk, i) for chunk, i in forwards]

    def row(rank: int) -> Iterator[Cell]:
        return alternate(
            forwards,
            backwards,
            warmup=warmup(rank),
            lag=None if lag is None else lag(rank),
        )

    return build(
        name,
        num_microbatches,
        placement=place_in_loop(num_ranks, num_chunks),
        row=row,
    )


def alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    *,
    warmup: int,
    lag: int | None = None,
) -> Iterator[Cell]:
    """Yields the cells of one rank: warm-up, then forwards and backwards in turns.

    Args:
      forwards: the chunk and micro-batch of each forward, in order.
      backwards: the chunk and micro-batch of each backward.
      warmup: the number of forwards before the first turn.
      lag: the number of turns from an input gradient to its weight gradient; ``None``:
        backwards are whole.
    """
    yield from ((FORWARD, *cell) for cell in forwards[:warmup])
    for turn, cell in enumerate(backwards):
        if warmup + turn < len(forwards):
            yield FORWARD, *forwards[warmup + turn]
        yield (BACKWARD if lag is None else INPUT), *cell
        if lag is not None and turn >= lag:
            yield WEIGHT, *backwards[turn - lag]
    if lag is not None:
        num_done = max(len(backwards) - lag, 0)
        yield from ((WEIGHT, *cell) for cell in backwards[num_done:])

"""From the order of every rank, as a builder states it, to a schedule."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._action import Action
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
    num_ranks: int,
    num_microbatches: int,
    row: Callable[[int], Iterable[Cell]],
    stage_of: Callable[[int, int], int] = lambda rank, chunk: rank,
    num_chunks: int = 1,
    forward_only: bool = False,
) -> Schedule:
    """Makes a schedule.

    Args:
      name: what to call it.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      row: the cells of a rank, in order; those of micro-batches that are not there
        are dropped.
      stage_of: the stage of a chunk of a rank.
      num_chunks: how many stages each rank runs.
      forward_only: whether it is for inference.

    Returns:
      The schedule.
    """
    placement = [0] * (num_ranks * num_chunks)
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            placement[stage_of(rank, chunk)] = rank
    rows = tuple(
        tuple(
            Action(op, stage_of(rank, chunk), i)
            for op, chunk, i in row(rank)
            if i < num_microbatches
        )
        for rank in range(num_ranks)
    )
    stages = len(placement)
    return Schedule(
        name, stages, num_microbatches, tuple(placement), rows, forward_only
    )


def v_shape(num_ranks: int) -> Callable[[int, int], int]:
    """Two chunks per rank, down the ranks and up again: the last hands to itself."""
    return lambda rank, chunk: 2 * num_ranks - 1 - rank if chunk else rank


def loop(num_ranks: int) -> Callable[[int, int], int]:
    """Chunks round the ranks: the last hands on to the first."""
    return lambda rank, chunk: chunk * num_ranks + rank

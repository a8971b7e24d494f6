"""Placements: the rank of each stage.

a V, p = 3                   a loop, p = 3, v = 2

rank 0 | 0         5 |       rank 0 | 0     3     |
rank 1 |   1     4   |       rank 1 |   1     4   |
rank 2 |     2 3     |       rank 2 |     2     5 |
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ._action import FORWARD, Action


def place_in_line(num_ranks: int) -> tuple[int, ...]:
    """One stage per rank."""
    return tuple(range(num_ranks))


def place_in_v(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down the ranks and up again: the last hands to itself."""
    return *range(num_ranks), *reversed(range(num_ranks))


def place_in_loop(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stages round the ranks: the last rank hands on to the first."""
    return (*range(num_ranks),) * num_chunks


def group_by_rank(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each rank."""
    stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        stages[rank].append(stage)
    return stages


def list_ranks(
    placement: Sequence[int], replicas: Sequence[Sequence[int]]
) -> Sequence[Sequence[int]]:
    """All ranks of each stage."""
    return replicas or [(rank,) for rank in placement]


def infer_replicas(
    rows: Sequence[Sequence[Action]], num_stages: int
) -> tuple[tuple[int, ...], ...]:
    """Infers all ranks of each stage, in ascending order, from its forwards.

    A backward elsewhere is a fault. A stage without forwards, which is one too, has the
    first rank of its other actions, or rank 0.
    """
    forward_ranks: dict[int, dict[int, None]] = defaultdict(dict)
    first_rank: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for op, stage, _ in row:
            first_rank.setdefault(stage, rank)
            if op == FORWARD:
                forward_ranks[stage][rank] = None
    return tuple(
        tuple(forward_ranks[stage]) or (first_rank.get(stage, 0),)
        for stage in range(num_stages)
    )


def find_ranks(
    placement: Sequence[int],
    rows: Sequence[Sequence[Action]],
    replicas: Sequence[Sequence[int]],
) -> Mapping[int, Sequence[int]]:
    """Finds the rank that runs each micro-batch at each stage.

    Where several ranks take turns at a stage, the rows decide.

    Returns:
      For each micro-batch the rank of each stage; without replicas the placement.

    Example:
      >>> rows = [[Action.parse(cell)] for cell in ("0F0", "0F1", "1F0", "1F1")]
      >>> find_ranks((0, 2), rows, ((0, 1), (2, 3)))[1]
      [1, 3]
    """
    # A partial and not a lambda, so that schedules can be pickled.
    ranks = defaultdict[int, list[int]](functools.partial(list, placement))
    if replicas:
        for rank, row in enumerate(rows):
            for _, stage, microbatch in row:
                ranks[microbatch][stage] = rank
    return ranks

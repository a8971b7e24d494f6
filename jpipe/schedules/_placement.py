"""Where stages are: the shapes of the catalogue, and which rank runs what."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ._action import Action


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down the ranks and up again: the last hands to itself."""
    return *range(num_ranks), *reversed(range(num_ranks))


def loop(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stages round the ranks: the last hands on to the first."""
    return (*range(num_ranks),) * num_chunks


def stages_of(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each rank."""
    found: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        found[rank].append(stage)
    return found


def ranks_of(
    placement: Sequence[int], replicas: Sequence[Sequence[int]]
) -> Sequence[Sequence[int]]:
    """All ranks of each stage."""
    return replicas or [(rank,) for rank in placement]


def rank_of(
    placement: Sequence[int],
    rows: Sequence[Sequence[Action]],
    replicas: Sequence[Sequence[int]],
) -> Mapping[int, Sequence[int]]:
    """Of each micro-batch the rank of each stage: which of several, the rows say.

    Example:
      >>> rows = [[Action.parse(cell)] for cell in ("0F0", "0F1", "1F0", "1F1")]
      >>> rank_of((0, 2), rows, ((0, 1), (2, 3)))[1]
      [1, 3]
    """
    # A schedule is pickled with what is known of it.
    found = defaultdict[int, list[int]](functools.partial(list, placement))
    for rank, row in enumerate(rows if replicas else ()):
        for _, stage, microbatch in row:
            found[microbatch][stage] = rank
    return found

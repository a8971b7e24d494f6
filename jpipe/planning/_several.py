"""Cuts for schedules that run several stages on a rank, in a V or in a loop."""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ._climb import Cuts, Ends, Key, climb, every
from ._cuts import best_max
from ._problem import PartitionProblem

# Of some cuts, one for each, or one for each rank and each of them.
Numbers = npt.NDArray[np.float64]

# How many cuts are tried on paper, and around how many in vain.
_TRIED = 10_000
_PATIENCE = 40
# So many cuts are all tried.
_FEW = 1_000


def candidates(problem: PartitionProblem) -> list[Ends]:
    """Cuts that exceed the limit least, then with little to do for the busiest rank.

    Args:
      problem: what is cut.

    Returns:
      Where stages begin and end, in all cuts that were looked at, the best first.
    """
    return climb(_starts(problem), lambda c: _on_paper(problem, c), _TRIED, _PATIENCE)


def excess(problem: PartitionProblem, cuts: Cuts) -> Numbers:
    """The bytes by which the fullest rank exceeds its limit; negative with room left.

    Returns:
      One number for each of the cuts.
    """
    if problem.max_bytes is None:
        return np.zeros(len(cuts))
    return (needs(problem, cuts) - np.array(problem.max_bytes)[:, None]).max(axis=0)


def needs(problem: PartitionProblem, cuts: Cuts) -> Numbers:
    """The bytes of each rank.

    Returns:
      Of shape (ranks, cuts).
    """
    return np.array(
        [
            problem.chain.rank_bytes(
                own, [(cuts[:, s], cuts[:, s + 1]) for s in own.stages]
            )
            for own in problem.in_flight
        ]
    )


def loads(problem: PartitionProblem, cuts: Cuts) -> Numbers:
    """The time of one micro-batch on each rank, in units of the chain.

    Returns:
      Of shape (ranks, cuts).
    """
    each = np.zeros((problem.schedule.num_ranks, len(cuts)))
    pairs = zip(problem.schedule.placement, problem.chain.times, strict=True)
    for stage, (rank, matrix) in enumerate(pairs):
        each[rank] += matrix[cuts[:, stage], cuts[:, stage + 1]]
    return each


def _on_paper(problem: PartitionProblem, cuts: Cuts) -> list[Key]:
    """What some cuts are worth, without running them."""
    each = loads(problem, cuts)
    pairs = enumerate(itertools.pairwise(problem.schedule.placement), start=1)
    crossed = [stage for stage, (one, other) in pairs if one != other]
    moved = problem.chain.transfers[cuts[:, crossed]].sum(axis=1)
    slowest, latency = each.max(axis=0), each.sum(axis=0) + moved
    worth = [slowest, latency]
    if problem.objective == "step":
        worth = [latency + ((problem.num_microbatches or 1) - 1) * slowest]
    over = np.maximum(excess(problem, cuts), 0.0)
    columns = over, *worth, np.square(each).sum(axis=0)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _starts(problem: PartitionProblem) -> Iterator[Ends]:
    """Equal loads for all stages, and as many layers for each."""
    chain, count = problem.chain, problem.chain.num_stages
    if cut := best_max(chain.times, chain.transfers):
        yield cut.ends
    yield from every(chain.num_layers, count, _FEW)
    yield tuple(chain.num_layers * s // count for s in range(count + 1))

"""Cuts for schedules that run several stages on a rank, in a V or in a loop."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ._climb import Cuts, Ends, Key, climb, every
from ._cuts import Problem, best_max
from ._given import Given

# Of some cuts, one for each, or one for each rank and each of them.
Numbers = npt.NDArray[np.float64]

# How many cuts are tried on paper, and around how many in vain.
_TRIED = 10_000
_PATIENCE = 40
# How many of the best are where the search for fewer bytes begins.
BEST = 8
# So many cuts are all tried.
_FEW = 1_000


def candidates(given: Given) -> list[Ends]:
    """Cuts with little to do for the rank that has most, the best first.

    Args:
      given: the arguments; its pins and its limit come before all else.

    Returns:
      Where stages begin and end, in all cuts that were looked at.
    """
    return climb(_starts(given), lambda c: _on_paper(given, c), _TRIED, _PATIENCE)


def nearest(given: Given, starts: list[Ends]) -> tuple[Ends, float]:
    """The cut that exceeds the limit of bytes by the least that was found."""

    def keys(cuts: Cuts) -> list[Key]:
        return _listed(broken_pins(given, cuts), excess(given, cuts).max(axis=0))

    ends = climb(starts, keys, _TRIED)[0]
    return ends, float(excess(given, np.array([ends])).max())


def least(given: Given) -> tuple[Ends, float]:
    """`nearest` among cuts that need little, whatever the limit of bytes is."""
    nothing = dataclasses.replace(given, max_bytes=(1,) * given.num_ranks)
    return nearest(given, candidates(nothing)[:BEST])


def broken_pins(given: Given, cuts: Cuts) -> Numbers:
    """How many pins each of some cuts breaks."""
    placement = np.array(given.placement)
    count = np.zeros(len(cuts))
    for place in given.pins.cuts:
        count += (cuts != place).all(axis=1)
    for group in given.pins.groups:
        stages = [(cuts <= i).sum(axis=1) - 1 for i in group]
        ranks = np.sort(placement[stages], axis=0)
        count += (np.diff(ranks, axis=0) > 0).sum(axis=0)
    return count


def over(given: Given, cuts: Cuts) -> Numbers:
    """By how many bytes each of some cuts exceeds the limits, of all ranks together."""
    if given.max_bytes is None:
        return np.zeros(len(cuts))
    return np.maximum(excess(given, cuts), 0.0).sum(axis=0)


def excess(given: Given, cuts: Cuts) -> Numbers:
    """The bytes by which each rank exceeds its limit; negative where it has room.

    Returns:
      Of shape (ranks, cuts).
    """
    assert given.max_bytes is not None
    needs = [given.chain.rank_bytes(held, cuts) for held in given.held]
    return np.array(needs) - np.array(given.max_bytes, float)[:, None]


def loads(given: Given, cuts: Cuts) -> Numbers:
    """The time of one micro-batch on each rank, in units of the chain.

    Returns:
      Of shape (ranks, cuts).
    """
    each = np.zeros((given.num_ranks, len(cuts)))
    for stage, (rank, matrix) in enumerate(
        zip(given.placement, given.chain.times, strict=True)
    ):
        each[rank] += matrix[cuts[:, stage], cuts[:, stage + 1]]
    return each


def _on_paper(given: Given, cuts: Cuts) -> list[Key]:
    """What some cuts are worth, without running them."""
    each = loads(given, cuts)
    pairs = enumerate(itertools.pairwise(given.placement), start=1)
    crossed = [stage for stage, (one, other) in pairs if one != other]
    moved = given.chain.cuts[cuts[:, crossed]].sum(axis=1)
    slowest, passing = each.max(axis=0), each.sum(axis=0) + moved
    broken = broken_pins(given, cuts), over(given, cuts)
    even = np.square(each).sum(axis=0)
    if given.objective == "max":
        return _listed(*broken, slowest, passing, even)
    count = (given.num_microbatches or 1) - 1
    return _listed(*broken, passing + count * slowest, even)


def _listed(*columns: Numbers) -> list[Key]:
    """Keys of cuts, from what there is of each."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _starts(given: Given) -> Iterator[Ends]:
    """Equal loads for all stages, with what belongs together in one, or not."""
    chain = given.chain
    for apart in (False, True):
        allowed = given.pins.allowed(chain.num_layers, apart)
        times = [np.where(allowed, matrix, np.inf) for matrix in chain.times]
        cut = best_max(Problem(times, chain.cuts))
        if cut is not None:
            yield cut.ends
    count = chain.num_stages
    yield from every(chain.num_layers, count, _FEW)
    yield tuple(chain.num_layers * s // count for s in range(count + 1))

"""Cuts for schedules that run several stages on a rank, in a V or in a loop."""

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from ._climb import Ends, Key, climb, every
from ._cuts import Problem, best_max
from ._given import Given

# How many cuts are tried on paper, and around how many in vain.
_TRIED = 10_000
_PATIENCE = 40
# So many cuts are all tried.
_FEW = 1_000


def candidates(given: Given) -> list[Ends]:
    """Cuts with little to do for the rank that has most, the best first.

    Args:
      given: the arguments; its pins and its limit come before all else.

    Returns:
      Where stages begin and end, in all cuts that were looked at.
    """
    return climb(_starts(given), lambda e: _on_paper(given, e), _TRIED, _PATIENCE)


def nearest(given: Given, starts: list[Ends]) -> tuple[Ends, float]:
    """The cut that exceeds the limit of bytes by the least that was found."""

    def key(ends: Ends) -> Key:
        return (*broken(given, ends)[:1], max(excess(given, ends)))

    ends = climb(starts, key, _TRIED)[0]
    return ends, max(excess(given, ends))


def broken(given: Given, ends: Ends) -> Key:
    """How many pins a cut breaks, and by how many bytes it exceeds the limit."""
    count = len({*given.pins.cuts} - {*ends})
    for group in given.pins.groups:
        ranks = {given.placement[bisect.bisect_right(ends, i) - 1] for i in group}
        count += len(ranks) - 1
    over = sum(e for e in excess(given, ends) if e > 0) if given.max_bytes else 0.0
    return float(count), over


def excess(given: Given, ends: Ends) -> list[float]:
    """The bytes by which each rank exceeds its limit; negative where it has room."""
    assert given.max_bytes is not None
    return [
        given.chain.rank_bytes(held, ends) - most
        for held, most in zip(given.held, given.max_bytes, strict=True)
    ]


def loads(given: Given, ends: Ends) -> list[float]:
    """The time of one micro-batch on each rank, in units of the chain."""
    each = [0.0] * given.num_ranks
    for stage, (rank, matrix) in enumerate(
        zip(given.placement, given.chain.times, strict=True)
    ):
        each[rank] += matrix.item(ends[stage], ends[stage + 1])
    return each


def _on_paper(given: Given, ends: Ends) -> Key:
    """What a cut is worth, without running it."""
    each = loads(given, ends)
    passing = sum(each) + sum(
        given.chain.cuts.item(ends[stage])
        for stage, (one, other) in enumerate(
            itertools.pairwise(given.placement), start=1
        )
        if one != other
    )
    even = sum(load * load for load in each)
    if given.objective == "max":
        return (*broken(given, ends), max(each), passing, even)
    count = (given.num_microbatches or 1) - 1
    return (*broken(given, ends), passing + count * max(each), even)


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

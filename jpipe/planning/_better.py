"""Which candidates are better, and their cuts made better."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..schedules import Schedule
from ._climb import Cuts, climb
from ._forecast import Candidate, Hardware, evaluate

# So many of the best get a better cut, if they take no longer than so many times the
# best of them, and how many actions are simulated for each.
_BETTERED, _NEAR, _ACTIONS = 6, 1.3, 20_000


def ranked(found: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first."""
    return sorted(found, key=lambda candidate: _worth(candidate, hardware))


def _worth(candidate: Candidate, hardware: Hardware) -> tuple[float, ...]:
    """What is less is better."""
    if not candidate.fits(hardware):
        return 1, candidate.most_bytes, candidate.seconds
    # Of two as fast, the smaller.
    return 0, candidate.seconds, candidate.most_bytes


def promising(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best candidates, one of each schedule, with one device per stage and more."""
    for several in (False, True):
        own = [c for c in found if (c.data > 1) == several and len(c.balance) > 1]
        each: dict[Schedule, Candidate] = {}
        for candidate in own:
            if candidate.seconds <= _NEAR * own[0].seconds:
                each.setdefault(candidate.schedule, candidate)
        yield from itertools.islice(each.values(), _BETTERED)


def bettered(
    candidate: Candidate, optimizer_bytes: Sequence[int], hardware: Hardware
) -> Candidate:
    """The best of a candidate's cut and those around it, by their simulated steps.

    A cut is made by what stages take, one after another: not by where its schedule
    waits, nor by how long gradients are exchanged.

    Args:
      candidate: the candidate.
      optimizer_bytes: the optimizer's state of each layer.
      hardware: what it runs on.
    """
    schedule, seen = candidate.schedule, {}

    def keys(cuts: Cuts) -> list[tuple[float, ...]]:
        for ends in map(tuple, cuts.tolist()):
            balance = [b - a for a, b in itertools.pairwise(ends)]
            stages = candidate.profile, optimizer_bytes, balance, candidate.remat
            seen[ends] = evaluate(*stages, schedule, hardware, candidate.data)
        return [_worth(seen[tuple(ends)], hardware) for ends in cuts.tolist()]

    most = max(_ACTIONS // sum(map(len, schedule.rows)), 1)
    ends = (0, *itertools.accumulate(candidate.balance))
    return seen[climb([ends], keys, most)[0]]

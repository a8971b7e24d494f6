"""Which candidates are better, and their cuts made better."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..schedules import Schedule
from ..schedules._action import WEIGHT
from ._climb import Cuts, climb
from ._forecast import Candidate, Hardware, evaluate
from ._made import measured_on_cpu

# So many of the best get a better cut, if they take no longer than so many times the
# best of them, and how many actions are simulated for each.
_BETTERED, _NEAR, _ACTIONS = 6, 1.3, 20_000
# Where devices share cores, halves of backwards have to be faster by so much.
_GAIN = 0.05


def ranked(found: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first."""
    return sorted(found, key=lambda candidate: worth(candidate, hardware))


def worth(candidate: Candidate, hardware: Hardware) -> tuple[float, ...]:
    """What is less is better."""
    if not candidate.fits(hardware):
        return 1, candidate.most_bytes, candidate.seconds
    # Of two as fast, the smaller.
    return 0, candidate.seconds, candidate.most_bytes


def preferred(found: Sequence[Candidate], hardware: Hardware) -> list[Candidate]:
    """The candidates, the one first that is to be taken: as a rule the fastest.

    Devices that share cores have them to themselves while others wait, and what fills a
    bubble takes them away: with halves of backwards a step is not as fast as predicted
    (`benchmarks/README.md`).

    Args:
      found: the candidates, the best first.
      hardware: what they run on.
    """
    best = found[0]
    if not (best.fits(hardware) and measured_on_cpu(best.profile.made)):
        return list(found)
    as_fast = (
        each
        for each in found
        if each.fits(hardware)
        and each.num_devices == best.num_devices
        and each.seconds <= (1 + _GAIN) * best.seconds
        and not has_halves(each.schedule)
    )
    taken = best if not has_halves(best.schedule) else next(as_fast, best)
    return [taken, *(each for each in found if each is not taken)]


def has_halves(schedule: Schedule) -> bool:
    """Whether backwards run in two halves."""
    return any(action.op == WEIGHT for row in schedule.rows for action in row)


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
        return [worth(seen[tuple(ends)], hardware) for ends in cuts.tolist()]

    most = max(_ACTIONS // sum(map(len, schedule.rows)), 1)
    ends = (0, *itertools.accumulate(candidate.balance))
    return seen[climb([ends], keys, most)[0]]

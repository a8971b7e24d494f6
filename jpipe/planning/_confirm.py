"""Candidates that fit as their lists of instructions say, not only as was thought."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .._instructions import _bytes
from .._instructions._progress import Progress
from .._instructions._transfer import OnPaper
from ._better import has_halves, preferred, worth
from ._forecast import Candidate
from ._request import Request
from ._search import Space, search

# So many searches, and so many candidates of each that are lowered, until one fits.
_SEARCHES, _MOST = 3, 5


def decided(space: Space, request: Request) -> list[Candidate]:
    """Candidates, the first with the bytes that its list of instructions holds.

    Where the best need more than was thought, others are looked for under a limit that
    is smaller by as much; where they need less, and faster ones seemed not to fit,
    under a larger one.

    Args:
      space: what to choose from.
      request: what the profiles answer.

    Returns:
      First one that fits, as its instructions say; if none was found that does, the one
      of those that were lowered which needs least.
    """
    confirm, under = Confirm(space, request), space
    rounds: list[list[Candidate]] = []
    for _ in range(_SEARCHES):
        found = search(under)
        if not found:
            break
        candidates, more = confirm(preferred(found, under.hardware))
        rounds.append(candidates)
        if under.limit is None or not _may_gain(
            found, candidates[0], more, space, under
        ):
            break
        limit = int(under.limit / more)
        hardware = dataclasses.replace(under.hardware, memory_limit=limit)
        under = dataclasses.replace(space, hardware=hardware)
    return min(rounds, key=lambda each: worth(each[0], space.hardware), default=[])


def _may_gain(
    found: Sequence[Candidate],
    taken: Candidate,
    more: float,
    space: Space,
    under: Space,
) -> bool:
    """Whether a search under another limit may find a better one.

    Args:
      found: what was found under this one.
      taken: the best of it, as its instructions say.
      more: how many times what was thought was needed.
      space: what it has to fit.
      under: the same with the limit that was searched under.
    """
    if more > 1:
        return found[0].fits(under.hardware)
    fast = taken.seconds if taken.fits(space.hardware) else math.inf
    return more < 1 and any(
        each.seconds < fast and not each.fits(under.hardware) for each in found
    )


class Confirm:
    """Lowers candidates until one fits.

    Args:
      space: what they were chosen from.
      request: what the profiles answer.
    """

    def __init__(self, space: Space, request: Request) -> None:
        self._hardware = space.hardware
        self._request = request
        self._more: dict[Any, float] = {}
        self._known: dict[Any, Candidate] = {}

    def __call__(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], float]:
        """The candidates, the first with the bytes that its instructions hold.

        Where one needs more than was taken for it, or less, so may others of its kind:
        those come next that would fit even so, and at last the one that needs least.

        Args:
          candidates: the best first.

        Returns:
          They, and how many times what was thought those need that do not fit, the
          least of it; if the first one fits, at most once.
        """
        alike = {_cut_and_order(each): each for each in reversed(candidates)}
        left = list(reversed(alike.values()))
        with Progress("candidates lowered") as progress:
            return self._first_fit(left, progress)

    def _first_fit(
        self, left: list[Candidate], progress: Progress
    ) -> tuple[list[Candidate], float]:
        short: list[Candidate] = []
        least = 1.0
        while left and len(short) < _MOST:
            progress.say(len(short), min(len(left) + len(short), _MOST))
            likely = list(filter(self._is_likely, left))
            if not likely or len(short) == _MOST - 1:
                likely = [min(left, key=lambda c: c.most_bytes)]
            guess = likely.pop(0)
            found = self._exactly(guess)
            more = found.most_bytes / guess.most_bytes
            if found.fits(self._hardware):
                # It takes the time that it took before.
                return [found, *short, *likely], least if short else min(more, 1.0)
            short.append(found)
            left.remove(guess)
            least = more if len(short) == 1 else min(more, least)
            self._more[_kind(guess)] = max(more, self._more.get(_kind(guess), more))
        return [*sorted(short, key=lambda c: c.most_bytes), *left], least

    def _is_likely(self, candidate: Candidate) -> bool:
        """Whether a candidate fits if as much is missing as of others of its kind."""
        limit, more = self._hardware.memory_limit, self._more.get(_kind(candidate), 1)
        return limit is None or candidate.most_bytes * more <= limit

    def _exactly(self, candidate: Candidate) -> Candidate:
        own = _cut_and_order(candidate)
        if own not in self._known:
            self._known[own] = _exactly(candidate, self._request)
        return self._known[own]


def _kind(candidate: Candidate) -> tuple[Any, ...]:
    """What candidates have in common of whose bytes as much may be missing."""
    modes, halves = frozenset(candidate.remat), has_halves(candidate.schedule)
    return len(candidate.balance), modes, candidate.data, halves


def _cut_and_order(candidate: Candidate) -> tuple[Any, ...]:
    """What tells a candidate from others."""
    return candidate.schedule, candidate.balance, candidate.remat, candidate.data


def _exactly(candidate: Candidate, request: Request) -> Candidate:
    """A candidate with the bytes that its list of instructions holds."""
    schedule = candidate.schedule
    asked = dataclasses.replace(request, num_microbatches=schedule.num_microbatches)
    data = candidate.data
    gradient = asked.lowered(candidate.balance, candidate.remat, schedule, data)
    program = gradient.program
    peaks = dict(zip(program.devices, _bytes.peaks(program), strict=True))
    return dataclasses.replace(
        candidate,
        memory=tuple(
            dataclasses.replace(own, held=peaks[OnPaper(rank, data)] - own.lasting)
            for rank, own in enumerate(candidate.memory)
        ),
        held=tuple(_bytes.most_residuals(program, schedule.num_stages)),
        kept=tuple(map(gradient.kept, range(schedule.num_stages))),
    )

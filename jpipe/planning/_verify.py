"""Candidates that fit by their lists of instructions, not only by the forecast."""

import dataclasses
from collections.abc import Sequence

from .._instructions._progress import counted
from .._instructions._transfer import OnPaper
from ._forecast import Candidate
from ._request import Request
from ._search import search
from ._space import Space
from ._subject import Subject

# So many of the best candidates are lowered, until one fits.
_BEST = 4


def choose(space: Space, request: Request, subject: Subject) -> list[Candidate]:
    """Candidates, the first with the bytes that its list of instructions holds.

    Where the best needs more than predicted, others are looked for once more, under a
    limit that is smaller by as much; where it needs less, and faster ones seemed not to
    fit, under a larger one.

    Args:
      space: what to choose from.
      request: what the profiles answer.
      subject: what is planned.

    Returns:
      First one that fits by its instructions; if none was found that does, the one
      of those that were lowered which needs least.
    """
    hardware = space.hardware
    found = search(space)
    candidates, ratio = verified(found, space, request, subject)
    if not candidates or hardware.memory_limit is None:
        return candidates
    taken = candidates[0]
    faster = [
        each
        for each in found
        if not each.fits(hardware)
        and not (taken.fits(hardware) and taken.seconds <= each.seconds)
    ]
    if (found[0].fits(hardware) and ratio > 1) or (faster and ratio < 1):
        limit = int(hardware.memory_limit / ratio)
        under = dataclasses.replace(hardware, memory_limit=limit)
        found = search(dataclasses.replace(space, hardware=under))
        others, _ = verified(found, space, request, subject)
        each = candidates, others
        candidates = min(each, key=lambda own: own[0].objective(hardware))
    return candidates


def verified(
    candidates: Sequence[Candidate], space: Space, request: Request, subject: Subject
) -> tuple[list[Candidate], float]:
    """The candidates, the first with the bytes that its instructions hold.

    Args:
      candidates: the best first; they are lowered one by one, until one fits, and at
        last the one that needs least.
      space: what they were chosen from.
      request: what the profiles answer.
      subject: what is planned.

    Returns:
      They, and how many times what was thought the first of them needs: of several that
      do not fit, the one where that is least.
    """
    alike = {
        (each.schedule, each.balance, each.remat, each.data): each
        for each in reversed(candidates)
    }
    left = list(reversed(alike.values()))
    least = sorted(left[_BEST:], key=lambda each: each.most_bytes)[:1]
    lowered: list[Candidate] = []
    ratios: list[float] = []
    for guess in counted("candidates lowered", left[:_BEST] + least):
        left = [each for each in left if each is not guess]
        lowered.append(_lowered(guess, request, subject))
        ratios.append(lowered[-1].most_bytes / guess.most_bytes)
        if lowered[-1].fits(space.hardware):
            break
    lowered.sort(key=lambda each: each.objective(space.hardware))
    return [*lowered, *left], min(ratios, default=1.0)


def _lowered(candidate: Candidate, request: Request, subject: Subject) -> Candidate:
    """A candidate with the bytes that its list of instructions holds."""
    schedule, data = candidate.schedule, candidate.data
    adjusted = dataclasses.replace(request, num_microbatches=schedule.num_microbatches)
    run = candidate.balance, candidate.remat, schedule, data
    plan = subject.planned(adjusted, *run)
    peaks = dict(plan.peak_bytes)
    memory = tuple(
        dataclasses.replace(own, held=peaks[str(OnPaper(rank, data))] - own.lasting)
        for rank, own in enumerate(candidate.memory)
    )
    return dataclasses.replace(candidate, memory=memory, plan=plan)

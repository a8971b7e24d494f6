"""Candidates that fit by their lists of instructions, not only by the forecast."""

import dataclasses

from .._instructions._progress import count_items
from .._instructions._transfer import AbstractDevice
from ._forecast import Candidate
from ._plan_search import search
from ._request import Request
from ._space import SearchSpace
from ._subject import PlannedModel

# So many of the best candidates are lowered, until one fits.
_BEST = 4


def choose(
    space: SearchSpace, request: Request, subject: PlannedModel
) -> list[Candidate]:
    """Candidates, the first with the bytes that its list of instructions holds.

    Args:
      space: what to choose from.
      request: what the profiles answer.
      subject: what is planned.

    Returns:
      First one that fits by its instructions; if none was found that does, the one
      of those that were lowered which needs least.
    """
    found = search(space)
    alike = {(x.schedule, x.balance, x.remat, x.data): x for x in reversed(found)}
    left = list(reversed(alike.values()))
    least = sorted(left[_BEST:], key=lambda each: each.most_bytes)[:1]
    lowered: list[Candidate] = []
    for guess in count_items("candidates lowered", left[:_BEST] + least):
        left = [each for each in left if each is not guess]
        lowered.append(_lowered(guess, request, subject))
        if lowered[-1].fits(space.hardware):
            break
    lowered.sort(key=lambda each: each.objective(space.hardware))
    return [*lowered, *left]


def _lowered(
    candidate: Candidate, request: Request, subject: PlannedModel
) -> Candidate:
    """A candidate with the bytes that its list of instructions holds."""
    schedule, data = candidate.schedule, candidate.data
    adjusted = dataclasses.replace(request, num_microbatches=schedule.num_microbatches)
    run = candidate.balance, candidate.remat, schedule, data
    plan = subject.planned(adjusted, *run)
    peaks = dict(plan.peak_bytes)
    memory = tuple(
        dataclasses.replace(
            own, activations=peaks[str(AbstractDevice(rank, data))] - own.lasting
        )
        for rank, own in enumerate(candidate.memory)
    )
    return dataclasses.replace(candidate, memory=memory, plan=plan)

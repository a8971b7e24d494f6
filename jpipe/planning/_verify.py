"""Checks the best candidate against the instructions that it would run.

A search forecasts the bytes of activations. Here the best candidate is lowered to its
list of instructions, from which the bytes are counted:

    limit of the search = limit of a device - (counted bytes - forecast bytes)

Where it needs more than it may, the search is repeated under that limit, which leaves
this candidate out; until one fits by its instructions, or none does by its forecast.

Other forecasts may have counted too many bytes, and a smaller limit leaves these out
too. So those of all searches that are faster than the one that fits are lowered last.
"""

import dataclasses
from collections.abc import Iterable

from .._instructions._progress import count_items
from .._instructions._transfer import AbstractDevice
from ._forecast import Candidate
from ._plan_search import search
from ._planned_model import PlannedModel
from ._request import Request
from ._space import Choice, SearchSpace

# The number of candidates that are lowered until one fits: each takes a search. And
# of faster ones that are lowered after that.
_NUM_LOWERED = 4


def rank_candidates(
    space: SearchSpace, request: Request, model: PlannedModel
) -> list[Candidate]:
    """Ranks the candidates of a space, the best first, with its counted bytes.

    Args:
      space: the choices.
      request: the arguments of the profiles.
      model: the model that is planned.

    Returns:
      First a candidate that fits by its instructions; if none of those that were
      lowered does, the one of them that needs least. Empty if there is no candidate.
    """
    hardware = space.hardware
    limit = hardware.memory_limit
    lowered: dict[Choice, Candidate] = {}
    # choice -> its candidate, by any of the searches
    forecasts: dict[Choice, Candidate] = {}
    for _ in count_items("candidates lowered", range(_NUM_LOWERED)):
        under_limit = dataclasses.replace(hardware, memory_limit=limit)
        candidates = search(dataclasses.replace(space, hardware=under_limit))
        for candidate in candidates:
            forecasts.setdefault(candidate.choice, candidate)
        forecast = next((x for x in candidates if x.choice not in lowered), None)
        if forecast is None:
            break
        counted = _lower(forecast, request, model)
        lowered[forecast.choice] = counted
        if limit is None or counted.fits(hardware) or not forecast.fits(under_limit):
            break
        assert hardware.memory_limit is not None
        limit = hardware.memory_limit - (counted.max_bytes - forecast.max_bytes)

    def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda x: x.objective(hardware))

    if not lowered:
        return []
    best, *_ = rank(lowered.values())
    # Without the bytes, which break ties.
    least = best.objective(hardware)[:2]
    not_lowered = [x for x in rank(forecasts.values()) if x.choice not in lowered]
    faster = [x for x in not_lowered if x.objective(hardware)[:2] < least]
    for forecast in faster[:_NUM_LOWERED]:
        counted = _lower(forecast, request, model)
        lowered[forecast.choice] = counted
        if counted.fits(hardware):
            break
    not_lowered = [x for x in not_lowered if x.choice not in lowered]
    return [*rank(lowered.values()), *not_lowered]


def _lower(candidate: Candidate, request: Request, model: PlannedModel) -> Candidate:
    """A candidate with its plan, and the bytes that its instructions hold."""
    choice = candidate.choice
    num_microbatches = choice.schedule.num_microbatches
    request = dataclasses.replace(request, num_microbatches=num_microbatches)
    plan = model.describe_step(request, choice)
    # name of a device -> the most bytes that it holds
    peaks = dict(plan.peak_bytes)
    memory = []
    for rank, forecast in enumerate(candidate.memory):
        peak = peaks[str(AbstractDevice(rank, choice.num_shards))]
        activations = peak - forecast.parameters - forecast.gradients
        memory.append(dataclasses.replace(forecast, activations=activations))
    return dataclasses.replace(candidate, memory=tuple(memory), plan=plan)

"""Checks the best candidates against the instructions that they would run.

A search forecasts the bytes of activations. Here the best candidates are lowered to
their lists of instructions, from which the bytes are counted, until one fits.
"""

import dataclasses

from .._instructions._progress import count_items
from .._instructions._transfer import AbstractDevice
from ._forecast import Candidate
from ._plan_search import search
from ._planned_model import PlannedModel
from ._request import Request
from ._space import Choice, SearchSpace

# The number of candidates that are lowered until one fits, before the smallest of all
# others.
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
    candidates = _distinct(search(space))
    best = candidates[:_NUM_LOWERED]
    smallest = sorted(candidates[_NUM_LOWERED:], key=lambda x: x.max_bytes)[:1]

    forecast_only = candidates
    lowered: list[Candidate] = []
    for candidate in count_items("candidates lowered", best + smallest):
        forecast_only = [x for x in forecast_only if x is not candidate]
        lowered.append(_lower(candidate, request, model))
        if lowered[-1].fits(space.hardware):
            break

    lowered.sort(key=lambda candidate: candidate.objective(space.hardware))
    return [*lowered, *forecast_only]


def _distinct(ranked: list[Candidate]) -> list[Candidate]:
    """Candidates without repeated choices, whose forecasts are equal."""
    # choice -> its candidate; from the last on, so that it keeps the place of its last
    by_choice: dict[Choice, Candidate] = {}
    for candidate in reversed(ranked):
        by_choice[candidate.choice] = candidate
    return list(reversed(by_choice.values()))


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

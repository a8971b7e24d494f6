"""The best candidates, lowered to the instructions that they would run.

A search forecasts the bytes of activations. A lowered candidate has its instructions,
from which the bytes are counted:

    limit of the search = limit of a device - (counted bytes - forecast bytes)

`rank_candidates` lowers the best. Where it needs more than it may, the search is
repeated under that limit, which leaves this candidate out; until one fits by its
instructions, or none does by its forecast. Other forecasts may have counted too many
bytes, and a smaller limit leaves these out too. So those of all searches that are
faster than the one that fits are lowered last.

`find_finalists` does so for each family of schedules by itself: those with as many
stages on a rank, and with backwards whole or in halves. How fast families are against
each other is what forecasts know least; the finalists are run (`_api/_tune`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .._instructions._progress import count_items
from .._instructions._transfer import AbstractDevice
from .._partition._remat_mode import MIN_CUT
from ..schedules import gpipe, one_f_one_b
from ._forecast import Candidate, evaluate
from ._plan_problem import PlanProblem
from ._plan_search import search
from ._scaled_profiles import scale_layers
from ._space import Choice, SearchSpace

# The number of candidates that are lowered until one fits: each takes a search. And
# of faster ones that are lowered after that.
_NUM_LOWERED = 4
# The number of families whose best candidate is run.
_NUM_FAMILIES = 3
# The micro-batches of an even split, for each rank.
_MICROBATCHES_PER_RANK = 4
# The factor of estimated times is sought from this to its inverse, up to an error.
_LEAST_FACTOR = 1e-9
_FACTOR_ERROR = 1e-3


def rank_candidates(problem: PlanProblem) -> list[Candidate]:
    """Ranks the candidates of a problem, the best first, with its counted bytes.

    Returns:
      First a candidate that fits by its instructions; if none of those that were
      lowered does, the one of them that needs least.

    Raises:
      ValueError: if no schedule has an order for these numbers.
    """
    candidates = _rank_candidates(problem)
    _check_order(problem.space, candidates)
    return candidates


def _rank_candidates(problem: PlanProblem) -> list[Candidate]:
    """The ranking of `rank_candidates`; empty if there is no candidate."""
    space = problem.space
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
        counted = _lower(forecast, problem)
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
        counted = _lower(forecast, problem)
        lowered[forecast.choice] = counted
        if counted.fits(hardware):
            break
    not_lowered = [x for x in not_lowered if x.choice not in lowered]
    return [*rank(lowered.values()), *not_lowered]


def find_finalists(problem: PlanProblem) -> list[Candidate]:
    """The best candidates of a few families of schedules, the best first.

    Raises:
      ValueError: if no schedule has an order for these numbers.
    """
    best_of_families: list[Candidate] = []
    families = _group_by_family(problem.space)
    for names in count_items("families of schedules searched", families):
        space = dataclasses.replace(
            problem.space,
            choices=dataclasses.replace(problem.space.choices, schedule_names=names),
        )
        ranked = _rank_candidates(dataclasses.replace(problem, space=space))
        best_of_families += ranked[:1]
    _check_order(problem.space, best_of_families)
    hardware = problem.space.hardware
    finalists: list[Candidate] = []
    for candidate in sorted(best_of_families, key=lambda x: x.objective(hardware)):
        # On one device all schedules of a micro-batch are one.
        if not any(candidate.is_same_run(finalist) for finalist in finalists):
            finalists.append(candidate)
    return finalists[:_NUM_FAMILIES]


def split_evenly(problem: PlanProblem) -> Candidate:
    """The candidate of a user who plans nothing: as many layers per stage, 1F1B.

    A loss of the whole mini-batch follows all forwards: there it is GPipe.
    """
    space = problem.space
    num_shards = min(shape.num_shards for shape in space.mesh_shapes)
    num_ranks = min(space.hardware.num_devices // num_shards, space.num_layers)
    ends = [space.num_layers * rank // num_ranks for rank in range(num_ranks + 1)]
    counts = [
        x.num_microbatches for x in space.mesh_shapes if x.num_shards == num_shards
    ]
    usual_count = _MICROBATCHES_PER_RANK * num_ranks
    count = min(counts, key=lambda count: abs(count - usual_count))
    build = gpipe if problem.request.reduction == "batch" else one_f_one_b
    choice = Choice(
        balance=tuple(end - begin for begin, end in itertools.pairwise(ends)),
        remat=(_usual_mode(space),) * num_ranks,
        schedule=build(num_ranks, count),
        num_shards=num_shards,
    )
    return _lower(evaluate(space, choice), problem)


def take_one_stage(problem: PlanProblem) -> Candidate | None:
    """The candidate of a user without a pipeline: one stage, in few micro-batches.

    Forecasts know least how much longer actions take between devices than alone.

    Returns:
      The candidate of as few micro-batches as fit; ``None`` if none fits.
    """
    space = problem.space
    num_shards = min(shape.num_shards for shape in space.mesh_shapes)
    counts = {
        x.num_microbatches for x in space.mesh_shapes if x.num_shards == num_shards
    }
    for count in sorted(counts):
        choice = Choice(
            balance=(space.num_layers,),
            remat=(_usual_mode(space),),
            schedule=gpipe(1, count),
            num_shards=num_shards,
        )
        candidate = _lower(evaluate(space, choice), problem)
        if candidate.fits(space.hardware):
            return candidate
    return None


def scale_times(problem: PlanProblem, ran: Candidate, seconds: float) -> PlanProblem:
    """A problem whose layers take so long that a step that ran takes what it took.

    The times of all layers are multiplied by one factor. What an action takes besides
    stays as it is.

    Args:
      problem: the problem.
      ran: the candidate that ran.
      seconds: the seconds of its step.

    Returns:
      The problem; with layers that take next to nothing if actions alone take longer.
    """

    def scale(factor: float) -> PlanProblem:
        factors = [factor] * problem.space.num_layers
        profiles = {
            count: scale_layers(profile, factors)
            for count, profile in problem.space.profiles.items()
        }
        space = dataclasses.replace(problem.space, profiles=profiles)
        profile = scale_layers(problem.profile, factors)
        return dataclasses.replace(problem, space=space, profile=profile)

    low = _LEAST_FACTOR
    high = 1 / _LEAST_FACTOR
    while high > low * (1 + _FACTOR_ERROR):
        middle = math.sqrt(low * high)
        if evaluate(scale(middle).space, ran.choice).seconds < seconds:
            low = middle
        else:
            high = middle
    return scale(high)


def forecast_again(problem: PlanProblem, lowered: Candidate) -> Candidate:
    """A lowered candidate with the times of a problem; its bytes were counted."""
    forecast = evaluate(problem.space, lowered.choice)
    return dataclasses.replace(forecast, memory=lowered.memory, plan=lowered.plan)


def _usual_mode(space: SearchSpace) -> str:
    """The remat mode of a user who plans nothing, if the user allows it."""
    if MIN_CUT.name in space.choices.remat_modes:
        return MIN_CUT.name
    return space.choices.remat_modes[0]


def _group_by_family(space: SearchSpace) -> list[tuple[str, ...]]:
    """The schedules with as many stages on a rank, and backwards whole or in halves.

    A schedule of the user's is a family of its own.
    """
    families: dict[Any, list[str]] = {}
    for name in space.choices.schedule_names:
        families.setdefault(space.choices.builders[name].family, []).append(name)
    return list(map(tuple, families.values()))


def _check_order(space: SearchSpace, candidates: Sequence[Candidate]) -> None:
    """Checks that there are candidates."""
    if candidates:
        return
    counts = sorted({shape.num_microbatches for shape in space.mesh_shapes})
    raise ValueError(
        f"plan: schedules={list(space.choices.schedule_names)} have no order for "
        f"{space.num_layers} layers on {space.hardware.num_devices} devices in "
        f"{counts} micro-batches"
    )


def _lower(candidate: Candidate, problem: PlanProblem) -> Candidate:
    """A candidate with its plan, and the bytes that its instructions hold."""
    choice = candidate.choice
    num_microbatches = choice.schedule.num_microbatches
    request = dataclasses.replace(problem.request, num_microbatches=num_microbatches)
    plan = problem.model.describe_step(request, choice)
    # name of a device -> the most bytes that it holds
    peaks = dict(plan.peak_bytes)
    memory = []
    for rank, forecast in enumerate(candidate.memory):
        peak = peaks[str(AbstractDevice(rank, choice.num_shards))]
        activations = peak - forecast.parameters - forecast.gradients
        memory.append(dataclasses.replace(forecast, activations=activations))
    return dataclasses.replace(candidate, memory=tuple(memory), plan=plan)

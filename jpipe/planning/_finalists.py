"""The best candidates, lowered to the instructions that they would run.

A search forecasts the bytes of activations. A lowered candidate has its instructions,
from which the bytes are counted.

`rank_candidates` lowers the best. Where it needs more than it may, the search is
repeated with what its forecast lacked (`_byte_errors`), until one fits by its
instructions, or none does by its forecast. Forecasts of the same kind may lack less
than that one. So those of all searches that are faster than the one that fits are
lowered last.

`jpipe.tune` runs finalists (`_api/_tune`): the best of each family of schedules by
itself, as how fast families are against each other is what forecasts know least; then
the best of all. Layers take the times of the steps that ran before the next is sought.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._instructions._progress import count_items
from .._instructions._transfer import AbstractDevice
from .._partition._remat_mode import MIN_CUT
from ..schedules import gpipe, one_f_one_b
from ._forecast import Candidate, evaluate
from ._plan_problem import PlanProblem
from ._plan_search import search
from ._space import Choice, SearchSpace

# The number of candidates that are lowered until one fits: each takes a search. And
# of faster ones that are lowered after that.
_NUM_LOWERED = 4
# The micro-batches of an even split, for each rank.
_MICROBATCHES_PER_RANK = 4


def rank_candidates(problem: PlanProblem) -> list[Candidate]:
    """Ranks the candidates of a problem, the best first, with its counted bytes.

    Returns:
      First a candidate that fits by its instructions; if none of those that were
      lowered does, the one of them that needs least.

    Raises:
      ValueError: if no schedule has an order for these numbers.
    """
    space = problem.space
    hardware = space.hardware
    lowered: dict[Choice, Candidate] = {}
    # choice -> its candidate, by any of the searches
    forecasts: dict[Choice, Candidate] = {}
    for _ in count_items("candidates lowered", range(_NUM_LOWERED)):
        candidates = search(space)
        for candidate in candidates:
            forecasts.setdefault(candidate.choice, candidate)
        forecast = next((x for x in candidates if x.choice not in lowered), None)
        if forecast is None:
            break
        counted = lower(forecast, problem)
        lowered[forecast.choice] = counted
        if counted.fits(hardware) or not forecast.fits(hardware):
            break
        lacking = counted.max_bytes - forecast.max_bytes
        space = space.with_byte_error(forecast.choice, lacking)

    def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda x: x.objective(hardware))

    _check_order(space, [*lowered.values()])
    best, *_ = rank(lowered.values())
    # Without the bytes, which break ties.
    least = best.objective(hardware)[:2]
    not_lowered = [x for x in rank(forecasts.values()) if x.choice not in lowered]
    faster = [x for x in not_lowered if x.objective(hardware)[:2] < least]
    for forecast in faster[:_NUM_LOWERED]:
        counted = lower(forecast, problem)
        lowered[forecast.choice] = counted
        if counted.fits(hardware):
            break
    not_lowered = [x for x in not_lowered if x.choice not in lowered]
    return [*rank(lowered.values()), *not_lowered]


def find_finalist(
    space: SearchSpace,
    is_wanted: Callable[[Candidate], bool],
    most_seconds: float,
) -> Candidate | None:
    """The best forecast that is wanted; ``None`` if there is none.

    Args:
      space: the choices.
      is_wanted: True for a candidate that may be chosen.
      most_seconds: the seconds of a step that it has to be faster than.
    """
    for candidate in search(space, is_wanted=is_wanted, most_seconds=most_seconds):
        if is_wanted(candidate) and candidate.seconds < most_seconds:
            return candidate
    return None


def lower(candidate: Candidate, problem: PlanProblem) -> Candidate:
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


def list_families(space: SearchSpace) -> list[tuple[str, ...]]:
    """The schedules with as many stages on a rank, and backwards whole or in halves.

    A schedule of the user's is a family of its own.
    """
    families: dict[Any, list[str]] = {}
    for name in space.choices.schedule_names:
        families.setdefault(space.choices.builders[name].family, []).append(name)
    return [tuple(names) for names in families.values()]


def list_even_splits(problem: PlanProblem) -> list[Choice]:
    """The choices of a user who plans nothing: as many layers per stage, 1F1B.

    A loss of the whole mini-batch follows all forwards: there it is GPipe.

    Args:
      problem: the problem.

    Returns:
      The usual one; one that stores least; that one in the most micro-batches.
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
    modes = space.choices.remat_modes
    usual_mode = MIN_CUT.name if MIN_CUT.name in modes else modes[0]
    least_mode = modes[-1]
    splits = [
        (usual_mode, count),
        (least_mode, count),
        (least_mode, max(counts)),
    ]
    return [
        Choice(
            balance=tuple(end - begin for begin, end in itertools.pairwise(ends)),
            remat=(mode,) * num_ranks,
            schedule=build(num_ranks, num_microbatches),
            num_shards=num_shards,
        )
        for mode, num_microbatches in dict.fromkeys(splits)
    ]


def with_compiled_bytes(lowered: Candidate, num_bytes: int) -> Candidate:
    """A lowered candidate that needs so many bytes as it is compiled.

    What was not counted is workspace, of all ranks alike.
    """
    lacking = num_bytes - lowered.max_bytes
    memory = [
        dataclasses.replace(rank, workspace=max(rank.workspace + lacking, 0))
        for rank in lowered.memory
    ]
    return dataclasses.replace(lowered, memory=tuple(memory))


def forecast_again(space: SearchSpace, lowered: Candidate) -> Candidate:
    """A lowered candidate with the times of a space; its bytes were counted."""
    forecast = evaluate(space, lowered.choice)
    return dataclasses.replace(forecast, memory=lowered.memory, plan=lowered.plan)


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

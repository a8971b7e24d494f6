"""Searches balances, micro-batches, schedules and remat modes, all simulated.

    outlines   a shape of the mesh, a number of ranks, a schedule of the catalogue
    solve      the best cut and the best modes under the limit        (`_cut_search`)
    simulate   what the schedule makes of them                        (`_forecast`)
    improve    the best few: a climb by simulation, then a schedule made to measure

Outlines are solved from the lowest bound of their seconds on. One whose bound is above
the best candidate so far is left out; and so is one in which some rank computes longer
in all cuts that were looked at, before its schedule is built and simulated.

A schedule may overlap what the problem of a cut adds up, which the climb sees, and skip
connections hold more than the problem counts. Where a simulated rank exceeds its limit
the problem is solved again, with as much less room as it did not count.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from .. import schedules
from .._instructions._progress import count_items
from ..schedules import Schedule, ScheduleError
from ..schedules._bound import ROUNDING
from ._cut_search import climb_by_simulation, find_best_cuts, least_busy_seconds
from ._forecast import (
    Candidate,
    evaluate,
    residual_budgets,
    unscheduled_costs,
)
from ._mode_names import stores_only_inputs
from ._problem import PartitionProblem
from ._profile_record import Profile
from ._slowdowns import StepKind
from ._space import Choice, MeshShape, SearchSpace
from ._stage_costs import Ends
from ._stage_times import count_split_shares

# The number of candidates that are improved, and of actions in all their schedules: of
# very long ones only the best is (benchmarks/results/planning.md).
_NUM_IMPROVED = 6
_NUM_ACTIONS = 40_000
# Longer schedules are made to measure only if some order may be faster by so much: a
# fit of 64 ranks and 1024 micro-batches takes minutes.
_LEAST_GAIN = 0.01


class _Outline(NamedTuple):
    """A mesh, a number of ranks and a schedule: all that is decided before the cut.

    Attributes:
      least_seconds: a lower bound on the seconds of its step.
      shape: the numbers of micro-batches, and of devices that share one.
      num_ranks: the number of ranks.
      schedule_name: the name of the schedule.
      placement: the rank of each stage.
      split_share: the share of backwards that run in halves, 0 or 1; ``None`` if it
        depends on the numbers.
    """

    least_seconds: float
    shape: MeshShape
    num_ranks: int
    schedule_name: str
    placement: tuple[int, ...]
    split_share: float | None

    @property
    def step_kind(self) -> StepKind:
        """The kind of its steps."""
        return StepKind(
            num_microbatches=self.shape.num_microbatches,
            num_shards=self.shape.num_shards,
            num_ranks=self.num_ranks,
            num_stages=len(self.placement),
        )


class _CutOutline(NamedTuple):
    """An outline with its cuts.

    Attributes:
      candidate: the best of them, simulated.
      problem: the problem that they solve.
      cuts: good cuts, the best first.
    """

    candidate: Candidate
    problem: PartitionProblem
    cuts: list[Ends]


def search(
    space: SearchSpace,
    *,
    is_wanted: Callable[[Candidate], bool] = lambda candidate: True,
    most_seconds: float = math.inf,
) -> list[Candidate]:
    """Searches a space; candidates, those that fit first, the fastest of them first.

    Candidates that cannot be the best of those that are wanted, whatever their balance
    and schedule, are left out.

    Args:
      space: the choices.
      is_wanted: True for a candidate that may be chosen; others are no reason to leave
        anything out.
      most_seconds: the seconds of a step that a candidate has to be faster than.

    Returns:
      The candidates; a choice may be repeated.
    """
    cut_outlines = _solve_outlines(space, is_wanted, most_seconds)
    candidates = [cut_outline.candidate for cut_outline in cut_outlines]
    for cut_outline in count_items(
        "candidates improved", _best_few(cut_outlines, space)
    ):
        improved = cut_outline.candidate
        if space.choices.balance is None and improved.fits(space.hardware):
            improved = _climb(cut_outline, space, is_wanted)
        candidates.append(improved)
        if space.choices.fits_schedules and _is_worth_fitting(improved):
            candidates += _with_fitted_schedules(improved, space)
    return sorted(candidates, key=lambda x: x.objective(space.hardware))


def _solve_outlines(
    space: SearchSpace,
    is_wanted: Callable[[Candidate], bool],
    most_seconds: float,
) -> list[_CutOutline]:
    """All outlines of which the best candidate may be, with their cuts."""
    cut_outlines: list[_CutOutline] = []
    best_seconds = most_seconds
    # shape, placement, times of backwards -> cuts; the same for all schedules while
    # memory has no limit
    free_cuts: dict[tuple[MeshShape, tuple[int, ...], bytes], list[Ends]] = {}
    # With a fast candidate early, outlines with larger bounds need not be solved.
    for outline in count_items("schedules tried", _sorted_outlines(space)):
        if outline.least_seconds >= best_seconds:
            continue
        problem = _pose_free_problem(outline, space)
        backward_times = problem.times.backward(outline.split_share).tobytes()
        key = outline.shape, problem.schedule.placement, backward_times
        if key not in free_cuts:
            free_cuts[key] = _find_cuts(problem, space)
        busiest = least_busy_seconds(problem, free_cuts[key])
        slowdown = space.slowdowns.predict(outline.step_kind)
        least_seconds = problem.num_microbatches * busiest * slowdown
        # Sums in another order differ by rounding; one as long is a runner-up.
        if least_seconds * (1 - ROUNDING) > best_seconds:
            continue
        try:
            schedule = space.choices.builders[outline.schedule_name].build(
                outline.num_ranks, outline.shape.num_microbatches
            )
        except ScheduleError:  # it has no order for these numbers
            continue
        num_shards = outline.shape.num_shards
        for cut_outline in _solve(schedule, num_shards, space, free_cuts[key]):
            cut_outlines.append(cut_outline)
            candidate = cut_outline.candidate
            if candidate.fits(space.hardware) and is_wanted(candidate):
                best_seconds = min(best_seconds, candidate.seconds)
    return cut_outlines


def _pose_free_problem(outline: _Outline, space: SearchSpace) -> PartitionProblem:
    """The problem of an outline while memory has no limit, which needs no actions."""
    placement = outline.placement
    without_actions = Schedule(
        name=outline.schedule_name,
        num_stages=len(placement),
        num_microbatches=outline.shape.num_microbatches,
        placement=placement,
        rows=((),) * outline.num_ranks,
    )
    problem = _pose_problem(without_actions, outline.shape.num_shards, None, space)
    shares = (outline.split_share,) * len(placement)
    return dataclasses.replace(problem, split_shares=shares)


def _find_cuts(problem: PartitionProblem, space: SearchSpace) -> list[Ends]:
    """The best cuts of a problem, or the only one that the user allows."""
    if space.choices.balance is not None:
        return [(0, *itertools.accumulate(space.choices.balance))]
    return find_best_cuts(problem)


def _sorted_outlines(space: SearchSpace) -> list[_Outline]:
    """All outlines, the one with the smallest bound first."""

    @functools.cache
    def least_seconds(
        shape: MeshShape, num_ranks: int, split_share: float | None
    ) -> float:
        return _least_seconds(
            space.profiles[shape.num_microbatch_shards],
            shape.num_microbatches,
            num_ranks=num_ranks,
            split_share=split_share,
        )

    choices = space.choices
    outlines = []
    for name, shape in itertools.product(choices.schedule_names, space.mesh_shapes):
        num_ranks = space.hardware.num_devices // shape.num_shards
        for ranks in range(1, min(num_ranks, space.num_layers) + 1):
            try:
                placement, split_share = choices.builders[name].outline(
                    ranks, shape.num_microbatches
                )
            except ScheduleError:  # a user's has no order for these numbers
                continue
            num_stages = len(placement)
            if num_stages > space.num_layers:
                continue
            if choices.balance is not None and len(choices.balance) != num_stages:
                continue
            outline = _Outline(
                least_seconds=least_seconds(shape, ranks, split_share),
                shape=shape,
                num_ranks=ranks,
                schedule_name=name,
                placement=placement,
                split_share=split_share,
            )
            slowdown = space.slowdowns.predict(outline.step_kind)
            slowed_seconds = slowdown * outline.least_seconds
            outlines.append(outline._replace(least_seconds=slowed_seconds))
    return sorted(outlines, key=lambda x: (x.least_seconds, -x.num_ranks, x.shape))


def _least_seconds(
    profile: Profile,
    num_microbatches: int,
    *,
    num_ranks: int,
    split_share: float | None,
) -> float:
    """A lower bound on a step, whatever its balance and its order.

    The busiest rank has as much to do as all ranks on average, and as the longest layer
    takes; and the host thread dispatches at least a forward of each rank, and its
    transfer.

    Args:
      profile: the layers.
      num_microbatches: the number of micro-batches.
      num_ranks: the number of ranks.
      split_share: the share of backwards that run in halves; ``None`` if it is unknown.
    """
    layers = [
        layer.forward + layer.backward_seconds(split_share) for layer in profile.layers
    ]
    busy = max(sum(layers) / num_ranks, *layers)
    host = (2 * num_ranks - 1) * profile.action_seconds
    seconds = num_microbatches * max(busy + profile.action_seconds, host)
    # Sums in another order differ by rounding.
    return seconds * (1 - ROUNDING)


def _solve(
    schedule: Schedule,
    num_shards: int,
    space: SearchSpace,
    free_cuts: list[Ends],
) -> Iterator[_CutOutline]:
    """Cuts of a schedule, until those of a candidate that fits, or none does.

    Args:
      schedule: the schedule.
      num_shards: the number of devices over which each micro-batch is spread.
      space: the choices.
      free_cuts: the best cuts while memory has no limit.
    """
    limit = space.hardware.memory_limit
    rooms = None
    if limit is not None:
        room = float(limit - space.byte_errors.predict(schedule, num_shards))
        rooms = (room,) * schedule.num_ranks
    while True:
        problem = _pose_problem(schedule, num_shards, rooms, space)
        cuts = free_cuts if rooms is None else _find_cuts(problem, space)
        candidate = evaluate(space, _as_choice(problem, cuts[0]))
        yield _CutOutline(candidate, problem, cuts)
        counted = problem.solve_cuts(np.array(cuts[:1]))
        if candidate.fits(space.hardware) or any(
            rank.missing_bytes.item() > 0 for rank in counted
        ):
            return
        assert rooms is not None
        assert limit is not None
        rooms = tuple(
            min(room, limit - (memory.total - rank.num_bytes.item()))
            for room, memory, rank in zip(rooms, candidate.memory, counted, strict=True)
        )


def _pose_problem(
    schedule: Schedule,
    num_shards: int,
    rooms: tuple[float, ...] | None,
    space: SearchSpace,
) -> PartitionProblem:
    """The problem of the best cut and modes.

    Args:
      schedule: the schedule.
      num_shards: the number of devices over which each micro-batch is spread.
      rooms: the bytes that each rank may hold, if there is a limit.
      space: the choices.
    """
    return PartitionProblem(
        profile=space.profile(schedule, num_shards),
        modes=(space.choices.remat_modes,) * schedule.num_stages,
        link=space.hardware.link,
        objective="step",
        schedule=schedule,
        split_shares=count_split_shares(schedule),
        num_microbatches=schedule.num_microbatches,
        max_bytes=rooms,
        num_shards=num_shards,
    )


def _as_choice(problem: PartitionProblem, ends: Ends) -> Choice:
    """The choice of a cut with its best modes."""
    return Choice(
        balance=tuple(end - begin for begin, end in itertools.pairwise(ends)),
        remat=problem.best_modes(ends),
        schedule=problem.schedule,
        num_shards=problem.num_shards,
    )


def _best_few(
    cut_outlines: Iterable[_CutOutline], space: SearchSpace
) -> list[_CutOutline]:
    """The outlines with the best candidates of several stages, one per schedule."""
    best: dict[tuple[Schedule, int], _CutOutline] = {}
    num_actions = 0
    for cut_outline in sorted(
        cut_outlines, key=lambda x: x.candidate.objective(space.hardware)
    ):
        choice = cut_outline.candidate.choice
        key = choice.schedule, choice.num_shards
        if choice.schedule.num_stages == 1 or key in best:
            continue
        num_actions += sum(map(len, choice.schedule.rows))
        if best and (len(best) == _NUM_IMPROVED or num_actions > _NUM_ACTIONS):
            break
        best[key] = cut_outline
    return list(best.values())


def _climb(
    cut_outline: _CutOutline,
    space: SearchSpace,
    is_wanted: Callable[[Candidate], bool],
) -> Candidate:
    """The best of a cut and those around it that is wanted, by simulated steps.

    A problem adds up the seconds of stages. The simulation also knows where the
    schedule waits, and how long gradients are exchanged.
    """
    allowed: list[Candidate] = []

    def simulate(ends: Ends) -> float:
        candidate = cut_outline.candidate
        if ends != cut_outline.cuts[0]:
            candidate = evaluate(space, _as_choice(cut_outline.problem, ends))
        if not candidate.fits(space.hardware) or not is_wanted(candidate):
            return math.inf
        allowed.append(candidate)
        return candidate.seconds

    climb_by_simulation(cut_outline.problem, cut_outline.cuts, simulate)
    return min(
        allowed,
        key=lambda x: x.objective(space.hardware),
        default=cut_outline.candidate,
    )


def _is_worth_fitting(candidate: Candidate) -> bool:
    """False for a long schedule that hardly any order of its stages could beat."""
    num_actions = sum(map(len, candidate.choice.schedule.rows))
    if num_actions <= _NUM_ACTIONS:
        return True
    return candidate.makespan * (1 - _LEAST_GAIN) > candidate.timeline.lower_bound


def _with_fitted_schedules(
    candidate: Candidate, space: SearchSpace
) -> Iterator[Candidate]:
    """The same stages under schedules made to measure, as far as some fit.

    One for the remat modes of the candidate, which suit its own schedule; and under a
    limit one for the fastest modes, and one for those that store least.
    """
    num_stages = len(candidate.choice.remat)
    remats = [candidate.choice.remat]
    if space.hardware.memory_limit is not None:
        modes = space.choices.remat_modes
        fastest = min(modes, key=stores_only_inputs)
        remats += [(mode,) * num_stages for mode in (fastest, modes[-1])]
    for remat in dict.fromkeys(remats):
        choice = dataclasses.replace(candidate.choice, remat=remat)
        try:
            fitted = schedules.fit(
                unscheduled_costs(space, choice),
                choice.schedule.num_ranks,
                choice.schedule.num_microbatches,
                max_bytes=residual_budgets(space, choice),
            )
        except ScheduleError:
            continue
        yield evaluate(space, dataclasses.replace(choice, schedule=fitted))

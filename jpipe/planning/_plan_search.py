"""Searches balances, micro-batches, schedules and remat modes, all simulated.

A branch is a shape of the mesh and a number of ranks. The search

1. bounds the seconds of each branch from below, and evaluates branches from the lowest
   bound on: each schedule of the catalogue, with the balance that suits it; a branch
   whose bound is above the best candidate so far is left out;
2. lowers the memory of candidates that do not fit: by remat modes that store less, then
   by other balances;
3. improves the best candidates: their balance by local search, then their schedule by
   one that is made to measure.

A balance is exact for one stage per rank (`_bottleneck_cut`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import schedules
from .._instructions._progress import count_items
from ..schedules import BY_NAME, Schedule, ScheduleError
from ._climb import Cuts, climb
from ._forecast import Candidate, evaluate, stage_costs
from ._layer_partition import NoFittingCutError, partition
from ._mesh_shapes import MeshShape
from ._profile import Profile
from ._space import Choice, Hardware, SearchSpace

# The number of candidates, on as many devices per stage, that are improved.
_NUM_IMPROVED = 3
# The number of actions that a local search simulates for a candidate.
_NUM_SIMULATED = 20_000
# The number of balances that are tried for a limit of bytes, until one fits.
_NUM_BALANCES = 6
_ROUNDING = 1e-12


class _Branch(NamedTuple):
    """A shape and a number of ranks.

    Attributes:
      shape: the numbers of micro-batches, and of devices that share one.
      num_ranks: the number of ranks.
      least_seconds: a lower bound on the seconds of a step.
    """

    shape: MeshShape
    num_ranks: int
    least_seconds: float


def search(space: SearchSpace) -> list[Candidate]:
    """Searches a space; candidates, those that fit first, the fastest of them first.

    Candidates that cannot be the best, whatever their balance and schedule, are left
    out.

    Args:
      space: the choices.

    Returns:
      The candidates; a choice may be repeated.
    """
    candidates = _rank(_catalogue_candidates(space), space.hardware)
    best = list(_best_of_schedules(candidates))
    for candidate in count_items("candidates improved", best):
        improved = candidate
        if space.balance is None:
            improved = _improve_balance(candidate, space)
        candidates.append(improved)
        if space.fits_schedules:
            candidates += _with_fitted_schedule(improved, space)
    return _rank(candidates, space.hardware)


def _rank(candidates: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first."""
    return sorted(candidates, key=lambda candidate: candidate.objective(hardware))


def _catalogue_candidates(space: SearchSpace) -> list[Candidate]:
    """The candidates of all branches that may have the best one."""
    candidates: list[Candidate] = []
    # With a fast candidate early, branches with larger bounds need not be tried.
    for branch in count_items(
        "numbers of devices and micro-batches planned", _sorted_branches(space)
    ):
        fitting = (x.seconds for x in candidates if x.fits(space.hardware))
        best_seconds = min(fitting, default=math.inf)
        if branch.least_seconds < best_seconds:
            candidates += _branch_candidates(branch, space, best_seconds)
    return candidates


def _sorted_branches(space: SearchSpace) -> list[_Branch]:
    """All branches, the one with the smallest bound first."""
    branches = []
    for shape in space.mesh_shapes:
        profile = space.profiles[shape.num_microbatch_shards]
        max_ranks = min(
            space.hardware.num_devices // shape.num_shards, space.num_layers
        )
        for num_ranks in range(1, max_ranks + 1):
            seconds = _least_seconds(profile, num_ranks, shape.num_microbatches)
            branches.append(_Branch(shape, num_ranks, seconds))
    return sorted(branches, key=lambda x: (x.least_seconds, -x.num_ranks, x.shape))


def _least_seconds(profile: Profile, num_ranks: int, num_microbatches: int) -> float:
    """A lower bound on the seconds of a step, whatever its balance and schedule.

    The busiest rank has as much to do as all have on average, or as the largest layer;
    and the host thread dispatches at least a forward of each rank, and its transfer.
    """
    layers = [layer.least_seconds for layer in profile.layers]
    busy = max(sum(layers) / num_ranks, *layers) + profile.action_seconds
    host = (2 * num_ranks - 1) * profile.action_seconds
    # Sums in another order differ by rounding.
    return num_microbatches * max(busy, host) * (1 - _ROUNDING)


def _branch_candidates(
    branch: _Branch, space: SearchSpace, best_seconds: float
) -> Iterator[Candidate]:
    """Each schedule of the catalogue, with the balances that suit it.

    Args:
      branch: the shape and the number of ranks.
      space: the choices.
      best_seconds: the seconds of the fastest candidate so far that fits.
    """
    num_shards = branch.shape.num_shards
    # (placement, remat mode) -> balance, which is the same for all such schedules
    # while memory has no limit; None if there is none
    balances: dict[tuple[tuple[int, ...], str], tuple[int, ...] | None] = {}
    for name in space.schedule_names:
        try:
            schedule = BY_NAME[name](branch.num_ranks, branch.shape.num_microbatches)
        except ScheduleError:  # it has no order for these numbers
            continue
        if schedule.num_stages > space.num_layers:
            continue
        for mode in space.remat_modes:
            key = schedule.placement, mode
            if key not in balances:
                balances[key] = _choose_balance(
                    space, schedule, num_shards=num_shards, mode=mode
                )
            balance = balances[key]
            if balance is None:
                continue
            choice = Choice(
                balance=balance,
                remat=(mode,) * len(balance),
                schedule=schedule,
                num_shards=num_shards,
            )
            candidate = evaluate(space, choice)
            yield candidate
            if candidate.fits(space.hardware) or candidate.seconds >= best_seconds:
                # Other modes and balances rarely take less.
                break
            yield from _fit_into_memory(candidate, mode, space)


def _fit_into_memory(
    candidate: Candidate, mode: str, space: SearchSpace
) -> Iterator[Candidate]:
    """Candidates that need less: with stages that store less, or another balance.

    A balance is chosen by the bytes that stages have and store. If a rank needs more
    besides, such as workspace and arrays on their way to it, its budget for the next
    balance is less by as much.
    """
    limit = space.hardware.memory_limit
    assert limit is not None
    schedule = candidate.choice.schedule
    num_shards = candidate.choice.num_shards
    # What a schedule cannot change: all but activations and workspace.
    fixed_bytes = sum(
        memory.parameters + memory.gradients + memory.optimizer
        for memory in candidate.memory
    )
    if fixed_bytes > limit * schedule.num_ranks:
        return  # no residuals are small enough

    reduced = list(_reduce_remat(candidate, space))
    yield from reduced
    has_stages_to_place = schedule.num_ranks < schedule.num_stages
    if has_stages_to_place and any(x.fits(space.hardware) for x in reduced):
        return  # the search for a balance takes long there

    budgets = [float(limit)] * schedule.num_ranks
    for _ in range(_NUM_BALANCES):
        if min(budgets) <= 0:
            return
        balance = _choose_balance(
            space, schedule, num_shards=num_shards, mode=mode, max_bytes=budgets
        )
        if balance is None:
            return
        choice = dataclasses.replace(candidate.choice, balance=balance)
        balanced = evaluate(space, choice)
        yield balanced
        if balanced.fits(space.hardware):
            return
        for rank, memory in enumerate(balanced.memory):
            budgets[rank] -= max(memory.total - limit, 0)


def _reduce_remat(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Stores less and less in the stages of ranks that need more than they have."""
    limit = space.hardware.memory_limit
    assert limit is not None
    # remat mode -> the next one, which stores less
    next_mode = dict(itertools.pairwise(space.remat_modes))
    while not candidate.fits(space.hardware):
        choice = candidate.choice
        remat = []
        for mode, rank in zip(choice.remat, choice.schedule.placement, strict=True):
            is_full = candidate.memory[rank].total > limit
            remat.append(next_mode.get(mode, mode) if is_full else mode)
        if tuple(remat) == choice.remat:
            return
        candidate = evaluate(space, dataclasses.replace(choice, remat=tuple(remat)))
        yield candidate


def _choose_balance(
    space: SearchSpace,
    schedule: Schedule,
    *,
    num_shards: int,
    mode: str,
    max_bytes: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """The balance with the shortest step; ``None`` if there is none.

    If a rank has several stages, the balance whose busiest rank has least to do.

    Args:
      space: the choices.
      schedule: a schedule for as many stages.
      num_shards: the number of devices over which each micro-batch is spread.
      mode: the remat mode of all stages.
      max_bytes: the bytes that each rank may hold, if there is a limit.
    """
    if space.balance is not None:
        return space.balance if len(space.balance) == schedule.num_stages else None
    has_stages_to_place = schedule.num_ranks < schedule.num_stages
    needs_schedule = has_stages_to_place or max_bytes is not None
    try:
        balance = partition(
            space.profile(schedule, num_shards),
            schedule.num_stages,
            objective="max" if has_stages_to_place else "step",
            num_microbatches=schedule.num_microbatches,
            bandwidth=space.hardware.bandwidth,
            latency=space.hardware.latency,
            schedule=schedule if needs_schedule else None,
            max_bytes=max_bytes,
            remat=mode,
        )
    except NoFittingCutError:
        return None
    return tuple(balance)


def _best_of_schedules(ranked: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best candidates, one of each schedule, for each number of shards."""
    for num_shards in sorted({candidate.choice.num_shards for candidate in ranked}):
        best: dict[Schedule, Candidate] = {}
        for candidate in ranked:
            choice = candidate.choice
            if choice.num_shards == num_shards and choice.schedule.num_stages > 1:
                best.setdefault(choice.schedule, candidate)
        yield from itertools.islice(best.values(), _NUM_IMPROVED)


def _improve_balance(candidate: Candidate, space: SearchSpace) -> Candidate:
    """The best of a candidate's balance and those around it, by simulated steps.

    A balance is chosen by the seconds of stages, one after another. The simulation also
    knows where the schedule waits, and how long gradients are exchanged.
    """
    schedule = candidate.choice.schedule
    evaluated: dict[tuple[int, ...], Candidate] = {}  # ends of stages -> candidate

    def objectives(cuts: Cuts) -> list[tuple[float, ...]]:
        values = []
        for row in cuts.tolist():
            ends = tuple(row)
            balance = tuple(end - begin for begin, end in itertools.pairwise(ends))
            choice = dataclasses.replace(candidate.choice, balance=balance)
            evaluated[ends] = evaluate(space, choice)
            values.append(evaluated[ends].objective(space.hardware))
        return values

    num_actions = sum(map(len, schedule.rows))
    num_tried = max(_NUM_SIMULATED // num_actions, 1)
    start = (0, *itertools.accumulate(candidate.choice.balance))
    best, *_ = climb([start], objectives, num_tried)
    return evaluated[best]


def _with_fitted_schedule(
    candidate: Candidate, space: SearchSpace
) -> Iterator[Candidate]:
    """The same stages under a schedule made to measure, if there is one that fits."""
    choice = candidate.choice
    limit = space.hardware.memory_limit
    budgets = None
    if limit is not None:
        budgets = [limit - memory.workspace for memory in candidate.memory]
    try:
        fitted = schedules.fit(
            stage_costs(space, choice),
            choice.schedule.num_ranks,
            choice.schedule.num_microbatches,
            max_bytes=budgets,
        )
    except ScheduleError:
        return
    yield evaluate(space, dataclasses.replace(choice, schedule=fitted))

"""`jpipe.partition`: the number of layers of each stage.

With one stage per rank a rank's time and bytes are those of its stage, and dynamic
programs find the best cut (`_bottleneck_cut`); with several, `climb` searches by the
sums over the stages of each rank. Where a schedule has to run the stages, the best cuts
and those around them are simulated.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleBuilder, one_f_one_b
from ..schedules._choose import choose_schedule
from ..schedules._simulate import TOO_LONG
from ._bottleneck_cut import minimize_bottleneck, minimize_max, minimize_step
from ._climb import Cuts, Ends, Key, climb, list_cuts
from ._layer_profile import (
    LayerProfile,
    find_count_faults,
    find_number_faults,
)
from ._mode_names import MODE_NAMES, format_unknown_mode, stores_only_inputs
from ._problem import PartitionProblem
from ._profile import Profile, find_speed_faults

# With a schedule, the number of actions that are simulated, and for it the number of
# cuts at least and at most.
_MAX_ACTIONS = 40_000
_MIN_SIMULATED = 12
_MAX_SIMULATED = 400
# The number of cuts from which the search by simulation begins.
_NUM_STARTS = 8
# With several stages on a rank, the number of cuts that are evaluated without running
# them, and around how many in vain; where there are few cuts, all of them.
_MAX_EVALUATED = 10_000
_PATIENCE = 40
_FEW_CUTS = 1_000


class NoFittingCutError(ValueError):
    """No cut meets a limit, or none was found that does."""


def partition(
    costs: Sequence[float] | Profile,
    num_stages: int,
    *,
    objective: str = "max",
    num_microbatches: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    max_bytes: float | Sequence[float] | None = None,
    schedule: str | ScheduleBuilder | Schedule | None = None,
    remat: str | Sequence[str] = "min_cut",
) -> list[int]:
    """Cuts layers into contiguous stages.

    With one stage per rank the answer is the best that there is, found by dynamic
    programming. Of several that are as good the one with the shortest step is taken,
    then the most even one. A ``schedule`` has the last word on steps: its simulated
    time decides between the best cuts and those around them. Where it runs several
    stages on a rank, in a V or a loop, the load of a rank is that of all its stages;
    then the answer is the best that a search from several starts finds.

    Args:
      costs: the time of each layer, forward and backward, or a `Profile`.
      num_stages: the number of stages; for schedules with several stages per rank, of
        all ranks together.
      objective: ``"max"``: the slowest rank takes the least time; ``"step"``: a step
        of ``num_microbatches`` does: all stages one after another, the transfers
        between them there and back, and ``num_microbatches - 1`` times the slowest;
        ``"memory"``: the fullest rank holds the fewest bytes, and of the cuts that are
        equal in this the slowest rank takes the least time.
      num_microbatches: the number of micro-batches of one step.
      bandwidth: bytes per second between two ranks; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      max_bytes: the most that a rank may hold of parameters, their sums of gradients,
        other state, and its residuals of the micro-batches that ``schedule``, or else
        1F1B, has in flight there; one number, or one per rank. ``objective="memory"``
        counts the same bytes and has no limit.
      schedule: the schedule of the stages, as for `jpipe.pipeline`.
      remat: the remat mode of the stages; see `Profile.costs`. With ``"full"`` all
        stages but the last compute forwards twice.

    Returns:
      The number of layers of each stage, in order: what ``balance=`` takes.

    Raises:
      ValueError: if the arguments make no sense, or if no cut meets ``max_bytes``:
        the message has the missing bytes, the rank, and ways out.

    Example:
      >>> partition([1, 2, 3, 4, 5, 6], 3)
      [3, 2, 1]
    """
    problem = _checked_problem(
        costs,
        num_stages,
        objective=objective,
        max_bytes=max_bytes,
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
        bandwidth=bandwidth,
        latency=latency,
    )
    cuts = _best_cuts(problem)
    missing_bytes = problem.excess(np.array(cuts[:1])).item()
    if objective != "memory" and missing_bytes > 0:
        raise NoFittingCutError(_too_small(problem, cuts[0], missing_bytes))
    if objective == "step" and schedule is not None:
        cuts = _sort_by_simulation(problem, cuts)
    return [end - begin for begin, end in itertools.pairwise(cuts[0])]


def _checked_problem(
    costs: Any,
    num_stages: int,
    *,
    objective: str,
    max_bytes: Any,
    num_microbatches: int | None,
    schedule: Any,
    remat: Any,
    bandwidth: float | None,
    latency: float,
) -> PartitionProblem:
    """The problem that the arguments of `partition` pose.

    Raises:
      ValueError: with every fault of the arguments.
    """
    profile = _as_profile(costs)
    if faults := [*find_count_faults("num_stages", num_stages)]:
        raise ValueError(f"partition: {faults[0]}")
    num_stages = operator.index(num_stages)
    modes = profile.modes(remat, num_stages)
    if num_microbatches is None and isinstance(schedule, Schedule):
        num_microbatches = schedule.num_microbatches
    needs_microbatches = schedule is not None or objective == "step"
    counts_bytes = objective == "memory" or max_bytes is not None

    faults = [*find_speed_faults(bandwidth, latency)]
    if not 1 <= num_stages <= len(profile.layers):
        faults.append(
            f"num_stages={num_stages}; needs 1 to {len(profile.layers)}, a layer each"
        )
    if objective not in ("max", "step", "memory"):
        faults.append(f"objective={objective!r}; needs 'max', 'step' or 'memory'")
    if objective == "memory" and max_bytes is not None:
        faults.append(
            "objective='memory' has no limit: leave max_bytes= out, or ask for the "
            "fastest cut within max_bytes= by objective='max' or 'step'"
        )
    if num_microbatches is None:
        if needs_microbatches:
            faults.append("a step or a schedule needs num_microbatches=")
        num_microbatches = num_stages
    if num_microbatches < 1:
        faults.append(f"num_microbatches={num_microbatches}; needs at least 1")
    faults += [
        format_unknown_mode(mode)
        for mode in dict.fromkeys(modes)
        if mode not in MODE_NAMES
    ]
    if not isinstance(costs, Profile):
        has_recomputation = any(map(stores_only_inputs, modes))
        if has_recomputation or counts_bytes or bandwidth is not None:
            faults.append(
                "bandwidth=, max_bytes=, objective='memory' and remat='full' need a "
                "Profile: the costs are numbers, without bytes and forwards"
            )
    elif counts_bytes:
        faults += profile.remat_faults(modes)
    if faults:
        raise ValueError(f"partition: {'; '.join(faults)}")

    if schedule is None:
        schedule = one_f_one_b(num_stages, min(num_microbatches, num_stages))
    else:
        schedule = choose_schedule(schedule, num_stages, num_microbatches)
        if schedule.forward_only:
            raise ValueError(f"partition: schedule {schedule.name!r} has no backward")
    limits = None
    if objective == "memory":
        limits = (0.0,) * schedule.num_ranks
    elif max_bytes is not None:
        limits = _rank_limits(max_bytes, schedule.num_ranks)
    problem = PartitionProblem(
        profile=profile,
        modes=modes,
        bandwidth=bandwidth,
        latency=latency,
        objective=objective,
        schedule=schedule,
        num_microbatches=num_microbatches,
        max_bytes=limits,
    )
    if not math.isfinite(problem.total_seconds * num_microbatches):
        raise ValueError(f"partition: {TOO_LONG}")
    return problem


def _as_profile(costs: Sequence[float] | Profile) -> Profile:
    """The profile of the layers; of a number, a third is taken to be forward.

    Raises:
      ValueError: if a number is no time.
      TypeError: if they are neither a profile nor numbers.
    """
    profile = costs if isinstance(costs, Profile) else _profile_of_times(costs)
    if faults := profile.faults():
        raise ValueError(f"partition: {'; '.join(faults)}")
    return profile


def _profile_of_times(costs: Sequence[float]) -> Profile:
    try:
        times = [float(time) for time in costs]
    except (TypeError, ValueError):
        raise TypeError(
            f"partition: costs is a {type(costs).__name__}; needs a jpipe.Profile, "
            f"such as jpipe.profile(layers, x) returns, or a number for each layer"
        ) from None
    faults: list[str] = []
    for i, time in enumerate(times):
        faults += find_number_faults(f"costs[{i}]", time)
    if faults:
        raise ValueError(f"partition: {'; '.join(faults)}")
    layers = [
        LayerProfile(str(i), forward=time / 3, backward=time - time / 3)
        for i, time in enumerate(times)
    ]
    return Profile(tuple(layers))


def _rank_limits(max_bytes: Any, num_ranks: int) -> tuple[float, ...]:
    """One limit per rank, from one for all or a sequence of them."""
    limits = list(max_bytes) if hasattr(max_bytes, "__iter__") else [max_bytes]
    if len(limits) == 1:
        limits = limits * num_ranks
    if len(limits) != num_ranks or not all(limit > 0 for limit in limits):
        raise ValueError(
            f"partition: max_bytes={max_bytes!r}; needs bytes, more than 0, for all of "
            f"{num_ranks} ranks or for each"
        )
    return tuple(map(float, limits))


def _best_cuts(problem: PartitionProblem) -> list[Ends]:
    """Cuts, the best first; if none keeps to the limit, the one that exceeds it least.

    With one stage per rank the first is the best of all.
    """
    if problem.schedule.num_ranks < problem.num_stages:
        return climb(
            _starts(problem),
            lambda cuts: _evaluate(problem, cuts),
            _MAX_EVALUATED,
            patience=_PATIENCE,
        )
    times = problem.times
    if problem.max_bytes is not None:
        excess = problem.stage_excess()
        least_excess, ends = minimize_max(excess)
        if problem.objective == "memory":
            max_excess = least_excess
        elif least_excess <= 0:
            max_excess = 0.0
        else:
            return [ends]
        times = tuple(
            np.where(stage_excess <= max_excess, stage_times, np.inf)
            for stage_excess, stage_times in zip(excess, times, strict=True)
        )
    if problem.objective == "step":
        cuts = minimize_step(
            times, problem.transfers, num_microbatches=problem.num_microbatches
        )
        return [cut.ends for cut in cuts]
    cut = minimize_bottleneck(times, problem.transfers)
    assert cut is not None, "minimize_max found a cut with these stages"
    return [cut.ends]


def _starts(problem: PartitionProblem) -> Iterator[Ends]:
    """Equal loads for all stages, all cuts if they are few, equally many layers."""
    num_layers = problem.num_layers
    num_stages = problem.num_stages
    if cut := minimize_bottleneck(problem.times, problem.transfers):
        yield cut.ends
    yield from list_cuts(num_layers, num_stages, max_cuts=_FEW_CUTS)
    yield tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))


def _evaluate(problem: PartitionProblem, cuts: Cuts) -> list[Key]:
    """The keys of cuts without running them; first, the bytes above the limit."""
    loads = problem.loads(cuts)
    bottlenecks = loads.max(axis=0)
    latencies = problem.latencies(cuts)
    times = [bottlenecks, latencies]
    if problem.objective == "step":
        times = [latencies + (problem.num_microbatches - 1) * bottlenecks]
    excess = np.maximum(problem.excess(cuts), 0.0)
    unevenness = np.square(loads).sum(axis=0)
    columns = [column.tolist() for column in (excess, *times, unevenness)]
    return list(zip(*columns, strict=True))


def _sort_by_simulation(problem: PartitionProblem, cuts: Sequence[Ends]) -> list[Ends]:
    """The best of some cuts and those around them, by their simulated steps first."""
    schedule = problem.schedule
    num_microbatches = schedule.num_microbatches
    num_actions = sum(map(len, schedule.rows))
    max_cuts = _MAX_ACTIONS // num_actions
    max_cuts = min(max(max_cuts, _MIN_SIMULATED), _MAX_SIMULATED)
    shortest_step = np.inf

    def key(ends: list[int], bottleneck: float, excess: float) -> Key:
        nonlocal shortest_step
        if excess > 0:
            return (np.inf,)
        # No order of its actions makes the rank that has most to do any faster.
        lower_bound = num_microbatches * bottleneck
        if lower_bound >= shortest_step:
            return lower_bound, 1.0
        step = schedule.simulate(problem.costs(ends)).makespan
        shortest_step = min(shortest_step, step)
        return step, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        bottlenecks = problem.loads(cuts).max(axis=0) * problem.quantum
        excess = problem.excess(cuts)
        return list(map(key, cuts.tolist(), bottlenecks.tolist(), excess.tolist()))

    few_cuts = list_cuts(problem.num_layers, problem.num_stages, max_cuts=max_cuts)
    return climb([*cuts[:_NUM_STARTS], *few_cuts], keys, max_cuts)


def _too_small(problem: PartitionProblem, ends: Ends, missing_bytes: float) -> str:
    """Formats the error for a limit that is too small: the rank, and the way out."""
    assert problem.max_bytes is not None
    rank_bytes = problem.rank_bytes(np.array([ends]))[:, 0].tolist()
    excess = [
        num_bytes - limit
        for num_bytes, limit in zip(rank_bytes, problem.max_bytes, strict=True)
    ]
    rank = excess.index(max(excess))
    stages = problem.in_flight[rank].stages
    layers = [f"{ends[stage]} to {ends[stage + 1] - 1}" for stage in stages]
    return (
        f"partition: no cut was found that keeps to max_bytes: in the one that needs "
        f"least, rank {rank} (layers {' and '.join(layers)}) needs "
        f"{rank_bytes[rank]:,.0f} bytes, {missing_bytes:,.0f} more than "
        f"{problem.max_bytes[rank]:,.0f}; take more stages, a remat mode that keeps "
        f"less, or max_bytes larger by as much"
    )

"""`jpipe.partition`: how many layers each stage should have."""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleBuilder, one_f_one_b
from ..schedules._choose import choose_schedule
from ..schedules._simulate import TOO_LONG
from ._bottleneck_cut import best_max, best_step, smallest_max
from ._climb import Cuts, Ends, Key, climb, every
from ._layer_profile import (
    MODES,
    LayerProfile,
    count_faults,
    number_faults,
    unknown_mode,
)
from ._problem import PartitionProblem
from ._profile import Profile, speed_faults

# How many actions are simulated for one answer, how many cuts at least and at most, and
# of how many the search begins.
_ACTIONS = 40_000
_FEWEST, _MOST = 12, 400
_STARTS = 8
# With several stages on a rank so many cuts are tried on paper, around so many in vain;
# where there are no more than a few, all of them.
_TRIED, _PATIENCE, _FEW = 10_000, 40, 1_000


class NoCut(ValueError):
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
      num_stages: how many stages to make; for schedules with several stages per rank,
        of all ranks together.
      objective: ``"max"``: the slowest rank takes the least time; ``"step"``: a step
        of ``num_microbatches`` does: all stages one after another, the transfers
        between them there and back, and ``num_microbatches - 1`` times the slowest;
        ``"memory"``: the fullest rank holds the fewest bytes, and of the cuts that are
        equal in this the slowest rank takes the least time.
      num_microbatches: of one step.
      bandwidth: bytes per second between two ranks; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      max_bytes: the most that a rank may hold of parameters, their sums of gradients,
        other state, and its residuals of the micro-batches that ``schedule``, or else
        1F1B, has in flight there; one number, or one per rank. ``objective="memory"``
        counts the same bytes and has no limit.
      schedule: what will run the stages, as for `jpipe.pipeline`.
      remat: what stages store; see `Profile.costs`. With ``"full"`` all stages but the
        last compute forwards twice.

    Returns:
      The number of layers of each stage, in order: what ``balance=`` takes.

    Raises:
      ValueError: if the arguments make no sense, or if no cut meets ``max_bytes``:
        then with what is short, where, and what would do.

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
        raise NoCut(_too_small(problem, cuts[0], missing_bytes))
    if objective == "step" and schedule is not None:
        cuts = _by_simulation(problem, cuts)
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
      ValueError: with what makes no sense.
    """
    profile = _profile(costs)
    if faults := [*count_faults("num_stages", num_stages)]:
        raise ValueError(f"partition: {faults[0]}")
    count = operator.index(num_stages)
    modes = profile.modes(remat, count)
    if num_microbatches is None and isinstance(schedule, Schedule):
        num_microbatches = schedule.num_microbatches
    faults = [*speed_faults(bandwidth, latency)]
    if not 1 <= count <= len(profile.layers):
        faults.append(
            f"num_stages={count}; needs 1 to {len(profile.layers)}, a layer each"
        )
    if objective not in ("max", "step", "memory"):
        faults.append(f"objective={objective!r}; needs 'max', 'step' or 'memory'")
    if objective == "memory" and max_bytes is not None:
        faults.append(
            "objective='memory' has no limit: leave max_bytes= out, or ask for the "
            "fastest cut within max_bytes= by objective='max' or 'step'"
        )
    if num_microbatches is None and (schedule is not None or objective == "step"):
        faults.append("a step or a schedule needs num_microbatches=")
    number = count if num_microbatches is None else num_microbatches
    if number < 1:
        faults.append(f"num_microbatches={number}; needs at least 1")
    faults += [unknown_mode(mode) for mode in dict.fromkeys(modes) if mode not in MODES]
    counts_bytes = objective == "memory" or max_bytes is not None
    if not isinstance(costs, Profile):
        if "full" in modes or counts_bytes or bandwidth is not None:
            faults.append(
                "bandwidth=, max_bytes=, objective='memory' and remat='full' need a "
                "Profile: the costs are numbers, without bytes and forwards"
            )
    elif counts_bytes:
        faults += profile.remat_faults(modes)
    if faults:
        raise ValueError(f"partition: {'; '.join(faults)}")
    chosen = one_f_one_b(count, min(number, count))
    if schedule is not None:
        chosen = choose_schedule(schedule, count, number)
        if chosen.forward_only:
            raise ValueError(f"partition: schedule {chosen.name!r} has no backward")
    limits = None
    if objective == "memory":
        limits = (0.0,) * chosen.num_ranks
    elif max_bytes is not None:
        limits = _limits(max_bytes, chosen.num_ranks)
    problem = PartitionProblem(
        profile=profile,
        modes=modes,
        bandwidth=bandwidth,
        latency=latency,
        objective=objective,
        schedule=chosen,
        num_microbatches=number,
        max_bytes=limits,
    )
    if not math.isfinite(problem.total * number):
        raise ValueError(f"partition: {TOO_LONG}")
    return problem


def _profile(costs: Sequence[float] | Profile) -> Profile:
    """The layers; of a number, a third is taken to be forward.

    Raises:
      ValueError: if a number is no time.
      TypeError: if they are neither a profile nor numbers.
    """
    if not isinstance(costs, Profile):
        try:
            times = [float(time) for time in costs]
        except (TypeError, ValueError):
            raise TypeError(
                f"partition: costs is a {type(costs).__name__}; needs a jpipe.Profile, "
                f"such as jpipe.profile(layers, x) returns, or a number for each layer"
            ) from None
        pairs = enumerate(times)
        faults = [fault for i, t in pairs for fault in number_faults(f"costs[{i}]", t)]
        if faults:
            raise ValueError(f"partition: {'; '.join(faults)}")
        halves = enumerate((time / 3, time - time / 3) for time in times)
        costs = Profile(tuple(LayerProfile(str(i), *each) for i, each in halves))
    if faults := costs.faults():
        raise ValueError(f"partition: {'; '.join(faults)}")
    return costs


def _limits(max_bytes: Any, num_ranks: int) -> tuple[float, ...]:
    """One number per rank."""
    limits = list(max_bytes) if hasattr(max_bytes, "__iter__") else [max_bytes]
    limits = limits * num_ranks if len(limits) == 1 else limits
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
            lambda cuts: _on_paper(problem, cuts),
            _TRIED,
            _PATIENCE,
        )
    times, transfers = problem.times, problem.transfers
    if problem.max_bytes is not None:
        excess = problem.excess_of_stages()
        least_excess, ends = smallest_max(excess)
        if problem.objective == "memory":
            most_excess = least_excess
        elif least_excess <= 0:
            most_excess = 0.0
        else:
            return [ends]
        times = tuple(
            np.where(stage_excess <= most_excess, stage_time, np.inf)
            for stage_excess, stage_time in zip(excess, times, strict=True)
        )
    if problem.objective == "step":
        cuts = best_step(times, transfers, problem.num_microbatches)
        return [cut.ends for cut in cuts]
    cut = best_max(times, transfers)
    assert cut is not None, "smallest_max found a cut with these stages"
    return [cut.ends]


def _starts(problem: PartitionProblem) -> Iterator[Ends]:
    """Equal loads for all stages, and as many layers for each."""
    layers, count = problem.num_layers, problem.num_stages
    if cut := best_max(problem.times, problem.transfers):
        yield cut.ends
    yield from every(layers, count, _FEW)
    yield tuple(layers * s // count for s in range(count + 1))


def _on_paper(problem: PartitionProblem, cuts: Cuts) -> list[Key]:
    """What some cuts are worth, without running them; first, what exceeds the limit."""
    each, latency = problem.loads(cuts), problem.latencies(cuts)
    slowest = each.max(axis=0)
    worth = [slowest, latency]
    if problem.objective == "step":
        worth = [latency + (problem.num_microbatches - 1) * slowest]
    over = np.maximum(problem.excess(cuts), 0.0)
    columns = over, *worth, np.square(each).sum(axis=0)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _by_simulation(problem: PartitionProblem, found: list[Ends]) -> list[Ends]:
    """The best of some cuts and those around them, by their simulated steps first."""
    schedule = problem.schedule
    count = schedule.num_microbatches
    num_actions = sum(map(len, schedule.rows))
    most = min(max(_ACTIONS // num_actions, _FEWEST), _MOST)
    best = np.inf

    def key(ends: list[int], slowest: float, excess: float) -> Key:
        nonlocal best
        if excess > 0:
            return (np.inf,)
        if count * slowest >= best:
            # No order of its actions makes the rank that has most to do any faster.
            return count * slowest, 1.0
        time = schedule.simulate(problem.costs(ends)).makespan
        best = min(best, time)
        return time, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        slowest = problem.loads(cuts).max(axis=0) * problem.quantum
        over = problem.excess(cuts)
        return list(map(key, cuts.tolist(), slowest.tolist(), over.tolist()))

    others = every(problem.num_layers, problem.num_stages, most)
    return climb([*found[:_STARTS], *others], keys, most)


def _too_small(problem: PartitionProblem, ends: Ends, short: float) -> str:
    """That a limit is too small, of which rank and by how much, and what would do."""
    assert problem.max_bytes is not None
    needs = problem.needs(np.array([ends]))[:, 0].tolist()
    over = [need - most for need, most in zip(needs, problem.max_bytes, strict=True)]
    rank = over.index(max(over))
    layers = [f"{ends[s]} to {ends[s + 1] - 1}" for s in problem.in_flight[rank].stages]
    return (
        f"partition: no cut was found that keeps to max_bytes: in the one that needs "
        f"least, rank {rank} (layers {' and '.join(layers)}) needs {needs[rank]:,.0f} "
        f"bytes, {short:,.0f} more than {problem.max_bytes[rank]:,.0f}; take more "
        f"stages, a remat mode that keeps less, or max_bytes larger by as much"
    )

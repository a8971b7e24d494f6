"""`jpipe.partition`: the number of layers of each stage.

The arguments are checked, and made a problem; `_cut_search` solves it.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleBuilder, one_f_one_b
from ..schedules._choose import choose_schedule
from ._cut_search import climb_by_simulation, count_missing_bytes, find_best_cuts
from ._layer_profile import (
    LayerProfile,
    LinkOptions,
    find_count_faults,
    find_number_faults,
)
from ._mode_names import MODE_NAMES, format_unknown_mode, stores_only_inputs
from ._problem import PartitionProblem
from ._profile_record import (
    Profile,
    costs_of_stages,
    find_profile_faults,
    modes_of_stages,
)
from ._stage_costs import Ends
from ._stage_times import count_split_shares


def partition(
    costs: Sequence[float] | Profile,
    num_stages: int,
    *,
    objective: str = "max",
    num_microbatches: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    overlap: bool | None = None,
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
        between them there and back, and ``num_microbatches - 1`` times the slowest.
      num_microbatches: the number of micro-batches of one step.
      bandwidth: bytes per second between two ranks; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      overlap: True if ranks compute while they send and receive; False if a transfer
        keeps both ranks from computing, each for half of its time, which is then a part
        of their stages; default: as for `Profile.costs`. Those of skip connections
        count only in a step of a ``schedule``.
      max_bytes: the most that a rank may hold of parameters, their sums of gradients,
        other state, and its residuals of the micro-batches that ``schedule``, or else
        1F1B, has in flight there; one number, or one per rank.
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
        link_options=LinkOptions(bandwidth, latency, overlap),
    )
    cuts = find_best_cuts(problem)
    best = cuts[0]
    missing_bytes = count_missing_bytes(problem, best)
    if missing_bytes > 0:
        raise ValueError(_too_small(problem, best, missing_bytes))
    if objective == "step" and schedule is not None:
        best = climb_by_simulation(
            problem,
            cuts,
            lambda ends: problem.schedule.simulate(problem.costs(ends)).makespan,
        )
    return [end - begin for begin, end in itertools.pairwise(best)]


def _checked_problem(
    costs: Any,
    num_stages: int,
    *,
    objective: str,
    max_bytes: Any,
    num_microbatches: int | None,
    schedule: Any,
    remat: Any,
    link_options: LinkOptions,
) -> PartitionProblem:
    """The problem that the arguments of `partition` pose.

    Raises:
      ValueError: with every fault of the arguments.
    """
    profile = _as_profile(costs)
    if faults := [*find_count_faults("num_stages", num_stages)]:
        raise ValueError(f"partition: {faults[0]}")
    num_stages = operator.index(num_stages)
    modes = modes_of_stages(remat, num_stages)
    if num_microbatches is None and isinstance(schedule, Schedule):
        num_microbatches = schedule.num_microbatches
    needs_microbatches = schedule is not None or objective == "step"

    faults = [*link_options.find_faults()]
    if not 1 <= num_stages <= len(profile.layers):
        faults.append(
            f"num_stages={num_stages}; needs 1 to {len(profile.layers)}, a layer each"
        )
    if objective not in ("max", "step"):
        fault = f"objective={objective!r}; needs 'max' or 'step'"
        if objective == "memory":
            fault += "; a limit of bytes is max_bytes="
        faults.append(fault)
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
        has_bytes = max_bytes is not None or link_options.bandwidth is not None
        if has_recomputation or has_bytes:
            faults.append(
                "bandwidth=, max_bytes= and remat='full' need a Profile: the costs are "
                "numbers, without bytes and forwards"
            )
    elif max_bytes is not None:
        faults += costs_of_stages(profile).find_remat_faults(modes)
    if faults:
        raise ValueError(f"partition: {'; '.join(faults)}")

    if schedule is None:
        schedule = one_f_one_b(num_stages, min(num_microbatches, num_stages))
    else:
        schedule = choose_schedule(schedule, num_stages, num_microbatches)
        if schedule.forward_only:
            raise ValueError(f"partition: schedule {schedule.name!r} has no backward")
        if schedule.replicas:
            raise ValueError(
                f"partition: in schedule {schedule.name!r} several ranks take turns at "
                f"a stage, and a cut needs one for each: cut the layers under the "
                f"schedule without replicas"
            )
    limits = None
    if max_bytes is not None:
        limits = _rank_limits(max_bytes, schedule.num_ranks)
    return PartitionProblem(
        profile=profile,
        modes=tuple((mode,) for mode in modes),
        link=link_options.choose_link(profile.origin),
        objective=objective,
        schedule=schedule,
        split_shares=count_split_shares(schedule),
        num_microbatches=num_microbatches,
        max_bytes=limits,
        residuals_only=True,
    )


def _as_profile(costs: Sequence[float] | Profile) -> Profile:
    """The profile of the layers; of a number, a third is taken to be forward.

    Raises:
      ValueError: if a number is no time.
      TypeError: if they are neither a profile nor numbers.
    """
    profile = costs if isinstance(costs, Profile) else _profile_of_times(costs)
    if faults := find_profile_faults(profile):
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


def _too_small(problem: PartitionProblem, ends: Ends, missing_bytes: float) -> str:
    """Formats the error for a limit that is too small: the rank, and the way out."""
    assert problem.max_bytes is not None
    rank_modes = problem.solve_cuts(np.array([ends]))
    rank_bytes = [modes.num_bytes.item() for modes in rank_modes]
    excess = [
        num_bytes - limit
        for num_bytes, limit in zip(rank_bytes, problem.max_bytes, strict=True)
    ]
    rank = excess.index(max(excess))
    stages = problem.rank_stages[rank]
    layers = [f"{ends[stage]} to {ends[stage + 1] - 1}" for stage in stages]
    return (
        f"partition: no cut was found that keeps to max_bytes: in the one that needs "
        f"least, rank {rank} (layers {' and '.join(layers)}) needs "
        f"{rank_bytes[rank]:,.0f} bytes, {missing_bytes:,.0f} more than "
        f"{problem.max_bytes[rank]:,.0f}; take more stages, a remat mode that keeps "
        f"less, or max_bytes larger by as much"
    )

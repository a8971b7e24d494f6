"""`jpipe.partition`: how many layers each stage should have."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleBuilder
from . import _several
from ._climb import Cuts, Ends, Key, climb, every
from ._cuts import best_max, best_step, smallest_max
from ._problem import PartitionProblem
from ._problem import problem as checked
from ._profile import Profile

# How many actions are simulated for one answer, how many cuts at least and at most, and
# of how many the search begins.
_ACTIONS = 40_000
_FEWEST, _MOST = 12, 400
_STARTS = 8


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
        between them there and back, and ``num_microbatches - 1`` times the slowest.
      num_microbatches: of one step.
      bandwidth: bytes per second between two ranks; ``None``: transfers take no time
        but ``latency``.
      latency: seconds that a transfer takes whatever its size.
      max_bytes: the most that a rank may hold of parameters, their sums of gradients,
        other state, and its residuals of the micro-batches that ``schedule``, or else
        1F1B, has in flight there; one number, or one per rank.
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
    speed = {"bandwidth": bandwidth, "latency": latency}
    run = {"num_microbatches": num_microbatches, "schedule": schedule, "remat": remat}
    limits = {"objective": objective, "max_bytes": max_bytes}
    problem = checked(costs, num_stages, **speed, **run, **limits)
    found = _found(problem)
    short = _short(problem, found)
    if short > 0:
        raise NoCut(_too_small(problem, found[0], short))
    if objective == "step" and problem.has_schedule:
        found = _by_simulation(problem, found)
    return [b - a for a, b in itertools.pairwise(found[0])]


def least_bytes(costs: Profile, num_stages: int, **arguments: Any) -> float:
    """The most that a rank holds in the cut where that is least.

    Args:
      costs: as for `partition`.
      num_stages: likewise.
      **arguments: likewise.

    Raises:
      ValueError: as `partition` does.
    """
    problem = checked(costs, num_stages, max_bytes=1, **arguments)
    return 1 + max(_short(problem, _found(problem)), 0.0)


def _found(problem: PartitionProblem) -> list[Ends]:
    """Cuts, the best first; if none keeps to the limit, the one that exceeds it least.

    With one stage per rank the first is the best of all.
    """
    if not problem.has_one_each:
        return _several.candidates(problem)
    chain, times = problem.chain, problem.chain.times
    if problem.max_bytes is not None:
        over = [np.empty(0)] * chain.num_stages
        for rank, most in zip(problem.in_flight, problem.max_bytes, strict=True):
            over[rank.stages[0]] = chain.every_stage_bytes(rank) - most
        short, ends = smallest_max(over)
        if short > 0:
            return [ends]
        pairs = zip(over, times, strict=True)
        times = tuple(np.where(own <= 0, time, np.inf) for own, time in pairs)
    if problem.objective == "step":
        assert problem.num_microbatches is not None
        cuts = best_step(times, chain.transfers, problem.num_microbatches)
        return [cut.ends for cut in cuts]
    cut = best_max(times, chain.transfers)
    assert cut is not None, "the limit was looked at"
    return [cut.ends]


def _short(problem: PartitionProblem, found: Sequence[Ends]) -> float:
    """The bytes by which the fullest rank of the first exceeds its limit."""
    return _several.excess(problem, np.array(found[:1])).item()


def _by_simulation(problem: PartitionProblem, found: list[Ends]) -> list[Ends]:
    """The best of some cuts and those around them, by their simulated steps first."""
    chain, schedule = problem.chain, problem.schedule
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
        time = schedule.simulate(chain.costs(ends)).makespan
        best = min(best, time)
        return time, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        slowest = _several.loads(problem, cuts).max(axis=0) * chain.quantum
        over = _several.excess(problem, cuts)
        return list(map(key, cuts.tolist(), slowest.tolist(), over.tolist()))

    others = every(chain.num_layers, chain.num_stages, most)
    return climb([*found[:_STARTS], *others], keys, most)


def _too_small(problem: PartitionProblem, ends: Ends, short: float) -> str:
    """That a limit is too small, of which rank and by how much, and what would do."""
    assert problem.max_bytes is not None
    needs = _several.needs(problem, np.array([ends]))[:, 0].tolist()
    over = [need - most for need, most in zip(needs, problem.max_bytes, strict=True)]
    rank = over.index(max(over))
    layers = [f"{ends[s]} to {ends[s + 1] - 1}" for s in problem.in_flight[rank].stages]
    return (
        f"partition: no cut was found that keeps to max_bytes: in the one that needs "
        f"least, rank {rank} (layers {' and '.join(layers)}) needs {needs[rank]:,.0f} "
        f"bytes, {short:,.0f} more than {problem.max_bytes[rank]:,.0f}; take more "
        f"stages, a remat mode that keeps less, or max_bytes larger by as much"
    )

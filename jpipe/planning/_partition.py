"""`jpipe.partition`: how many layers each stage should have."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..schedules import Schedule, ScheduleBuilder, gpipe
from ..schedules._tables import Numbered, Tables
from . import _several
from ._climb import Cuts, Ends, Key, climb, every
from ._cuts import Problem, best_max, best_step, smallest_max
from ._problem import PartitionProblem
from ._problem import problem as checked
from ._profile import Profile
from ._sums import Matrix

# How many actions may be simulated for one answer, and how many cuts at least.
_ACTIONS = 40_000
_FEWEST = 12
# How many cuts are looked at around the best.
_TRIED = 400


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
        A skip connection travels straight to the stage that pops it, beside the
        others; it counts where it takes longer than they do.
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
    found = _one_each(problem) if problem.has_one_each else _several_each(problem)
    is_exact = not (problem.has_schedule or problem.chain.has_late_skips)
    if objective == "step" and not is_exact:
        found = climb(found, _simulated_step(problem), _TRIED)
    return [b - a for a, b in itertools.pairwise(found[0])]


def _one_each(problem: PartitionProblem) -> list[Ends]:
    """The best cut for one stage per rank, and others around it."""
    chain = problem.chain
    times: Sequence[Matrix] = chain.times
    if problem.max_bytes is not None:
        over = _excess(problem)
        short, ends = smallest_max(over)
        if short > 0:
            raise NoCut(_too_small(problem, ends, short))
        times = [np.where(o <= 0, t, np.inf) for o, t in zip(over, times, strict=True)]
    matrices = Problem(times, chain.transfers)
    min_max = best_max(matrices)
    assert min_max is not None, "the limit was looked at"
    if problem.objective == "max":
        return [min_max.ends]
    assert problem.num_microbatches is not None
    found = [cut.ends for cut in best_step(matrices, problem.num_microbatches)]
    others = every(chain.num_layers, chain.num_stages, _TRIED)
    return [*found[: _several.BEST], min_max.ends, *others]


def _excess(problem: PartitionProblem) -> list[Matrix]:
    """The bytes by which each stage that a rank may have exceeds its limit."""
    assert problem.max_bytes is not None
    over = [np.empty(0)] * problem.chain.num_stages
    for rank, most in zip(problem.in_flight, problem.max_bytes, strict=True):
        over[rank.stages[0]] = problem.chain.stage_bytes(rank) - most
    return over


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
    if problem.has_one_each:
        return smallest_max(_excess(problem))[0] + 1
    return _several.least(problem)[1] + 1


def _several_each(problem: PartitionProblem) -> list[Ends]:
    """A good cut for several stages per rank, and others."""
    found = _several.candidates(problem)
    if _several.over(problem, np.array(found[:1])).any():
        ends, short = _several.least(problem)
        if short > 0:
            raise NoCut(_too_small(problem, ends, short))
        found = [ends]
    # With few cuts all of them are there.
    return found if len(found) <= _TRIED else found[: _several.BEST]


def _simulated_step(problem: PartitionProblem) -> Callable[[Cuts], list[Key]]:
    """The time of a step, simulated, as long as there is time for that."""
    chain, count = problem.chain, problem.num_microbatches
    assert count is not None
    schedule = problem.schedule if problem.has_schedule else gpipe(chain.num_stages, 1)
    left = max(_ACTIONS // sum(map(len, schedule.rows)), _FEWEST)
    best = np.inf
    where = schedule.placement, schedule.num_ranks, schedule.num_microbatches
    rows: Numbered = []

    def seconds(ends: list[int], slowest: float) -> Key:
        nonlocal left, best, rows
        if count * slowest >= best or not left:
            # No order of its actions makes the rank that has most to do any faster.
            return max(count * slowest, best), 1.0
        left -= 1
        tables = Tables(chain.costs(ends), *where)
        rows = rows or tables.numbered(schedule.rows)
        run = tables.run(rows)
        assert run is not None, "schedules were validated"
        time = run.makespan
        if not problem.has_schedule:
            time += (count - 1) * slowest
        best = min(best, time)
        return time, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        slowest = _several.loads(problem, cuts).max(axis=0) * chain.quantum
        fits = _several.over(problem, cuts) == 0
        each = zip(cuts.tolist(), slowest.tolist(), fits, strict=True)
        return [seconds(ends, own) if ok else (np.inf,) for ends, own, ok in each]

    return keys


def _too_small(problem: PartitionProblem, ends: Ends, short: float) -> str:
    """That a limit is too small, of which rank and by how much, and what would do."""
    assert problem.max_bytes is not None
    cut = np.array([ends])
    needs = [problem.chain.rank_bytes(own, cut).item() for own in problem.in_flight]
    over = [need - most for need, most in zip(needs, problem.max_bytes, strict=True)]
    rank = over.index(max(over))
    listed = " and ".join(
        f"stage {s} (layers {ends[s]} to {ends[s + 1] - 1})"
        for s in problem.in_flight[rank].stages
    )
    does = f"With {short:,.0f} more on every rank it works"
    if len(set(problem.max_bytes)) == 1:
        does = f"The least that works is max_bytes={problem.max_bytes[0] + short:,.0f}"
    return (
        f"partition: no cut was found with max_bytes={problem.max_bytes[rank]:,.0f} on "
        f"rank {rank}: in the one that needs least, {listed} needs {needs[rank]:,.0f} "
        f"bytes, {over[rank]:,.0f} more. {does}; else take more stages, or a remat "
        f"mode that keeps less"
    )

"""`jpipe.partition`: how many layers each stage should have."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schedules import Schedule, ScheduleBuilder, gpipe
from ..schedules._tables import Numbered, Tables
from . import _several
from ._chain import Matrix
from ._climb import Cuts, Ends, Key, climb, every
from ._cuts import Problem, best_max, best_step, smallest_max
from ._given import Given, understood
from ._profile import Profile

# How many actions may be simulated for one answer, and how many cuts at least.
_ACTIONS = 40_000
_FEWEST = 12
# How many cuts are looked at around the best.
_TRIED = 400
# What `partition` is asked beside costs and the number of stages.
_DEFAULTS = {
    "objective": "max",
    "num_microbatches": None,
    "bandwidth": None,
    "latency": 0.0,
    "max_bytes": None,
    "schedule": None,
    "together": (),
    "cuts": (),
    "remat": "min_cut",
}


class NoCut(ValueError):
    """No cut meets a limit, or none was found that keeps the pins."""


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
    together: Sequence[Sequence[int]] = (),
    cuts: Sequence[int] = (),
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
        other state, and what it keeps of the micro-batches that ``schedule``, or else
        1F1B, has in flight there; one number, or one per rank.
      schedule: what will run the stages, as for `jpipe.pipeline`.
      together: groups of layers, such as ``(0, 5)``, each to be on one rank: in one
        stage, with all between, if a rank runs a single one.
      cuts: layers that a stage must begin with.
      remat: what stages keep; see `Profile.costs`. With ``"full"`` all stages but the
        last compute forwards twice.

    Returns:
      The number of layers of each stage, in order: what ``balance=`` takes.

    Raises:
      ValueError: with every fault of the arguments, or if no cut meets ``max_bytes``
        or the pins: then with what is short, where, and what would do.

    Example:
      >>> partition([1, 2, 3, 4, 5, 6], 3)
      [3, 2, 1]
      >>> partition([1, 2, 3, 4, 5, 6], 3, cuts=[1])
      [1, 3, 2]
    """
    arguments = {
        "objective": objective,
        "num_microbatches": num_microbatches,
        "bandwidth": bandwidth,
        "latency": latency,
        "max_bytes": max_bytes,
        "schedule": schedule,
        "together": together,
        "cuts": cuts,
        "remat": remat,
    }
    given = understood(costs, num_stages, arguments)
    one_each = given.num_ranks == num_stages
    ends = _one_each(given) if one_each else _several_each(given)
    return [b - a for a, b in itertools.pairwise(ends)]


def _one_each(given: Given) -> Ends:
    """The best cut for one stage per rank."""
    chain = given.chain
    allowed = given.pins.allowed(chain.num_layers)
    masked = {id(m): np.where(allowed, m, np.inf) for m in chain.times}
    times: Sequence[Matrix] = [masked[id(matrix)] for matrix in chain.times]
    if given.max_bytes is not None:
        over = _excess(given, allowed)
        short, ends = smallest_max(over)
        if short > 0:
            raise NoCut(_too_small(given, ends, short))
        times = [np.where(o <= 0, t, np.inf) for o, t in zip(over, times, strict=True)]
    problem = Problem(times, chain.cuts)
    tight = best_max(problem)
    assert tight is not None, "pins and limits were looked at"
    if given.objective == "max":
        return tight.ends
    assert given.num_microbatches is not None
    found = [cut.ends for cut in best_step(problem, given.num_microbatches)]
    if given.schedule is None and not chain.has_late_skips:
        return found[0]

    def kept(cuts: Cuts) -> npt.NDArray[np.bool_]:
        stages = [m[cuts[:, s], cuts[:, s + 1]] for s, m in enumerate(times)]
        return np.max(stages, axis=0) < np.inf

    others = every(chain.num_layers, chain.num_stages, _TRIED)
    starts = [*found[: _several.BEST], tight.ends, *others]
    return climb(starts, _last_word(given, kept), _TRIED)[0]


def _excess(given: Given, allowed: npt.NDArray[np.bool_]) -> list[Matrix]:
    """The bytes by which each stage that a rank may have exceeds its limit."""
    assert given.max_bytes is not None
    over = [np.full_like(allowed, np.inf, float)] * given.chain.num_stages
    for held, most in zip(given.held, given.max_bytes, strict=True):
        excess = given.chain.stage_bytes(held) - most
        over[held.stages[0]] = np.where(allowed, excess, np.inf)
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
    everything = {**_DEFAULTS, **arguments, "max_bytes": 1}
    given = understood(costs, num_stages, everything)
    if given.num_ranks == num_stages:
        allowed = given.pins.allowed(given.chain.num_layers)
        return smallest_max(_excess(given, allowed))[0] + 1
    return _several.least(given)[1] + 1


def _several_each(given: Given) -> Ends:
    """A good cut for several stages per rank."""
    found = _several.candidates(given)
    best = np.array(found[:1])
    if _several.broken_pins(given, best).any():
        raise NoCut(
            f"partition: no cut was found that keeps together="
            f"{list(given.pins.groups)} and cuts={list(given.pins.cuts)} with the "
            f"ranks of schedule {given.schedule and given.schedule.name!r}, "
            f"{list(given.placement)}; name layers whose stages share a rank"
        )
    if _several.over(given, best).any():
        ends, short = _several.nearest(given, found[: _several.BEST])
        if short > 0:
            # From where `least_bytes` begins, and so does whoever takes what is said.
            ends, short = _several.least(given)
        if short > 0:
            raise NoCut(_too_small(given, ends, short))
        found = [ends]
    if given.objective == "max":
        return found[0]

    def kept(cuts: Cuts) -> npt.NDArray[np.bool_]:
        return _several.broken_pins(given, cuts) + _several.over(given, cuts) == 0

    # With few cuts all of them are there.
    starts = found if len(found) <= _TRIED else found[: _several.BEST]
    return climb(starts, _last_word(given, kept), _TRIED)[0]


def _last_word(
    given: Given, kept: Callable[[Cuts], npt.NDArray[np.bool_]]
) -> Callable[[Cuts], list[Key]]:
    """The time of a step, simulated, as long as there is time for that.

    Args:
      given: the arguments.
      kept: which of some cuts keep its pins and its limit.
    """
    chain, count = given.chain, given.num_microbatches
    assert count is not None
    schedule = given.schedule or gpipe(chain.num_stages, 1)
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
        if given.schedule is None:
            time += (count - 1) * slowest
        best = min(best, time)
        return time, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        slowest = _several.loads(given, cuts).max(axis=0) * chain.unit
        each = zip(cuts.tolist(), slowest.tolist(), kept(cuts), strict=True)
        return [seconds(ends, own) if ok else (np.inf,) for ends, own, ok in each]

    return keys


def _too_small(given: Given, ends: Ends, short: float) -> str:
    """That a limit is too small, of which rank and by how much, and what would do."""
    assert given.max_bytes is not None
    cut = np.array([ends])
    needs = [given.chain.rank_bytes(held, cut).item() for held in given.held]
    over = [need - most for need, most in zip(needs, given.max_bytes, strict=True)]
    rank = over.index(max(over))
    stages = [s for s, r in enumerate(given.placement) if r == rank]
    listed = " and ".join(
        f"stage {s} (layers {ends[s]} to {ends[s + 1] - 1})" for s in stages
    )
    one = len(set(given.max_bytes)) == 1
    least = given.max_bytes[0] + short
    several = given.num_ranks < given.chain.num_stages
    return (
        f"partition: no cut {'was found' if several else 'is there'} with "
        f"max_bytes={given.max_bytes[rank]:,.0f} on rank {rank}: in the one that needs "
        f"least, {listed} needs {needs[rank]:,.0f} bytes, {over[rank]:,.0f} more. "
        + (
            f"The least that works is max_bytes={least:,.0f}"
            if one
            else f"With {short:,.0f} more on every rank it works"
        )
        + "; else take more stages, or a remat mode that keeps less"
    )

"""A schedule made to measure: the fastest that is found for given costs and memory."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from ._build import check
from ._costs import Costs
from ._placement import loop, v_shape
from ._schedule import Schedule
from ._search import catalogue, orders
from ._simulate import TOO_LONG, ScheduleError, check_costs
from ._tables import Run, Tables


def fit(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    max_bytes: float | Sequence[float] | None = None,
) -> Schedule:
    """The fastest valid schedule that is found for these costs under this memory.

    Tried are the schedules of `BY_NAME`, so that none of them is faster, and others
    made for the costs: ranks that take what is ready by several rules, all of it again
    with what is not urgent pushed out of the way, and swaps on the longest chain. The
    timeline of the result tells how far it is from what no schedule can beat.

    Args:
      costs: what each action costs, one entry per stage. For as many stages as ranks
        each rank runs one; for twice as many they are placed in a V or round the
        ranks, for other multiples round the ranks. Numbers for all stages: one stage
        per rank.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      max_bytes: the most that a rank may hold, counted as `Timeline.peak_bytes` is; one
        number, or one for each rank. Default: any.

    Returns:
      A valid schedule, the same for the same costs. Its name is that of the catalogue
      where it is one of them, else ``"fit"``.

    Raises:
      ScheduleError: if a number is less than 1, the stages do not divide among the
        ranks, costs are negative or not finite, or nothing fits: then the message shows
        what is short on which rank and what would do. With one stage per rank no
        schedule does with less than that, if all actions take time and the first
        stage stores no less than its input.

    Example:
      >>> from jpipe.schedules import zb_h1
      >>> costs = Costs([1, 1.5, 1, 0.8], [2, 2.5, 2, 2], latency=0.3)
      >>> made = fit(costs, 4, 16, max_bytes=6)
      >>> for schedule in zb_h1(4, 16), made:  # doctest: +NORMALIZE_WHITESPACE
      ...     print(schedule.simulate(costs))
      zb_h1: time 67.4 (3.2 % above the bound), bubble 24.0 %, peak bytes per rank
      4, 4, 4, 4
      fit: time 65.3 (0.0 % above the bound), bubble 21.6 %, peak bytes per rank
      6, 6, 6, 5

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    check("fit", {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    check_costs("fit", costs, num_microbatches)
    stages = num_ranks if costs.num_stages is None else costs.num_stages
    if stages < 1 or stages % num_ranks:
        raise ScheduleError(
            f"fit: costs are for {stages} stages, num_ranks={num_ranks}: give costs "
            f"for {num_ranks} stages, or for a multiple of it"
        )
    check_costs("fit", costs, num_microbatches, stages)  # where skips end
    chunks, most = stages // num_ranks, _limits(max_bytes, num_ranks)
    placements = [loop(num_ranks, chunks)]
    if chunks == 2:
        placements.insert(0, v_shape(num_ranks))
    known = catalogue(num_ranks, num_microbatches, chunks)
    found: list[Run] = []
    for placement in dict.fromkeys(placements):
        tables = Tables(costs, placement, num_ranks, num_microbatches)
        found += orders(tables, most, known)
    fitting = [run for run in found if run.fits(most) and run.makespan < math.inf]
    if not fitting:
        raise ScheduleError(_short(found, most) if most else f"fit: {TOO_LONG}")
    best = min(fitting, key=lambda run: run.makespan)
    placement, rows = best.tables.placement, best.tables.actions(best.rows)
    for schedule in known:
        if schedule.rows == rows:
            return schedule
    return Schedule("fit", stages, num_microbatches, placement, rows)


def _limits(max_bytes: Any, num_ranks: int) -> list[float] | None:
    """The most bytes of each rank."""
    if max_bytes is None:
        return None
    several = isinstance(max_bytes, Iterable) and not isinstance(max_bytes, str)
    most: list[Any] = list(max_bytes) if several else [max_bytes] * num_ranks
    if len(most) != num_ranks:
        raise ScheduleError(
            f"fit: max_bytes has {len(most)} entries, num_ranks={num_ranks}: give one "
            f"number, or one for each rank"
        )
    if not all(isinstance(limit, Real) and limit == limit for limit in most):
        raise ScheduleError(f"fit: max_bytes={max_bytes!r} holds what is no number")
    return most


def _short(found: list[Run], most: Sequence[float]) -> str:
    """Which ranks have too little, and what is enough: where least is missing."""

    def missing(peaks: list[float]) -> tuple[float, float]:
        most_on_one = max(peak - limit for peak, limit in zip(peaks, most, strict=True))
        return most_on_one, sum(peaks)

    peaks = min((run.peaks for run in found), key=missing)
    lines = [
        f"\n  * rank {rank} holds at least {peak:g} bytes, {peak - limit:g} more than "
        f"{limit:g}"
        for rank, (peak, limit) in enumerate(zip(peaks, most, strict=True))
        if peak > limit
    ]
    least = ", ".join(f"{peak:g}" for peak in peaks)
    return (
        f"fit: no schedule was found that fits into max_bytes, not even with one "
        f"micro-batch at a time:{''.join(lines)}\n"
        f"max_bytes of {max(peaks):g} would do, or by rank [{least}]; or cut the "
        f"stages elsewhere, or make micro-batches smaller"
    )

"""Fits a schedule to costs and memory: the fastest that a search finds.

Unless the user places them, stages are placed in a loop and, if there are two per rank,
in a V; of the orders that `search_orders` tries for each placement, the fastest that
keeps to the limit is taken.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from ._action_tables import ActionTables, SimulatedOrder
from ._build import check_counts
from ._costs import Costs
from ._order_search import list_catalogue, search_orders
from ._placement import place_in_loop, place_in_v
from ._schedule import Schedule
from ._simulate import TOO_LONG, ScheduleError, check_costs


def fit(
    costs: Costs,
    num_ranks: int,
    num_microbatches: int,
    max_bytes: float | Sequence[float] | None = None,
    *,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """The fastest valid schedule that is found for these costs under this memory limit.

    It tries the schedules of `BY_NAME`, so that none of them is faster, and others for
    these costs: list schedules by several rules, and the fastest orders again with what
    is not urgent pushed late. The timeline of the result
    tells how far it is from the lower bound.

    Args:
      costs: the costs of each action, one number per stage. As many stages as ranks
        run one on each rank; twice as many are placed in a V or in a loop, other
        multiples in a loop. With one number for all stages there is one stage per rank.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      max_bytes: the most that a rank may hold, counted as `Timeline.peak_bytes` is; one
        number, or one for each rank. Default: no limit.
      placement: the rank of each stage, any number of stages on each rank, such as
        ``[0, 1, 1, 0, 0, 1, 1, 0]`` for two waves on two ranks. Default: those above.

    Returns:
      A valid schedule, the same for the same costs. Its name is the key in `BY_NAME` if
      it is one of those, else ``"fit"``.

    Raises:
      ScheduleError: if a number is less than 1, the stages do not divide among the
        ranks, the placement is for other ranks or another number of stages, costs are
        negative or not finite, or nothing fits: then the message shows how much each
        rank lacks and which limit would do. With one stage per rank no schedule needs
        less than that, if all actions take time and the first stage stores no less
        than its input.

    Example:
      >>> from jpipe.schedules import zb_h1
      >>> costs = Costs([1, 1.5, 1, 0.8], [2, 2.5, 2, 2], latency=0.3)
      >>> fitted = fit(costs, 4, 16, max_bytes=6)
      >>> for schedule in zb_h1(4, 16), fitted:  # doctest: +NORMALIZE_WHITESPACE
      ...     print(schedule.simulate(costs))
      zb_h1: time 67.4 (3.2 % above the bound), bubble 24.0 %, peak bytes per rank
      4, 4, 4, 4
      fit: time 65.3 (0.0 % above the bound), bubble 21.6 %, peak bytes per rank
      6, 6, 6, 5

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check_counts("fit", counts)
    check_costs("fit", costs, num_microbatches)
    if placement is None:
        placements = _list_placements(costs, num_ranks)
    else:
        placements = [_check_placement(placement, costs, num_ranks)]
    num_stages = len(placements[0])
    # Again, now that the number of stages is known to which skips may go.
    check_costs("fit", costs, num_microbatches, num_stages)
    limits = _check_max_bytes(max_bytes, num_ranks)

    # placement -> a schedule without actions
    empty_schedules = {
        ranks: Schedule(
            name="fit",
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            placement=ranks,
            rows=((),) * num_ranks,
        )
        for ranks in placements
    }
    num_chunks = -(-num_stages // num_ranks)
    catalogue = list_catalogue(num_ranks, num_microbatches, num_chunks)
    orders: list[SimulatedOrder] = []
    for empty in empty_schedules.values():
        tables = ActionTables(costs, empty)
        orders += search_orders(tables, limits, catalogue)

    fitting = [x for x in orders if x.fits(limits) and x.makespan < math.inf]
    if not fitting:
        if limits:
            raise ScheduleError(_explain_shortage(orders, limits))
        raise ScheduleError(f"fit: {TOO_LONG}")
    best = min(fitting, key=lambda order: order.makespan)
    rows = best.tables.to_actions(best.rows)
    for schedule in catalogue:
        if schedule.rows == rows:
            return schedule
    return dataclasses.replace(empty_schedules[best.tables.placement], rows=rows)


def _list_placements(costs: Costs, num_ranks: int) -> list[tuple[int, ...]]:
    """The placements that are tried if the user leaves them out."""
    num_stages = num_ranks if costs.num_stages is None else costs.num_stages
    if num_stages < 1 or num_stages % num_ranks:
        raise ScheduleError(
            f"fit: costs are for {num_stages} stages, num_ranks={num_ranks}: give "
            f"costs for {num_ranks} stages, or for a multiple of it, or placement="
        )
    num_chunks = num_stages // num_ranks
    placements = [place_in_loop(num_ranks, num_chunks)]
    if num_chunks == 2:
        placements.insert(0, place_in_v(num_ranks))
    return placements


def _check_placement(placement: Any, costs: Costs, num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage as the user types it: every rank has a stage."""
    if hasattr(placement, "tolist"):
        placement = placement.tolist()  # an array of NumPy
    is_complete = (
        isinstance(placement, Sequence)
        and all(isinstance(rank, int) for rank in placement)
        and {*placement} == {*range(num_ranks)}
    )
    if not is_complete:
        raise ScheduleError(
            f"fit: placement={placement!r}: needs the rank of each stage, in which "
            f"each of the {num_ranks} ranks occurs"
        )
    if costs.num_stages not in (None, len(placement)):
        raise ScheduleError(
            f"fit: placement={placement!r} is for {len(placement)} stages, costs are "
            f"for {costs.num_stages}"
        )
    return tuple(placement)


def _check_max_bytes(max_bytes: Any, num_ranks: int) -> list[float] | None:
    """The limit of each rank; ``None``: no limit."""
    if max_bytes is None:
        return None
    limits: list[Any] = [max_bytes] * num_ranks
    if isinstance(max_bytes, Iterable) and not isinstance(max_bytes, str):
        limits = list(max_bytes)
    if len(limits) != num_ranks:
        raise ScheduleError(
            f"fit: max_bytes has {len(limits)} entries, num_ranks={num_ranks}: give "
            f"one number, or one for each rank"
        )
    if not all(isinstance(limit, Real) and limit == limit for limit in limits):
        raise ScheduleError(f"fit: max_bytes={max_bytes!r} holds what is no number")
    return limits


def _explain_shortage(orders: list[SimulatedOrder], limits: Sequence[float]) -> str:
    """Tells which ranks lack memory, by the order that lacks least, and what would do.

    Args:
      orders: the orders that were tried, none of which fits.
      limits: the most bytes of each rank.
    """

    def shortage(peaks: list[float]) -> tuple[float, float]:
        """The most that a rank lacks; of equals, the least that all hold."""
        excess = [peak - limit for peak, limit in zip(peaks, limits, strict=True)]
        return max(excess), sum(peaks)

    peaks = min((order.peak_bytes for order in orders), key=shortage)
    lines = [
        f"\n  * rank {rank} holds at least {peak:g} bytes, {peak - limit:g} more than "
        f"{limit:g}"
        for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True))
        if peak > limit
    ]
    listed = ", ".join(f"{peak:g}" for peak in peaks)
    return (
        f"fit: no schedule was found that fits into max_bytes, not even with one "
        f"micro-batch at a time:{''.join(lines)}\n"
        f"max_bytes of {max(peaks):g} would do, or by rank [{listed}]; or cut the "
        f"stages elsewhere, or make micro-batches smaller"
    )

"""Two stages per rank in a V: one micro-batch laid out in slots, repeated."""

from collections.abc import Mapping, Sequence

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._build import check, placed, v_shape
from ._costs import Costs
from ._improve import latest_starts
from ._list_schedule import Limits, list_schedule
from ._schedule import Schedule
from ._simulate import ScheduleError, check_costs, deadlock
from ._tables import Numbered, Run, Tables

# Six actions of one slot for each micro-batch: F, I and W of two chunks.
_PERIOD = 6
# How often an order is pushed late and early again, at most.
_ROUNDS = 3
# The slots of one micro-batch on one rank: of an op of a chunk, the first of its own.
_Slots = Mapping[tuple[str, int], int]


def build_v(
    num_ranks: int,
    num_microbatches: int,
    *,
    block: str | Sequence[Sequence[int]] = "v_half",
    costs: Costs | None = None,
    max_in_flight: int | None = None,
) -> Schedule:
    """A schedule in the shape of a V from the layout of one micro-batch.

    The block gives the slot in which each rank starts its work on micro-batch 0; the
    others follow every six slots. How long a block keeps activations decides how much a
    rank holds. Second halves go to the first free slots. Then every action runs as
    early as it can; where a rank still waits, before and after the steady phase, the
    order is changed as long as that makes the step shorter and no rank holds more.

    Args:
      num_ranks: the number of ranks, two stages on each: rank r runs stages r and
        ``2 p - 1 - r``.
      num_microbatches: the number of micro-batches, any positive number.
      block: ``"v_min"``, ``"v_half"``, ``"zb_v"``, ``"1f1b_v"`` with whole backwards,
        or your own: for each rank the slots of F of its first chunk, F of its second,
        I of its second and I of its first.
      costs: what each action costs, one entry per stage or numbers for all; default:
        all of the same time.
      max_in_flight: the most stages of micro-batches that a rank may hold, from the
        start of a forward to the end of the whole backward; default: what the block
        needs. With more the step may be shorter.

    Returns:
      A valid schedule.

    Raises:
      ScheduleError: if a number is less than 1, the name of a block unknown, costs are
        for another number of stages, a rank would do something before what it reads,
        or ``max_in_flight`` is too small.

    Example:
      >>> build_v(2, 2, block="v_min").placement
      (0, 1, 1, 0)
      >>> for block in "v_min", "v_half", "zb_v":
      ...     timeline = build_v(8, 32, block=block).simulate()
      ...     print(block, max(timeline.peak_bytes), max(timeline.idle))
      v_min 8.0 27.0
      v_half 10.0 26.0
      zb_v 16.0 7.0

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    name = block if isinstance(block, str) else "v"
    check(name, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    slots = _laid_out(block, num_ranks)
    placement = placed(num_ranks, 2, v_shape(num_ranks))
    if costs is not None:
        check_costs(name, costs, num_microbatches, len(placement))
    tables = Tables(Costs(), placement, num_ranks, num_microbatches)
    rows = _repeated(tables, slots)
    if (run := tables.run(rows)) is None:
        reason = deadlock(tables.actions(rows), len(placement))
        raise ScheduleError(f"{name}: its block cannot be repeated: {reason}")
    needs = [*map(int, run.peaks())]  # by default a stage of a micro-batch is a unit
    most = max(needs) if max_in_flight is None else max_in_flight
    if most < max(needs):
        raise ScheduleError(
            f"{name}: max_in_flight={max_in_flight}: its block holds {max(needs)} "
            f"stages of micro-batches on rank {needs.index(max(needs))}; give at least "
            f"that, or another block"
        )
    whole = (BACKWARD, 0) in slots[0]
    limits = Limits(most_held=[most] * num_ranks)

    def bettered(tables: Tables, rows: Numbered) -> Run:
        """Everything late, then early in that order, while that makes it shorter."""
        run = tables.run(rows)
        assert run is not None
        for _ in range(_ROUNDS):
            new = list_schedule(tables, latest_starts(run), limits, whole)
            new = tables.run(new) if new else None
            if new is None or new.makespan >= run.makespan:
                break
            run = new
        return run

    found = bettered(tables, rows)
    if costs is not None:
        tables = Tables(costs, placement, num_ranks, num_microbatches)
        both = [bettered(tables, some) for some in (found.rows, rows)]
        found = min(both, key=lambda run: run.makespan)
    return Schedule(
        name,
        len(placement),
        num_microbatches,
        tables.placement,
        tables.actions(found.rows),
    )


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: a third of the activations of 1F1B, for a longer warm-up and drain.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule; a rank holds at most as much as `gpipe` does of
      ``ceil((p + 2) / 3)`` micro-batches. With ``F = I = W`` it idles about ``2 p / 3``
      times the work of a micro-batch, and more where the three differ.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> max(v_min(4, 8).simulate().peak_bytes)  # stages of micro-batches
      4.0

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    return build_v(num_ranks, num_microbatches, block="v_min")


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: half of the activations of 1F1B in less time.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule; a rank holds at most as much as `gpipe` does of ``p // 2 + 1``
      micro-batches. With ``F = I = W`` it idles about ``p / 2`` times the work of a
      micro-batch.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> max(v_half(4, 8).simulate().peak_bytes)  # stages of micro-batches
      6.0

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    return build_v(num_ranks, num_microbatches, block="v_half")


def one_f_one_b_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B in a V: whole backwards, two thirds of the activations of 1F1B.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule; a rank holds at most as much as `gpipe` does of
      ``2 p // 3 + 1`` micro-batches. With backwards of two forwards it idles about as
      long as `one_f_one_b`.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> max(one_f_one_b_v(4, 8).simulate().peak_bytes)  # stages of micro-batches
      6.0

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    return build_v(num_ranks, num_microbatches, block="1f1b_v")


def _laid_out(block: str | Sequence[Sequence[int]], num_ranks: int) -> list[_Slots]:
    """The slots of one micro-batch on each rank."""
    p, every = num_ranks, range(num_ranks)
    if block == "1f1b_v":
        return _whole(num_ranks)
    if block == "v_min":
        d = 2 if p % 3 == 0 else 0
        starts = [(i, 2 * p - 1 - i, 2 * p + d + i, 4 * p + d - 1 - i) for i in every]
    elif block == "v_half":
        d = 3 if p % 2 == 0 else 0
        starts = [
            (2 * i, 3 * p - 2 - i, 3 * p + d + 2 * i - 1, 6 * p + d - 2 - i)
            for i in every
        ]
    elif block == "zb_v":
        starts = [
            (4 * i, 6 * p - 3 - 2 * i, 6 * p - 2 + 4 * i, 12 * p - 5 - 2 * i)
            for i in every
        ]
    elif isinstance(block, str):
        raise ScheduleError(
            f"unknown block {block!r}: choose 'v_min', 'v_half', 'zb_v', '1f1b_v' or "
            f"give the slots of each rank"
        )
    else:
        starts = [tuple(slots) for slots in block]
        if [len(slots) for slots in starts] != [4] * num_ranks:
            raise ScheduleError(
                f"block={block!r}: needs four slots for each of {num_ranks} ranks: "
                f"F of its first chunk, F and I of its second, I of its first"
            )
    return [_with_rests(some) for some in starts]


_STARTS = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0))


def _with_rests(starts: Sequence[int]) -> _Slots:
    """Each W in the first free slot after its I, whichever I chooses first."""
    slots = dict(zip(_STARTS, starts, strict=True))
    best: dict[int, int] = {}
    for order in ((1, 0), (0, 1)):
        taken = {slot % _PERIOD for slot in starts}
        rests = {}
        for chunk in order:
            slot = slots[INPUT, chunk] + 1
            while slot % _PERIOD in taken:
                slot += 1
            taken.add(slot % _PERIOD)
            rests[chunk] = slot
        if not best or sum(rests.values()) < sum(best.values()):
            best = rests
    return {**slots, **{(WEIGHT, chunk): slot for chunk, slot in best.items()}}


def _whole(num_ranks: int) -> list[_Slots]:
    """1F1B in a V: forwards at once, each B in the first slots that let both fit."""
    p, every = num_ranks, range(num_ranks)
    slots: list[dict[tuple[str, int], int]] = [
        {(FORWARD, 0): i, (FORWARD, 1): 2 * p - 1 - i} for i in every
    ]
    now = 2 * p
    for chunk, ranks in ((1, every), (0, reversed(every))):
        for rank in ranks:
            while not _room(slots[rank], now):
                now += 1
            slots[rank][BACKWARD, chunk] = now
            now += 2
    return [*slots]


def _room(slots: _Slots, at: int) -> bool:
    """Whether two slots are free, and what is left of the period is even stretches."""
    taken = {slot % _PERIOD for slot in slots.values()}
    taken |= {(slot + 1) % _PERIOD for (op, _), slot in slots.items() if op == BACKWARD}
    mine = {at % _PERIOD, (at + 1) % _PERIOD}
    if mine & taken:
        return False
    free = set(range(_PERIOD)) - taken - mine
    return not free or any({slot, (slot + 1) % _PERIOD} == free for slot in free)


def _repeated(tables: Tables, slots: list[_Slots]) -> Numbered:
    """The order of each rank when every micro-batch is laid out as the first."""
    shape = v_shape(tables.num_ranks)
    rows: Numbered = []
    for rank, some in enumerate(slots):
        cells = [
            (slot + _PERIOD * i, tables.first(op, shape(rank, chunk)) + i)
            for (op, chunk), slot in some.items()
            for i in range(tables.num_microbatches)
        ]
        rows.append([number for _, number in sorted(cells)])
    return rows

"""Two stages per rank in a V: one micro-batch laid out in slots, repeated."""

from collections.abc import Callable, Mapping, Sequence

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._build import check
from ._costs import Costs
from ._improve import latest_starts
from ._list_schedule import list_schedule
from ._placement import stages_of, v_shape
from ._schedule import Schedule
from ._tables import Numbered, Tables

# Six actions of one slot for each micro-batch: F, I and W of two chunks.
_PERIOD = 6
# How often an order is pushed late and early again, at most.
_ROUNDS = 3
# The slots of one micro-batch on one rank: of an op of a chunk, the first of its own.
_Slots = Mapping[tuple[str, int], int]


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
    return _repeated("v_min", num_ranks, num_microbatches, _min)


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
    return _repeated("v_half", num_ranks, num_microbatches, _half)


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
    return _repeated("1f1b_v", num_ranks, num_microbatches, _whole)


def _repeated(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    block: Callable[[int], list[_Slots]],
) -> Schedule:
    """A schedule in the shape of a V from the layout of one micro-batch.

    The block gives the slot in which each rank starts its work on micro-batch 0; the
    others follow every six slots. How long a block keeps activations decides how much a
    rank holds. Then every action runs as early as it can; where a rank still waits,
    before and after the steady phase, the order is changed as long as that makes the
    step shorter and no rank holds more than the fullest.
    """
    check(name, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    placement = v_shape(num_ranks)
    # By default all actions take the same time, and a stage of a micro-batch is a unit.
    tables = Tables(Costs(), placement, num_ranks, num_microbatches)
    rows: Numbered | None = []
    for slots, stages in zip(block(num_ranks), stages_of(placement), strict=True):
        cells = [
            (slot + _PERIOD * i, tables.first(op, stages[chunk]) + i)
            for (op, chunk), slot in slots.items()
            for i in range(num_microbatches)
        ]
        rows.append([number for _, number in sorted(cells)])
    run, whole = tables.run(rows), block is _whole
    most = max(live for *_, live in tables.memory(run.by_end()))
    for _ in range(_ROUNDS):
        # Everything late, then early in that order.
        rows = list_schedule(tables, latest_starts(run), [most] * num_ranks, whole)
        if rows is None or (shifted := tables.run(rows)).makespan >= run.makespan:
            break
        run = shifted
    sizes = len(placement), num_microbatches
    return Schedule(name, *sizes, placement, tables.actions(run.rows))


def _min(num_ranks: int) -> list[_Slots]:
    p, d = num_ranks, 2 if num_ranks % 3 == 0 else 0
    return [
        _with_rests((i, 2 * p - 1 - i, 2 * p + d + i, 4 * p + d - 1 - i))
        for i in range(p)
    ]


def _half(num_ranks: int) -> list[_Slots]:
    p, d = num_ranks, 3 if num_ranks % 2 == 0 else 0
    return [
        _with_rests((2 * i, 3 * p - 2 - i, 3 * p + d + 2 * i - 1, 6 * p + d - 2 - i))
        for i in range(p)
    ]


_STARTS = ((FORWARD, 0), (FORWARD, 1), (INPUT, 1), (INPUT, 0))


def _with_rests(starts: Sequence[int]) -> _Slots:
    """Each W in the first free slot after its I."""
    slots = dict(zip(_STARTS, starts, strict=True))
    taken = {slot % _PERIOD for slot in starts}
    for chunk in (1, 0):
        slot = slots[INPUT, chunk] + 1
        while slot % _PERIOD in taken:
            slot += 1
        taken.add(slot % _PERIOD)
        slots[WEIGHT, chunk] = slot
    return slots


def _whole(num_ranks: int) -> list[_Slots]:
    """1F1B in a V: forwards at once, each B in the first slots that let both fit."""
    p, late = num_ranks, 2 * (num_ranks % 3 == 0)
    second = [2 * p + late // 2]
    for k in reversed(range(p - 1)):
        second.append(second[-1] + (2 if k % 3 else 5) + late * (k == p - 2))
    first = [second[-1] + 2]
    for k in range(p - 1):
        first.append(first[-1] + (5 if k % 3 == 1 else 2) + late * (k == p - 2))
    return [
        {
            (FORWARD, 0): rank,
            (FORWARD, 1): 2 * p - 1 - rank,
            (BACKWARD, 1): second[rank],
            (BACKWARD, 0): first[p - 1 - rank],
        }
        for rank in range(p)
    ]

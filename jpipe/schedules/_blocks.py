"""V schedules: the block of one micro-batch, repeated every six units of time.

    V-Min on three ranks, the block of one micro-batch (f, i, w: of the second chunk)

    rank 0 |F . . . . f . . i w . . . I . . W|
    rank 1 |. F . . f . . . . i . w I . W . .|
    rank 2 |. . F f . . . . . . i I w W . . .|

The offset of an action is the time from the beginning of its block, in units of an F,
an I or a W. The offsets of a rank differ modulo six, so that the blocks of all
micro-batches interlock. How long a block keeps an activation decides how much memory a
rank needs.

References:
  Qi et al., `Pipeline Parallelism with Controllable Memory
  <https://arxiv.org/abs/2405.15362>`_ (2024).
"""

import dataclasses
from collections.abc import Callable, Mapping

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._action_tables import ActionTables, IdRows
from ._build import check_counts
from ._costs import Costs
from ._improve import shorten_ends
from ._placement import group_by_rank, place_in_v
from ._schedule import Schedule

# The units of time from one micro-batch to the next: F, I and W of two chunks.
_PERIOD = 6
# for one rank: (op, chunk) -> its offset in the block; a whole backward takes two units
_Offsets = Mapping[tuple[str, int], int]


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
    return _repeat_block("v_min", num_ranks, num_microbatches, _v_min_block)


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
    return _repeat_block("v_half", num_ranks, num_microbatches, _v_half_block)


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
    return _repeat_block(
        "1f1b_v",
        num_ranks,
        num_microbatches,
        _one_f_one_b_block,
        has_whole_backwards=True,
    )


def _repeat_block(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    build_block: Callable[[int], list[_Offsets]],
    *,
    has_whole_backwards: bool = False,
) -> Schedule:
    """Repeats a block, then improves what is before and after the steady phase.

    Micro-batch i runs 6 i units after micro-batch 0. Then every action runs as early as
    it can; where a rank still waits, before and after the steady phase, the order is
    changed as long as that makes the step shorter and no rank holds more than the
    fullest.

    Args:
      name: the name of the schedule.
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches.
      build_block: ``num_ranks -> block``: the offsets of micro-batch 0 on each rank.
      has_whole_backwards: False if backwards are split.
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check_counts(name, counts)
    placement = place_in_v(num_ranks)
    schedule = Schedule(
        name=name,
        num_stages=len(placement),
        num_microbatches=num_microbatches,
        placement=placement,
        rows=((),) * num_ranks,
    )
    # By default F, I and W take the same time, and a stage of a micro-batch is a unit.
    tables = ActionTables(Costs(), schedule)

    rows: IdRows = []
    block = build_block(num_ranks)
    for offsets, stages in zip(block, group_by_rank(placement, num_ranks), strict=True):
        cells: list[tuple[int, int]] = []  # offset, action
        for (op, chunk), offset in offsets.items():
            first = tables.first_id(op, stages[chunk])
            cells += [
                (offset + _PERIOD * i, first + i) for i in range(num_microbatches)
            ]
        rows.append([action_id for _, action_id in sorted(cells)])

    simulated = tables.simulate(rows)
    memory = tables.memory(simulated.sort_by_end())
    simulated = shorten_ends(
        simulated,
        max_bytes=max(live for _, _, live in memory),
        has_whole_backwards=has_whole_backwards,
    )
    return dataclasses.replace(schedule, rows=tables.to_actions(simulated.rows))


def _v_min_block(num_ranks: int) -> list[_Offsets]:
    p = num_ranks
    d = 2 if num_ranks % 3 == 0 else 0
    return [
        _split_block(
            forward_0=rank,
            forward_1=2 * p - 1 - rank,
            input_1=2 * p + d + rank,
            input_0=4 * p + d - 1 - rank,
        )
        for rank in range(p)
    ]


def _v_half_block(num_ranks: int) -> list[_Offsets]:
    p = num_ranks
    d = 3 if num_ranks % 2 == 0 else 0
    return [
        _split_block(
            forward_0=2 * rank,
            forward_1=3 * p - 2 - rank,
            input_1=3 * p + d + 2 * rank - 1,
            input_0=6 * p + d - 2 - rank,
        )
        for rank in range(p)
    ]


def _split_block(
    *, forward_0: int, forward_1: int, input_1: int, input_0: int
) -> _Offsets:
    """The offsets of one rank: of F and I of both chunks, and of each W after its I.

    A weight gradient has the first offset after that of its input gradient that is free
    modulo the period.
    """
    offsets = {
        (FORWARD, 0): forward_0,
        (FORWARD, 1): forward_1,
        (INPUT, 1): input_1,
        (INPUT, 0): input_0,
    }
    taken = {offset % _PERIOD for offset in offsets.values()}
    for chunk in (1, 0):
        offset = offsets[INPUT, chunk] + 1
        while offset % _PERIOD in taken:
            offset += 1
        taken.add(offset % _PERIOD)
        offsets[WEIGHT, chunk] = offset
    return offsets


def _one_f_one_b_block(num_ranks: int) -> list[_Offsets]:
    """1F1B in a V: forwards at once, each B at the first offset where it fits."""
    p = num_ranks
    # If p is a multiple of 3, the offsets would collide modulo the period.
    delay = 2 if num_ranks % 3 == 0 else 0

    # The offsets of the B of the second chunk, from rank 0 to the last rank ...
    backward_1 = [2 * p + delay // 2]
    for k in reversed(range(p - 1)):
        step = 2 if k % 3 else 5
        if k == p - 2:
            step += delay
        backward_1.append(backward_1[-1] + step)
    # ... and of the first chunk, from the last rank to rank 0.
    backward_0 = [backward_1[-1] + 2]
    for k in range(p - 1):
        step = 5 if k % 3 == 1 else 2
        if k == p - 2:
            step += delay
        backward_0.append(backward_0[-1] + step)
    return [
        {
            (FORWARD, 0): rank,
            (FORWARD, 1): 2 * p - 1 - rank,
            (BACKWARD, 1): backward_1[rank],
            (BACKWARD, 0): backward_0[p - 1 - rank],
        }
        for rank in range(p)
    ]

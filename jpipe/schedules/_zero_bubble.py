"""Schedules with split backwards: weight gradients fill the time that ranks would wait.

The input gradient (I) is what the stage before waits for; the weight gradient (W) waits
for nobody and may run any time later.

The V schedules here are texts: ``"F0I1W1" * n`` runs the forward of chunk 0 and both
halves of the backward of chunk 1, n times. Micro-batches are numbered afterwards.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._action_tables import ActionTables
from ._build import Cell, build, build_with_warmup, check_counts
from ._costs import Costs
from ._improve import shorten_ends
from ._placement import place_in_v
from ._schedule import Schedule
from ._simulate import ScheduleError


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: the order of 1F1B with split backwards, in the memory of 1F1B's rank 0.

    The weight gradients of rank r come r turns after its input gradients and fill the
    drain.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number; the idle time
        below is for ``num_ranks`` or more.

    Returns:
      A valid schedule: with equal stages each rank idles ``(p - 1) max(F + I - W, F,
      I)`` and holds at most p micro-batches.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(zb_h1(2, 3))
      zb_h1: 2 ranks, 2 stages, 3 micro-batches, bubble 10.0 %
      rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2|
      rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2|

    References:
      Qi et al., `Zero Bubble Pipeline Parallelism
      <https://arxiv.org/abs/2401.10241>`_ (2024).
    """

    def warmup(rank: int) -> int:
        return num_ranks - 1 - rank

    def lag(rank: int) -> int:
        return rank

    return build_with_warmup(
        "zb_h1", num_ranks, num_microbatches, warmup=warmup, lag=lag
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: a longer warm-up, so that no rank waits between its first and last action.

    With ``F = I = W`` each rank works without a gap, but ranks begin and end one
    after the other; a step that ends with an update on all ranks still waits for the
    last.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number; what
        is said here holds from ``2 p - 1`` on.

    Returns:
      A valid schedule; a rank holds at most ``2 p - 1`` micro-batches.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(zb_h2(2, 3))
      zb_h2: 2 ranks, 2 stages, 3 micro-batches, bubble 10.0 %
      rank 0 |F0 F1 F2 I0 W0 I1 W1 I2 W2 . |
      rank 1 |.  F0 I0 F1 I1 F2 I2 W0 W1 W2|

    References:
      Qi et al., `Zero Bubble Pipeline Parallelism
      <https://arxiv.org/abs/2401.10241>`_ (2024).
    """

    def warmup(rank: int) -> int:
        return 2 * (num_ranks - 1 - rank)

    def lag(rank: int) -> int:
        return 2 * rank

    return build_with_warmup(
        "zb_h2", num_ranks, num_microbatches, warmup=warmup, lag=lag
    )


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages per rank in the shape of a V, split backwards.

    Rank r runs stages r and ``2 p - 1 - r``. The first and the last stage, an
    embedding and its tied head, are on the same rank.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule; no rank holds more than ``gpipe`` of p micro-batches. With ``F =
      I = W`` and ``2 p - 1`` micro-batches or more, no rank waits between its first
      action and its last.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> from jpipe.schedules import Costs
      >>> zb_v(4, 8).placement
      (0, 1, 2, 3, 3, 2, 1, 0)
      >>> round(zb_v(4, 8).simulate(Costs(1, 2)).bubble_fraction, 3)
      0.059

    References:
      Qi et al., `Pipeline Parallelism with Controllable Memory
      <https://arxiv.org/abs/2405.15362>`_ (2024).
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check_counts("zb_v", counts)
    num_steady = max(num_microbatches - 2 * num_ranks + 1, 0)

    def row(rank: int) -> Iterator[Cell]:
        below = num_ranks - rank
        return _number_microbatches(
            "F0" * (2 * below - 1)
            + "F1F0" * rank
            + "F1I1W1" * below
            + "F0I0W0F1I1W1" * (num_steady + rank)
            + "I0W0F1I1W1" * (below - 1)
            + "I0I1" * rank
            + "I0W0" * below
            + "W1" * rank
            + "W0" * rank
        )

    schedule = build("zb_v", num_microbatches, placement=place_in_v(num_ranks), row=row)
    if num_microbatches >= 2 * num_ranks - 1:
        return schedule
    # There is no steady phase: a rank need not wait for what it would interlock with.
    tables = ActionTables(Costs(), schedule)
    simulated = tables.simulate(tables.to_ids(schedule.rows))
    simulated = shorten_ends(
        simulated, max_bytes=max(simulated.peak_bytes), has_whole_backwards=False
    )
    return dataclasses.replace(schedule, rows=tables.to_actions(simulated.rows))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: two stages per rank in the shape of a V, forwards beside backwards.

    Its steady state pairs a forward of one chunk with a backward of the other chunk, so
    that the transfers of each hide behind the computation of the other. Only the first
    and the last backwards are split.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, at least ``2 * num_ranks``.

    Returns:
      A valid schedule; a rank holds at most ``2 p + 1`` micro-batches of one chunk.

    Raises:
      ScheduleError: if a number is less than 1, or there are too few micro-batches.

    Example:
      >>> round(dualpipe_v(4, 8).simulate().bubble_fraction, 3)
      0.059
      >>> dualpipe_v(4, 7)  # doctest: +NORMALIZE_WHITESPACE
      Traceback (most recent call last):
      jpipe.schedules._simulate.ScheduleError: dualpipe_v: num_microbatches=7: needs at
      least 2 * num_ranks = 8

    References:
      DeepSeek-AI, `DeepSeek-V3 Technical Report <https://arxiv.org/abs/2412.19437>`_
      (2024), and its pipeline in the shape of a V.
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check_counts("dualpipe_v", counts)
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v: num_microbatches={num_microbatches}: needs at least "
            f"2 * num_ranks = {2 * num_ranks}"
        )

    num_steady = num_microbatches - 2 * num_ranks

    def row(rank: int) -> Iterator[Cell]:
        below = num_ranks - 1 - rank

        # The drain alternates the chunks; its second half is split.
        drain = [
            (INPUT if k > rank else BACKWARD, 1 - k % 2) for k in range(2 * rank + 2)
        ]
        # Weight gradients come in the order of the input gradients.
        weights = [f"W{chunk}" for op, chunk in drain if op == INPUT] + ["W0"] * below

        return _number_microbatches(
            "F0" * (2 * below)
            + "F0F1" * (rank + 1)
            + "I1W1F1" * below
            + "F0B1F1B0" * (num_steady + rank + 1)
            + "B1F1B0" * below
            + "".join(f"{op}{chunk}" for op, chunk in drain)
            + "".join(f"{weight}I0" for weight in weights[:below])
            + "".join(weights[below:])
        )

    return build(
        "dualpipe_v", num_microbatches, placement=place_in_v(num_ranks), row=row
    )


def _number_microbatches(text: str) -> Iterator[Cell]:
    """Yields the cells of a text such as ``F0F1I1W1``, with their micro-batches.

    Micro-batches ascend in the forwards of each chunk, and in its backwards, whole or
    split. A weight gradient is of the first micro-batch of its chunk whose input
    gradient has run without it.
    """
    next_forward = {"0": itertools.count(), "1": itertools.count()}
    next_backward = {"0": itertools.count(), "1": itertools.count()}
    # chunk -> micro-batches between their I and their W
    pending = {"0": deque[int](), "1": deque[int]()}
    for op, chunk in zip(text[::2], text[1::2], strict=True):
        if op == FORWARD:
            microbatch = next(next_forward[chunk])
        elif op == WEIGHT:
            microbatch = pending[chunk].popleft()
        else:
            microbatch = next(next_backward[chunk])
            if op == INPUT:
                pending[chunk].append(microbatch)
        yield op, int(chunk), microbatch

"""Schedules with one stage per rank and whole backwards."""

import dataclasses

from ._build import build_with_warmup
from ._schedule import Schedule


def gpipe(
    num_ranks: int, num_microbatches: int, *, descending: bool = False
) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Every rank holds all micro-batches between its forwards and its backwards. The
    backwards run in ascending order, as in all schedules of the catalogue, so that
    gradients have the same bits; or descending, as in torchgpipe.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.
      descending: True to run the last backward first. It takes as long, and with
        ``remat="except_last"`` nothing waits for its backward but what that mode
        stores of the last micro-batch, for a moment.

    Returns:
      A valid schedule. With equal stages its idle fraction is
      ``(p - 1) / (m + p - 1)`` for p ranks and m micro-batches.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(gpipe(2, 2).to_text())
      0F0 0F1 0B0 0B1
      1F0 1F1 1B0 1B1

    References:
      Huang et al., `GPipe: Efficient Training of Giant Neural Networks using
      Pipeline Parallelism <https://arxiv.org/abs/1811.06965>`_ (2019).
    """

    def warmup(rank: int) -> int:
        return num_microbatches

    schedule = build_with_warmup("gpipe", num_ranks, num_microbatches, warmup=warmup)
    if not descending:
        return schedule
    rows = []
    for row in schedule.rows:
        forwards = row[:num_microbatches]
        backwards = row[num_microbatches:]
        rows.append((*forwards, *reversed(backwards)))
    return dataclasses.replace(
        schedule, name="gpipe_descending", rows=tuple(rows)
    ).validate()


def gpipe_last_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe, but the last rank runs each backward right after its forward.

    The last rank holds one micro-batch instead of all, and recomputes nothing where the
    other ranks recompute; its gradients are ready before the ranks before it need them.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule. It takes no longer than `gpipe`.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(gpipe_last_one_f_one_b(2, 2).to_text())
      0F0 0F1 0B0 0B1
      1F0 1B0 1F1 1B1
      >>> gpipe_last_one_f_one_b(4, 8).simulate().peak_bytes
      (8.0, 8.0, 8.0, 1.0)
    """

    def warmup(rank: int) -> int:
        return 0 if rank == num_ranks - 1 else num_microbatches

    return build_with_warmup(
        "gpipe_last_1f1b", num_ranks, num_microbatches, warmup=warmup
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: after warm-up each rank alternates one forward and one backward.

    Rank ``r`` holds at most ``min(m, p - r)`` micro-batches for p ranks and m
    micro-batches, where GPipe holds m.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule. With equal stages its idle fraction is that of `gpipe`.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(one_f_one_b(2, 2).to_text())
      0F0 0F1 0B0 0B1
      1F0 1B0 1F1 1B1

    References:
      Narayanan et al., `Memory-Efficient Pipeline-Parallel DNN Training
      <https://arxiv.org/abs/2006.09503>`_ (2021): there "PipeDream-Flush".
    """

    def warmup(rank: int) -> int:
        return num_ranks - 1 - rank

    return build_with_warmup("1f1b", num_ranks, num_microbatches, warmup=warmup)


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Eager 1F1B: twice the warm-up of `one_f_one_b`, which hides slow transfers.

    At any time an activation and a gradient are in flight between two ranks, so a
    transfer that takes no longer than an action costs nothing in the steady state.
    Rank ``r`` holds at most ``min(m, 2 (p - 1 - r) + 1)`` micro-batches.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule. With free transfers it takes the time of `one_f_one_b`.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> from jpipe.schedules import Costs
      >>> slow = Costs(latency=0.5)
      >>> one_f_one_b(4, 8).simulate(slow).makespan
      41.0
      >>> eager_one_f_one_b(4, 8).simulate(slow).makespan
      36.0

    References:
      Zhuang et al., `On Optimizing the Communication of Model Parallelism
      <https://arxiv.org/abs/2211.05322>`_ (2023).
    """

    def warmup(rank: int) -> int:
        return 2 * (num_ranks - 1 - rank)

    return build_with_warmup("eager_1f1b", num_ranks, num_microbatches, warmup=warmup)


def forward_only(num_ranks: int, num_microbatches: int) -> Schedule:
    """Inference: every rank runs its forwards, and stores no residuals.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number.

    Returns:
      A valid schedule for `Pipeline.apply`; it cannot train.

    Raises:
      ScheduleError: if either number is less than 1.

    Example:
      >>> print(forward_only(2, 3))
      forward_only: 2 ranks, 2 stages, 3 micro-batches, bubble 25.0 %
      rank 0 |F0 F1 F2 . |
      rank 1 |.  F0 F1 F2|
    """

    def warmup(rank: int) -> int:
        return num_microbatches

    name = "forward_only"
    schedule = build_with_warmup(name, num_ranks, num_microbatches, warmup=warmup)
    return dataclasses.replace(schedule.forwards(), name=name)

"""Schedules with several stages per rank in a loop: less idle time, more transfers."""

from ._build import build_with_warmup
from ._flush import one_f_one_b
from ._schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Interleaved 1F1B: each rank runs several stages, so the pipeline fills faster.

    Stage ``c p + r`` is chunk c of rank r. Micro-batches pass in groups of p through
    all chunks before the next group starts.

    Args:
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches, any positive number; the idle time
        below is for multiples of ``num_ranks``.
      num_chunks: the stages per rank, v. With 1 it is `one_f_one_b`.

    Returns:
      A valid schedule: with equal stages each rank idles ``(p - 1) (F + B) / v``,
      where F and B are the times of all the layers of a rank.

    Raises:
      ScheduleError: if a number is less than 1.

    Example:
      >>> print(interleaved(2, 2))
      interleaved: 2 ranks, 4 stages, 2 micro-batches, bubble 20.0 %
      rank 0 |0F0 0F1 2F0 2F1 .   .   2B0 2B0 .   2B1 2B1 0B0 0B0 0B1 0B1|
      rank 1 |.   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 .   .  |

    References:
      Narayanan et al., `Efficient Large-Scale Language Model Training on GPU Clusters
      Using Megatron-LM <https://arxiv.org/abs/2104.04473>`_ (2021).
    """
    if num_chunks == 1:
        # The warm-up below would give the eager order.
        return one_f_one_b(num_ranks, num_microbatches)

    def warmup(rank: int) -> int:
        return 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks

    return build_with_warmup(
        "interleaved",
        num_ranks,
        num_microbatches,
        warmup=warmup,
        num_chunks=num_chunks,
        group_size=num_ranks,
    )


def interleaved_zb(
    num_ranks: int, num_microbatches: int, num_chunks: int = 2
) -> Schedule:
    """Interleaved with split backwards: the second halves fill the drain.

    Stages and groups are those of `interleaved`. The warm-up is shorter, so that the
    last rank begins with backwards sooner, and the weight gradients of rank r come r
    turns after its input gradients.

    Args:
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches, any positive number; best are
        multiples of ``num_ranks``.
      num_chunks: the stages per rank, v. With 1 it is `zb_h1`.

    Returns:
      A valid schedule; a rank holds at most ``v p`` of its stages' micro-batches.

    Raises:
      ScheduleError: if a number is less than 1.

    Example:
      >>> from jpipe.schedules import compare
      >>> print(compare([interleaved(4, 8), interleaved_zb(4, 8)]))
      | schedule       | stages | time | bubble | peak bytes per rank |
      | -------------- | ------ | ---- | ------ | ------------------- |
      | interleaved    | 8      | 28.5 | 15.8 % | 5.5, 4.5, 3.5, 2.5  |
      | interleaved_zb | 8      | 25.5 | 5.9 %  | 4, 4, 4, 4          |

    References:
      Qi et al., `Zero Bubble Pipeline Parallelism
      <https://arxiv.org/abs/2401.10241>`_ (2024): the interleaved form.
    """

    def warmup(rank: int) -> int:
        return num_ranks - 1 - rank + (num_chunks - 1) * num_ranks

    def lag(rank: int) -> int:
        return rank

    return build_with_warmup(
        "interleaved_zb",
        num_ranks,
        num_microbatches,
        warmup=warmup,
        lag=lag,
        num_chunks=num_chunks,
        group_size=num_ranks,
    )


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Looped BFS: all micro-batches through a chunk before the next chunk starts.

    It tolerates slow transfers better than `interleaved` and gathers the weights of
    each chunk only twice per step, but holds all micro-batches as `gpipe` does.

    Args:
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches, any positive number; with fewer
        than ``num_ranks`` the ranks idle longer.
      num_chunks: the stages per rank, v.

    Returns:
      A valid schedule: with equal stages each rank idles ``(p - 1) (F + B) / v``.

    Raises:
      ScheduleError: if a number is less than 1.

    Example:
      >>> print(looped_bfs(2, 2).to_text())
      0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
      1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    References:
      Lamy-Poirier, `Breadth-First Pipeline Parallelism
      <https://arxiv.org/abs/2211.05953>`_ (2023).
    """

    def warmup(rank: int) -> int:
        return num_chunks * num_microbatches

    return build_with_warmup(
        "looped_bfs",
        num_ranks,
        num_microbatches,
        warmup=warmup,
        num_chunks=num_chunks,
    )

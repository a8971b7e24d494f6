"""Several stages per rank, round the ranks: less idle time for more transfers."""

from collections.abc import Iterator

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._build import Cell, build, check, loop
from ._flush import one_f_one_b
from ._schedule import Schedule


def interleaved(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    group: int | None = None,
) -> Schedule:
    """Interleaved 1F1B: each rank runs several stages, so the pipeline fills faster.

    Stage ``c p + r`` is chunk c of rank r. Micro-batches pass in groups through all
    chunks before the next group starts.

    Args:
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches, any positive number; the idle time
        below is for multiples of ``num_ranks``.
      num_chunks: the stages per rank, v. With 1 it is `one_f_one_b`.
      group: the micro-batches per group, from ``num_ranks`` on; default: ``num_ranks``.

    Returns:
      A valid schedule: with equal stages each rank idles ``(p - 1) (F + B) / v``,
      where F and B are the times of all the layers of a rank.

    Raises:
      ScheduleError: if a number is less than 1, or the group so small that ranks
        would wait for each other.

    Example:
      >>> print(interleaved(2, 2))
      interleaved: 2 ranks, 4 stages, 2 micro-batches, bubble 20.0 %
      rank 0 |0F0 0F1 2F0 2F1 .   .   2B0 2B0 .   2B1 2B1 0B0 0B0 0B1 0B1|
      rank 1 |.   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 .   .  |

    References:
      Narayanan et al., `Efficient Large-Scale Language Model Training on GPU Clusters
      Using Megatron-LM <https://arxiv.org/abs/2104.04473>`_ (2021).
    """
    size = num_ranks if group is None else group
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check("interleaved", {**numbers, "num_chunks": num_chunks, "group": size})
    if num_chunks == 1:
        # The formulas below would give the eager order.
        return one_f_one_b(num_ranks, num_microbatches)
    forwards = _in_groups(num_microbatches, num_chunks, size)
    total = len(forwards)

    def row(rank: int) -> Iterator[Cell]:
        warmup = min(total, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * size)
        yield from ((FORWARD, *forwards[k]) for k in range(warmup))
        for k in range(total):
            if warmup + k < total:
                yield FORWARD, *forwards[warmup + k]
            chunk, i = forwards[k]
            yield BACKWARD, num_chunks - 1 - chunk, i

    return build(
        "interleaved", num_ranks, num_microbatches, row, loop(num_ranks), num_chunks
    ).validate()


def interleaved_zb(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 2,
    group: int | None = None,
) -> Schedule:
    """Interleaved with split backwards: the second halves fill the drain.

    Stages and groups are those of `interleaved`. Fewer forwards come first, so that
    the last rank begins with backwards sooner, and the second halves lag behind by the
    number of the rank.

    Args:
      num_ranks: the number of ranks.
      num_microbatches: the number of micro-batches, any positive number; best are
        multiples of ``num_ranks``.
      num_chunks: the stages per rank, v. With 1 it is `zb_h1`.
      group: the micro-batches per group, from ``num_ranks`` on; default: ``num_ranks``.

    Returns:
      A valid schedule; a rank holds at most ``v p`` of its stages' micro-batches.

    Raises:
      ScheduleError: if a number is less than 1, or the group so small that ranks
        would wait for each other.

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
    size = num_ranks if group is None else group
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check("interleaved_zb", {**numbers, "num_chunks": num_chunks, "group": size})
    forwards = _in_groups(num_microbatches, num_chunks, size)
    halves = [(num_chunks - 1 - chunk, i) for chunk, i in forwards]
    total = len(forwards)

    def row(rank: int) -> Iterator[Cell]:
        warmup = min(total, num_ranks - rank + (num_chunks - 1) * size)
        yield from ((FORWARD, *forwards[k]) for k in range(warmup))
        for k in range(total):
            yield INPUT, *halves[k]
            if k >= rank:
                yield WEIGHT, *halves[k - rank]
            if warmup + k < total:
                yield FORWARD, *forwards[warmup + k]
        yield from ((WEIGHT, *half) for half in halves[max(total - rank, 0) :])

    name, shape = "interleaved_zb", loop(num_ranks)
    return build(name, num_ranks, num_microbatches, row, shape, num_chunks).validate()


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Looped BFS: all micro-batches through a chunk before the next chunk starts.

    It bears slow transfers better than `interleaved` and gathers the weights of each
    chunk only twice per step, but holds all micro-batches as `gpipe` does.

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
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    check("looped_bfs", {**numbers, "num_chunks": num_chunks})

    def row(rank: int) -> Iterator[Cell]:
        for op, chunks in (
            (FORWARD, range(num_chunks)),
            (BACKWARD, reversed(range(num_chunks))),
        ):
            for chunk in chunks:
                yield from ((op, chunk, i) for i in range(num_microbatches))

    return build(
        "looped_bfs", num_ranks, num_microbatches, row, loop(num_ranks), num_chunks
    )


def _in_groups(
    num_microbatches: int, num_chunks: int, size: int
) -> list[tuple[int, int]]:
    """Chunks and micro-batches, group by group.

    The last group is filled up with micro-batches that `build` drops again: with a
    short one, ranks could wait for each other.
    """
    return [
        (chunk, i)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for i in range(first, first + size)
    ]

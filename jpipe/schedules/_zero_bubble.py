"""Backwards in two halves: the second fills the time in which a rank would wait."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Real

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._build import Cell, build, check, v_shape
from ._schedule import Schedule
from ._simulate import ScheduleError


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: the order of 1F1B with split backwards, in the memory of 1F1B's rank 0.

    The second halves lag behind by the number of the rank and fill the drain.

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
    return _lagging("zb_h1", num_ranks, num_microbatches, lambda rank: num_ranks - rank)


def zb_h2(num_ranks: int, num_microbatches: int, latency: float = 0.0) -> Schedule:
    """ZB-H2: more forwards first, so that no rank waits between its first and last.

    With ``F = I = W`` each rank works without a gap, but ranks begin and end one
    after the other; a step that ends with an update on all ranks still waits for the
    last.

    Args:
      num_ranks: the number of ranks, one stage on each.
      num_microbatches: the number of micro-batches, any positive number; what is said
        here is for ``2 p - 1`` or more.
      latency: the time c that a transfer takes, in units of a forward. So much more is
        begun first that ranks do not wait for transfers either.

    Returns:
      A valid schedule; a rank holds at most ``2 p - 1 + 2 (p - 1) c`` micro-batches.

    Raises:
      ScheduleError: if either number is less than 1, or the latency less than 0.

    Example:
      >>> from jpipe.schedules import Costs
      >>> slow = Costs(latency=2.0)
      >>> zb_h2(4, 24).simulate(slow).makespan
      90.0
      >>> zb_h2(4, 24, latency=2.0).simulate(slow).makespan
      81.0
      >>> print(zb_h2(2, 3))
      zb_h2: 2 ranks, 2 stages, 3 micro-batches, bubble 10.0 %
      rank 0 |F0 F1 F2 I0 W0 I1 W1 I2 W2 . |
      rank 1 |.  F0 I0 F1 I1 F2 I2 W0 W1 W2|

    References:
      Qi et al., `Zero Bubble Pipeline Parallelism
      <https://arxiv.org/abs/2401.10241>`_ (2024).
    """
    if not isinstance(latency, Real) or not 0 <= latency < math.inf:
        raise ScheduleError(
            f"zb_h2: latency={latency!r}: must be a number, at least 0 and finite"
        )

    def warmup(rank: int) -> int:
        after = num_ranks - 1 - rank
        return math.floor(2 * after + 1 + 2 * after * latency)

    return _lagging("zb_h2", num_ranks, num_microbatches, warmup)


def _lagging(
    name: str, num_ranks: int, num_microbatches: int, warmup: Callable[[int], int]
) -> Schedule:
    """Warm-up forwards, then first half, a second half that lags, and a forward."""
    check(name, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})

    def row(rank: int) -> Iterator[Cell]:
        first, lag = min(warmup(rank), num_microbatches), warmup(0) - warmup(rank)
        yield from ((FORWARD, 0, i) for i in range(first))
        for i in range(num_microbatches):
            yield INPUT, 0, i
            if i >= lag:
                yield WEIGHT, 0, i - lag
            yield FORWARD, 0, first + i
        left = max(num_microbatches - lag, 0)
        yield from ((WEIGHT, 0, i) for i in range(left, num_microbatches))

    return build(name, num_ranks, num_microbatches, row)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages per rank in the shape of a V, split backwards.

    Rank r runs stages r and ``2 p - 1 - r``. The first and the last stage, an
    embedding and its tied head, are on the same rank.

    Args:
      num_ranks: the number of ranks, two stages on each.
      num_microbatches: the number of micro-batches, any positive number; what is said
        here is for ``2 p - 1`` or more.

    Returns:
      A valid schedule. With ``F = I = W`` no rank waits between its first action and
      its last, and none holds more than ``gpipe`` of p micro-batches.

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
    check("zb_v", {"num_ranks": num_ranks, "num_microbatches": num_microbatches})

    def row(rank: int) -> Iterator[Cell]:
        cells = _Counters()
        for _ in range(2 * (num_ranks - rank) - 1):
            yield cells.next(FORWARD, 0)
        for _ in range(rank):
            yield cells.next(FORWARD, 1)
            yield cells.next(FORWARD, 0)
        for _ in range(num_ranks - rank):
            yield from (cells.next(op, 1) for op in (FORWARD, INPUT, WEIGHT))
        count = max(num_microbatches, 2 * num_ranks - 1)
        while cells.done(FORWARD, 1) < cells.done(FORWARD, 0) or (
            cells.done(FORWARD, 0) < count
        ):
            if cells.done(FORWARD, 0) < count:
                yield cells.next(FORWARD, 0)
            yield from (cells.next(op, 0) for op in (INPUT, WEIGHT))
            yield from (cells.next(op, 1) for op in (FORWARD, INPUT, WEIGHT))
        for _ in range(rank):
            yield from (cells.next(INPUT, chunk) for chunk in (0, 1))
        for _ in range(num_ranks - rank):
            yield from (cells.next(op, 0) for op in (INPUT, WEIGHT))
        for chunk in (1, 0):
            while cells.done(WEIGHT, chunk) < count:
                yield cells.next(WEIGHT, chunk)

    return build("zb_v", num_ranks, num_microbatches, row, v_shape(num_ranks), 2)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: two stages per rank in the shape of a V, forwards beside backwards.

    Its steady state pairs a forward of one chunk with a backward of the other, so
    that the transfers of one hide behind the work of the other. Only the first and
    the last backwards are split.

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
    check("dualpipe_v", {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v: num_microbatches={num_microbatches}: needs at least "
            f"2 * num_ranks = {2 * num_ranks}"
        )

    def row(rank: int) -> Iterator[Cell]:
        cells, waiting = _Counters(), deque[Cell]()
        below = num_ranks - rank - 1

        def first_half(chunk: int) -> Cell:
            cell = cells.next(BACKWARD, chunk)
            waiting.append((WEIGHT, *cell[1:]))
            return INPUT, *cell[1:]

        for _ in range(2 * below):
            yield cells.next(FORWARD, 0)
        for _ in range(rank + 1):
            yield from (cells.next(FORWARD, chunk) for chunk in (0, 1))
        for _ in range(below):
            yield first_half(1)
            yield waiting.popleft()
            yield cells.next(FORWARD, 1)
        for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
            for chunk in (0, 1):
                yield cells.next(FORWARD, chunk)
                yield cells.next(BACKWARD, 1 - chunk)
        for _ in range(below):
            yield cells.next(BACKWARD, 1)
            yield cells.next(FORWARD, 1)
            yield cells.next(BACKWARD, 0)
        for k in range(2 * (rank + 1)):
            chunk = 1 - k % 2
            yield first_half(chunk) if k > rank else cells.next(BACKWARD, chunk)
        for _ in range(below):
            yield waiting.popleft()
            yield first_half(0)
        yield from waiting

    return build("dualpipe_v", num_ranks, num_microbatches, row, v_shape(num_ranks), 2)


class _Counters:
    """The next micro-batch of each op of each chunk."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def done(self, op: str, chunk: int) -> int:
        return self._next.get((op, chunk), 0)

    def next(self, op: str, chunk: int) -> Cell:
        i = self.done(op, chunk)
        self._next[op, chunk] = i + 1
        return op, chunk, i

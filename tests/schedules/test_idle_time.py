"""Idle time and memory in units of actions: closed forms of the literature."""

from collections.abc import Callable

import pytest

from jpipe.schedules import (
    Costs,
    Schedule,
    Timeline,
    compare,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    gpipe_last_one_f_one_b,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)


def some(fewest: Callable[[int], int]) -> list[tuple[int, int]]:
    """Ranks and micro-batches: at the limit of a closed form, past it, many."""
    return [(p, m) for p in (2, 3, 5, 8) for m in (fewest(p), fewest(p) + 1, 19, 32)]


def times(forward: float, input_grad: float, weight_grad: float, **more) -> Costs:
    both = input_grad + weight_grad
    return Costs(forward, both, input_grad, weight_grad, **more)


def run(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """With costs of all layers of a rank, cut in the chunks of the schedule."""
    (timeline,) = compare([schedule], costs).timelines
    return timeline


def within(timeline: Timeline) -> list[float]:
    """The idle time of each rank between its own first start and last end."""
    return [
        timeline.end[row[-1]] - timeline.start[row[0]] - busy
        for row, busy in zip(timeline.rows, timeline.busy, strict=True)
    ]


THIRDS, UNEVEN, SLOW_I = (1, 1, 1), (0.75, 0.5, 0.25), (2, 3, 1)
# A builder; times of F, I and W; from how many micro-batches on; the idle time of each
# rank, and the peak of rank r, by p ranks and m micro-batches.
FORMS = {
    "gpipe": (gpipe, UNEVEN, lambda p: 1, lambda p: (p - 1) * 1.5, lambda p, m, r: m),
    "gpipe_last_1f1b": (
        gpipe_last_one_f_one_b,
        *(UNEVEN, lambda p: 1, lambda p: (p - 1) * 1.5),
        lambda p, m, r: m if r < p - 1 else 1,
    ),
    "1f1b": (
        one_f_one_b,
        *(UNEVEN, lambda p: 1, lambda p: (p - 1) * 1.5),
        lambda p, m, r: min(m, p - r),
    ),
    "eager_1f1b": (
        eager_one_f_one_b,
        *(UNEVEN, lambda p: 1, lambda p: (p - 1) * 1.5),
        lambda p, m, r: min(m, 2 * (p - 1 - r) + 1),
    ),
    "looped_bfs": (
        lambda p, m: looped_bfs(p, m, 4),
        *((1, 1.5, 0.5), lambda p: p, lambda p: (p - 1) * 0.75),
        lambda p, m, r: m,
    ),
    "zb_h1": (zb_h1, THIRDS, lambda p: p, lambda p: p - 1, lambda p, m, r: p),
    "zb_h2": (
        zb_h2,
        *(THIRDS, lambda p: 2 * p - 1, lambda p: p - 1),
        lambda p, m, r: 2 * p - 1,
    ),
    "zb_v": (
        zb_v,
        *(THIRDS, lambda p: 2 * p - 1, lambda p: (p - 1) / 2),
        lambda p, m, r: p,
    ),
    # Without overlap it takes the time of zb_v, and holds one chunk more.
    "dualpipe_v": (
        dualpipe_v,
        *(THIRDS, lambda p: 2 * p, lambda p: (p - 1) / 2),
        lambda p, m, r: p + 0.5,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_idle_time_and_peaks_are_those_of_the_literature(form):
    build, (f, i, w), fewest, idle, peak = FORMS[form]
    for p, m in some(fewest):
        timeline = run(build(p, m), times(f, i, w))
        assert timeline.busy == (m * (f + i + w),) * p
        assert timeline.idle == (idle(p),) * p
        assert timeline.peak_bytes == tuple(peak(p, m, r) for r in range(p))


@pytest.mark.parametrize(("build", "units"), [(interleaved, 3), (interleaved_zb, 1)])
def test_interleaved_schedules_divide_the_idle_time_by_their_chunks(build, units):
    for v in (2, 4):
        costs = times(1.0, 1.0, 1.0, residual_bytes=v, pending_bytes=v)
        for p, m in ((2, 2), (3, 12), (4, 8), (8, 32)):
            timeline = run(build(p, m, v), costs)
            assert timeline.idle == ((p - 1) * units / v,) * p
            most = {3: (v + 1) * p - 1, 1: v * p}[units]
            assert max(timeline.peak_bytes) <= min(m * v, most)


def test_zero_bubble_schedules_wait_only_for_longer_first_halves():
    for p, m in some(lambda p: 2 * p - 1):
        for f, i, w in (THIRDS, SLOW_I, (2, 2, 1)):
            waits = within(run(zb_h2(p, m), times(f, i, w)))
            assert max(waits) == (p - 1) * max(0, f + i - 2 * w)
        for f, i, w in (THIRDS, SLOW_I, (1, 3, 1)):
            assert max(within(run(zb_v(p, m), times(f, i, w)))) == (p - 1) * (i - w)
        assert interleaved_zb(p, m, 1).rows == zb_h1(p, m).rows


def test_makespan_of_uneven_stages_follows_from_the_slowest():
    for forward in ([1, 1, 1, 1.5], [2, 1, 1, 1], [1, 0.5, 3, 0.25, 1.25], [1, 2]):
        backward = [2.5 * time for time in forward]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        slowest = both.index(max(both))
        for m in (1, 2, 7, 16):
            bound = (m - 1) * max(both) + sum(both)
            costs = Costs(forward, backward)
            timeline = gpipe(len(forward), m).simulate(costs)
            assert (timeline.makespan, timeline.bottleneck) == (bound, slowest)
            # A slow stage of 1F1B works on while the first gradients are on their way.
            makespan = one_f_one_b(len(forward), m).simulate(costs).makespan
            assert makespan <= bound
            assert makespan == bound or slowest < len(forward) - 1

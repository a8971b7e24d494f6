"""Idle time and memory in units of actions: closed forms of the literature."""

import math
from collections.abc import Callable, Iterator

import pytest

from jpipe.schedules import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    compare,
    dualpipe_v,
    eager_one_f_one_b,
    forward_only,
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

Build = Callable[[int, int], Schedule]
OneOfRank = Callable[[int, int, int], float]


def grid(fewest: Callable[[int], int] = lambda p: 1) -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches, from the fewest for which a closed form holds."""
    for p in range(2, 9):
        yield from ((p, m) for m in range(fewest(p), 33))


def some(fewest: Callable[[int], int] = lambda p: 1) -> Iterator[tuple[int, int]]:
    """A few of `grid`: at the limit, past it, no multiple, many."""
    for p in (2, 3, 5, 8):
        yield from ((p, m) for m in (fewest(p), fewest(p) + 1, 19, 32))


def times(forward: float, input_grad: float, weight_grad: float, **more) -> Costs:
    both = input_grad + weight_grad
    return Costs(forward, both, input_grad, weight_grad, **more)


def run(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """With costs of all layers of a rank, cut in the chunks of the schedule."""
    (timeline,) = compare([schedule], costs).timelines
    return timeline


def check_idle(timeline: Timeline, costs: Costs, idle: float) -> None:
    """On all ranks the same: they do the same work."""
    p = len(timeline.rows)
    m = max(action.microbatch for action in timeline.end) + 1
    busy = m * (costs.forward + costs.backward)
    assert timeline.busy == (busy,) * p
    assert timeline.makespan == busy + idle
    assert timeline.idle == (idle,) * p
    assert timeline.bubble_fraction == pytest.approx(idle / (busy + idle), rel=1e-12)


def check_peak(timeline: Timeline, peak: OneOfRank) -> None:
    p = len(timeline.rows)
    m = max(action.microbatch for action in timeline.end) + 1
    assert timeline.peak_bytes == tuple(peak(p, m, r) for r in range(p))


def within(timeline: Timeline) -> list[float]:
    """The idle time of each rank between its own first start and last end."""
    return [
        timeline.end[row[-1]] - timeline.start[row[0]] - busy
        for row, busy in zip(timeline.rows, timeline.busy, strict=True)
    ]


@pytest.mark.parametrize(
    ("build", "peak"),
    [
        pytest.param(gpipe, lambda p, m, r: m, id="gpipe"),
        pytest.param(
            gpipe_last_one_f_one_b,
            lambda p, m, r: m if r < p - 1 else 1,
            id="gpipe_last_1f1b",
        ),
        pytest.param(one_f_one_b, lambda p, m, r: min(m, p - r), id="1f1b"),
        pytest.param(
            eager_one_f_one_b,
            lambda p, m, r: min(m, 2 * (p - 1 - r) + 1),
            id="eager_1f1b",
        ),
    ],
)
def test_whole_backwards_of_one_stage_per_rank(build, peak):
    for p, m in grid():
        costs = times(0.75, 0.5, 0.25)
        timeline = run(build(p, m), costs)
        check_idle(timeline, costs, (p - 1) * 1.5)
        check_peak(timeline, peak)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_divides_the_idle_time_by_its_chunks(v):
    costs = times(1.0, 1.5, 0.5, residual_bytes=v)  # so that a chunk keeps one unit

    def peak(p: int, m: int, r: int) -> float:
        return min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1)

    for p, m in grid():
        if m % p == 0:
            timeline = run(interleaved(p, m, v), costs)
            check_idle(timeline, costs, (p - 1) * 3.0 / v)
            check_peak(timeline, peak)


@pytest.mark.parametrize(("v", "sizes"), [(2, grid), (4, some)])
def test_looped_bfs_divides_the_idle_time_by_its_chunks_and_holds_everything(v, sizes):
    costs = times(1.0, 1.5, 0.5)
    for p, m in sizes(lambda p: p):
        timeline = run(looped_bfs(p, m, v), costs)
        check_idle(timeline, costs, (p - 1) * 3.0 / v)
        check_peak(timeline, lambda p, m, r: m)


def test_chunked_schedules_idle_longer_where_the_table_says_so():
    # In units of a chunk's forward: too few micro-batches, and a group not full.
    assert [looped_bfs(4, m).simulate().idle for m in (1, 2, 3)] == [
        (18.0,) * 4,
        (15.0,) * 4,
        (12.0,) * 4,
    ]
    assert interleaved(4, 2).simulate().idle == (15.0,) * 4
    # Megatron's formula with a short last group gives 20; filling it up gives less.
    assert interleaved(4, 9).simulate().idle == (15.0,) * 4


@pytest.mark.parametrize(
    ("f", "i", "w", "sizes"),
    [
        (1, 1, 1, grid),
        (2, 3, 1, grid),
        (3, 2, 1, some),
        (2, 1, 3, some),
        (1, 3, 2, some),
        (0.5, 1.25, 0.75, some),
    ],
)
def test_zb_h1_with_one_end_for_all(f, i, w, sizes):
    costs = times(f, i, w)
    for p, m in sizes(lambda p: p):
        timeline = run(zb_h1(p, m), costs)
        check_idle(timeline, costs, (p - 1) * max(f + i - w, f, i))
        check_peak(timeline, lambda p, m, r: p)


@pytest.mark.parametrize(
    ("f", "i", "w", "sizes"),
    [
        (1, 1, 1, grid),
        (2, 2, 1, some),
        (2, 3, 1, grid),
        (3, 2, 1, some),
        (3, 1, 2, some),
    ],
)
def test_zb_h2_with_and_without_one_end_for_all(f, i, w, sizes):
    # The closed form holds for second halves no longer than a forward.
    costs = times(f, i, w)
    for p, m in sizes(lambda p: 2 * p - 1):
        timeline = run(zb_h2(p, m), costs)
        check_idle(timeline, costs, (p - 1) * max(f, f + i - 2 * w))
        check_peak(timeline, lambda p, m, r: 2 * p - 1)
        assert max(within(timeline)) == (p - 1) * max(0, f + i - 2 * w)


@pytest.mark.parametrize("latency", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_zb_h2_of_a_latency_waits_for_no_transfer_after_its_first(latency):
    costs = times(1.0, 1.0, 1.0, latency=latency)
    for p in (2, 3, 4, 8):
        timeline = run(zb_h2(p, 6 * p, latency), costs)
        check_idle(timeline, costs, (p - 1) * (1 + latency))
        held = math.floor(2 * p - 1 + 2 * (p - 1) * latency)
        assert max(timeline.peak_bytes) <= held
    # Without, it waits for a gradient and an activation again and again.
    plain = run(zb_h2(4, 24), costs).makespan
    assert (plain > 24 * 3 + 3 * (1 + latency)) == (latency > 1)


def test_zb_h2_of_a_huge_latency_runs_all_forwards_first():
    assert str(zb_h2(3, 2, 1e300).rows[0]) == "(0F0, 0F1, 0I0, 0W0, 0I1, 0W1)"


def test_zb_h2_refuses_a_latency_that_is_none():
    for latency in (-1.0, math.inf, math.nan, "5us"):
        with pytest.raises(ScheduleError, match=f"^zb_h2: latency={latency!r}: must"):
            zb_h2(2, 2, latency)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_zb_divides_the_idle_time_of_zb_h1_by_its_chunks(v):
    costs = times(1.0, 1.0, 1.0, residual_bytes=v, pending_bytes=v)
    for p, m in some(lambda p: p):
        if m % p == 0:
            timeline = run(interleaved_zb(p, m, v), costs)
            check_idle(timeline, costs, (p - 1) * costs.forward / v)
            assert max(timeline.peak_bytes) <= v * p
    for p, m in some():
        assert interleaved_zb(p, m, 1).rows == zb_h1(p, m).rows


def test_split_backwards_of_fewer_microbatches_hold_what_there_is():
    for p, m in some():
        check_peak(run(zb_h1(p, m)), lambda p, m, r: min(m, p))
        check_peak(run(zb_h2(p, m)), lambda p, m, r: min(m, 2 * p - 1))


def test_zb_v_with_equal_thirds_never_waits_between_its_first_and_its_last_action():
    costs = times(1.0, 1.0, 1.0)
    for p, m in grid(lambda p: 2 * p - 1):
        timeline = run(zb_v(p, m), costs)
        check_idle(timeline, costs, (p - 1) * costs.forward / 2)
        check_peak(timeline, lambda p, m, r: p)
        assert within(timeline) == [0.0] * p


@pytest.mark.parametrize(
    ("f", "i", "w", "sizes"), [(2, 2, 1, some), (2, 3, 1, some), (1, 3, 1, some)]
)
def test_zb_v_waits_for_longer_first_halves(f, i, w, sizes):
    for p, m in sizes(lambda p: 2 * p - 1):
        timeline = run(zb_v(p, m), times(f, i, w))
        assert max(within(timeline)) == (p - 1) * (i - w)


def test_dualpipe_v_without_overlap_takes_the_time_of_zb_v_and_one_chunk_more():
    costs = times(1.0, 1.0, 1.0)
    for p, m in grid(lambda p: 2 * p):
        timeline = run(dualpipe_v(p, m), costs)
        check_idle(timeline, costs, (p - 1) * costs.forward / 2)
        check_peak(timeline, lambda p, m, r: (2 * p + 1) / 2)


def test_forward_only_idles_one_forward_per_rank_and_keeps_nothing():
    for p, m in grid():
        timeline = run(forward_only(p, m), Costs(0.75))
        assert timeline.idle == ((p - 1) * 0.75,) * p
        assert timeline.makespan == (m + p - 1) * 0.75
        assert timeline.peak_bytes == (0.0,) * p


@pytest.mark.parametrize(
    ("m", "fractions"),
    [
        (4, [0.429, 0.273, 0.200, 0.200]),
        (8, [0.273, 0.158, 0.111, 0.059]),
        (16, [0.158, 0.086, 0.059, 0.030]),
        (32, [0.086, 0.045, 0.030, 0.015]),
    ],
)
def test_idle_share_of_four_ranks_with_equal_thirds(m, fractions):
    schedules = [build(4, m) for build in (gpipe, interleaved, zb_h1, zb_v)]
    timelines = compare(schedules).timelines
    assert [round(t.bubble_fraction, 3) for t in timelines] == fractions


@pytest.mark.parametrize(
    ("latency", "makespans"),
    [
        (0.0, [33, 33, 33, 28.5, 28.5, 27, 27, 25.5, 25.5]),
        (0.25, [34.5, 37, 34.5, 32, 30, 30, 27.75, 28.75, 29.5]),
        (0.5, [36, 41, 36, 35.5, 31.5, 33, 28.5, 32.5, 34]),
    ],
)
def test_step_time_of_four_ranks_with_slow_transfers(latency, makespans):
    # Eager 1F1B hides the latency as gpipe does; 1F1B waits for it again and again.
    builders = [
        *(gpipe, one_f_one_b, eager_one_f_one_b, interleaved, looped_bfs),
        *(zb_h1, zb_h2, zb_v, dualpipe_v),
    ]
    timelines = compare(
        [build(4, 8) for build in builders], Costs(latency=latency)
    ).timelines
    assert [timeline.makespan for timeline in timelines] == makespans


def test_the_slowest_of_uneven_stages_rules():
    for forward in ([1, 1, 1, 1.5], [2, 1, 1, 1], [1, 0.5, 3, 0.25, 1.25], [1, 2]):
        backward = [2.5 * time for time in forward]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        slowest = both.index(max(both))
        for m in range(1, 17):
            bound = (m - 1) * max(both) + sum(both)
            costs = Costs(forward, backward)
            timeline = gpipe(len(forward), m).simulate(costs)
            assert (timeline.makespan, timeline.bottleneck) == (bound, slowest)
            # 1F1B takes as long if the last stage is the slowest; a slow one before
            # it works on while the first gradients are on their way.
            makespan = one_f_one_b(len(forward), m).simulate(costs).makespan
            assert makespan <= bound
            if slowest == len(forward) - 1:
                assert makespan == bound


def test_a_slow_first_stage_uses_the_time_in_which_1f1b_waits():
    costs = Costs([2, 1, 1, 1], [5, 2.5, 2.5, 2.5])
    assert gpipe(4, 2).simulate(costs).makespan == 24.5
    assert one_f_one_b(4, 2).simulate(costs).makespan == 22.5


def test_recomputation_costs_a_third_at_equal_thirds():
    once, twice = Costs(1, 2), Costs(1, 3)
    for build in (gpipe, one_f_one_b):
        assert build(4, 8).simulate(once).makespan == 33
        assert build(4, 8).simulate(twice).makespan == 44

"""What schedules take in time and memory: closed forms, and numbers made by hand."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpipe.schedules import (
    BY_NAME,
    Action,
    Comparison,
    Costs,
    MemoryEvent,
    Schedule,
    Skip,
    Timeline,
    compare,
    dualpipe_v,
    eager_one_f_one_b,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)

# ------------------------------------------------------------------ closed forms
#
# For p ranks, m micro-batches and rank r; F, I and W are the times of all the layers
# of a rank, and one unit of memory is what they keep of one micro-batch. All times
# are multiples of 1/16, so the sums are exact.

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


# ------------------------------------------------------------ tables of numbers


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
    names = [name for name in BY_NAME if name != "forward_only"]
    timelines = compare(
        [BY_NAME[name](4, 8) for name in names], Costs(latency=latency)
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


# ---------------------------------------------------------------------- transfers


def times_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {
        str(action): (start, timeline.end[action])
        for action, start in timeline.start.items()
    }


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_bandwidth():
    # The boundary of stage 1 has 8 bytes: 0.5 + 8 / 4 = 2.5. Its gradient has 6:
    # 0.5 + 6 / 4 = 2. The input of stage 0 travels to nobody.
    costs = Costs(
        latency=0.5, bandwidth=4.0, boundary_bytes=[100, 8], cotangent_bytes=[100, 6]
    )
    timeline = one_f_one_b(2, 2).simulate(costs)
    assert times_of(timeline) == {
        "0F0": (0.0, 1.0),
        "0F1": (1.0, 2.0),
        "1F0": (3.5, 4.5),
        "1B0": (4.5, 6.5),
        "1F1": (6.5, 7.5),
        "1B1": (7.5, 9.5),
        "0B0": (8.5, 10.5),
        "0B1": (11.5, 13.5),
    }
    assert timeline.makespan == 13.5
    assert timeline.idle == (7.5, 7.5)


def test_the_gradient_of_a_boundary_is_as_large_as_the_boundary():
    schedule = gpipe(2, 3)
    same = Costs(bandwidth=4.0, boundary_bytes=8)
    said = dataclasses.replace(same, cotangent_bytes=8)
    assert schedule.simulate(same).start == schedule.simulate(said).start
    assert schedule.simulate(same).memory == schedule.simulate(said).memory


def test_stages_of_one_rank_hand_over_for_nothing():
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0")
    slow = Costs(latency=5.0, bandwidth=1.0, boundary_bytes=7)
    assert schedule.simulate(slow).makespan == 6.0


def test_the_first_half_of_a_backward_sends_and_the_second_does_not():
    schedule = Schedule.from_text("0F0 0B0\n1F0 1I0 1W0")
    timeline = schedule.simulate(Costs(latency=2.0))
    assert timeline.start[Action("I", 1, 0)] == 4.0
    assert timeline.start[Action("W", 1, 0)] == 5.0
    assert timeline.start[Action("B", 0, 0)] == 7.0


# -------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (Costs(), [1, 2, 1, 1]),
        (Costs(3, 5), [3, 5, 2.5, 2.5]),
        (Costs(3, 5, 1), [3, 5, 1, 4]),
        (Costs(3, 5, 6), [3, 5, 6, 0]),
        (Costs(3, 5, None, 1), [3, 5, 2.5, 1]),
        (Costs(3, 5, 4, 7), [3, 5, 4, 7]),
        (Costs([0, 3], [0, 5], [0, 4], [0, 7]), [3, 5, 4, 7]),
        (Costs((0, (9, 9, 3)), 5, [0, [8, 8, 1]]), [3, 5, 1, 4]),
    ],
)
def test_the_times_that_are_not_given_follow_from_the_others(costs, expected):
    assert [costs.of(Action(op, 1, 2)) for op in "FBIW"] == expected


def test_costs_may_differ_by_stage_and_by_microbatch():
    # Stage 0 takes 1, 2 and 4 for its forwards, stage 1 always 3; their backwards 5.
    costs = Costs(forward=[[1, 2, 4], 3], backward=5)
    timeline = gpipe(2, 3).simulate(costs)
    assert times_of(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 3),
        "0F2": (3, 7),
        "1F0": (1, 4),
        "1F1": (4, 7),
        "1F2": (7, 10),
        "1B0": (10, 15),
        "1B1": (15, 20),
        "1B2": (20, 25),
        "0B0": (15, 20),
        "0B1": (20, 25),
        "0B2": (25, 30),
    }
    assert timeline.busy == (22, 24)
    assert timeline.bottleneck == 1


def test_the_costs_of_a_chunk_are_its_share_of_those_of_a_rank():
    whole = Costs(
        forward=6.0,
        backward=12.0,
        input_grad=3.0,
        latency=1.5,
        bandwidth=9.0,
        boundary_bytes=30,
        cotangent_bytes=33,
        residual_bytes=60,
        pending_bytes=90,
        parameter_bytes=120,
        accumulator_bytes=150,
        extra_bytes=36,
        shared_bytes=39,
        emitted_bytes=42,
    )
    assert whole.per_chunk(1) is whole
    assert whole.per_chunk(3) == dataclasses.replace(
        whole,
        forward=2.0,
        backward=4.0,
        input_grad=1.0,
        residual_bytes=20,
        pending_bytes=30,
        parameter_bytes=40,
        accumulator_bytes=50,
    )
    assert Costs().per_chunk(2).weight_grad is None
    assert Costs(1, 2, 1, 6).per_chunk(2).weight_grad == 3.0


@pytest.mark.parametrize(
    ("costs", "fields"),
    [
        (Costs([1.0, 2.0], (3.0, 4.0)), "forward, backward"),
        (Costs(residual_bytes=[1, 2]), "residual_bytes"),
        (Costs(boundary_bytes=[[1, 2], [3, 4]]), "boundary_bytes"),
    ],
)
def test_costs_per_stage_cannot_be_cut_into_chunks(costs, fields):
    says = f"costs per stage ({fields}) do not say what the stages of a schedule with 2"
    with pytest.raises(ValueError, match=f"^{re.escape(says)} stages per rank cost"):
        costs.per_chunk(2)
    with pytest.raises(ValueError, match="costs are for 2 stages, interleaved has 4"):
        compare([gpipe(2, 2), interleaved(2, 2)], costs)
    assert costs.per_chunk(1) is costs


def test_parameters_take_the_same_bytes_however_they_are_cut():
    costs = Costs(residual_bytes=0, parameter_bytes=12, accumulator_bytes=6)
    schedules = [gpipe(2, 4), zb_v(2, 4), looped_bfs(2, 4, 3)]
    for timeline in compare(schedules, costs).timelines:
        first = timeline.memory[:2]
        assert first == (MemoryEvent(0.0, 0, 18.0), MemoryEvent(0.0, 1, 18.0))


# ------------------------------------------------------------------------- memory
#
# Each kind of bytes has a digit of its own, so that a number says how many of each a
# rank holds; those of stage 1 count three.

DIGITS = {
    "boundary_bytes": 1,
    "cotangent_bytes": 10,
    "residual_bytes": 100,
    "pending_bytes": 1_000,
    "extra_bytes": 10_000,
    "shared_bytes": 100_000,
    "emitted_bytes": 1_000_000,
    "parameter_bytes": 10_000_000,
    "accumulator_bytes": 100_000_000,
}
EVERY_BYTE = Costs(**{name: [digit, 3 * digit] for name, digit in DIGITS.items()})


def held(timeline: Timeline, rank: int) -> list[tuple[float, str]]:
    return [
        (time, f"{size:09.0f}")
        for time, where, size in timeline.memory
        if where == rank
    ]


def test_every_byte_of_two_ranks_is_held_from_when_to_when():
    # rank 0 |F0 F1 .  B0 B0 .  .  B1 B1|
    # rank 1 |.  F0 I0 W0 F1 B1 B1 .  . |
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1I0 1W0 1F1 1B1")
    timeline = schedule.simulate(EVERY_BYTE)
    # Digits: accumulators, parameters, emitted, shared, extra, pending, residual,
    # cotangent, boundary.
    assert held(timeline, 0) == [
        (0.0, "110120002"),  # both inputs, both extras
        (1.0, "111120101"),  # 0F0: its input became a residual; it emitted
        (2.0, "112120200"),  # 0F1
        (3.0, "112120230"),  # 1I0 sent the gradient of its input
        (5.0, "112110100"),  # 0B0: residual, extra and that gradient are freed
        (7.0, "112110130"),  # 1B1 sent
        (9.0, "112000000"),  # 0B1, the last reader of what is shared
    ]
    assert held(timeline, 1) == [
        (0.0, "330360000"),
        (1.0, "330360003"),  # 0F0 sent
        (2.0, "330360006"),  # 0F1 sent
        (2.0, "333360303"),  # 1F0
        (3.0, "333333003"),  # 1I0 leaves what 1W0 needs
        (4.0, "333330003"),  # 1W0
        (5.0, "336330300"),  # 1F1
        (7.0, "336000000"),  # 1B1
    ]
    assert timeline.peak_bytes == (112120230, 336330300)
    # Of residuals and what is pending alone: two of 0F, and what 1I0 left.
    assert (timeline.peak_kept(0), timeline.peak_kept(1)) == (200, 3000)


def test_inference_keeps_no_residuals_and_has_no_sums_of_gradients():
    timeline = Schedule.from_text("0F0 0F1\n1F0 1F1").simulate(EVERY_BYTE)
    assert held(timeline, 0) == [
        (0.0, "010120002"),
        (1.0, "011110001"),  # 0F0
        (2.0, "012000000"),  # 0F1
    ]
    assert held(timeline, 1) == [
        (0.0, "030360000"),
        (1.0, "030360003"),  # 0F0 sent
        (2.0, "030360006"),  # 0F1 sent
        (2.0, "033330003"),  # 1F0
        (3.0, "036000000"),  # 1F1
    ]


def test_bytes_may_differ_by_microbatch():
    costs = Costs(residual_bytes=[[1, 20, 300]])
    timeline = gpipe(1, 3).simulate(costs)
    assert timeline.memory == (
        MemoryEvent(0.0, 0, 0),
        MemoryEvent(1.0, 0, 1),
        MemoryEvent(2.0, 0, 21),
        MemoryEvent(3.0, 0, 321),
        MemoryEvent(5.0, 0, 320),
        MemoryEvent(7.0, 0, 300),
        MemoryEvent(9.0, 0, 0),
    )


def test_ranks_of_one_device_peak_together():
    # Rank 0 begins with two inputs of 10 bytes and ends with none; rank 1 begins with
    # nothing and is left with two outputs of 3 bytes.
    costs = Costs(boundary_bytes=[10, 0], emitted_bytes=[0, 3])
    timeline = forward_only(2, 2).simulate(costs)
    assert timeline.peak_bytes == (20, 6)
    assert timeline.peak_of([0, 1]) == timeline.peak_of([1, 0]) == 20
    assert timeline.peak_of([1]) == 6
    assert timeline.peak_of([]) == 0
    # Here both peaks are at time 2, when both forwards of rank 0 have run.
    timeline = one_f_one_b(2, 2).simulate(Costs(residual_bytes=[1, 5]))
    assert timeline.peak_bytes == (2, 5)
    assert timeline.peak_of([0, 1]) == 7


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_what_all_ranks_hold_together_is_between_the_largest_and_the_sum(data):
    schedule, costs = data.draw(predictions())
    peaks = schedule.simulate(costs).peak_bytes
    together = schedule.simulate(costs).peak_of(range(schedule.num_ranks))
    assert max(peaks) <= together <= sum(peaks) + 1e-9


# ------------------------------------------------------ what a timeline is asked for

# Multiples of 1/4: their sums are exact. Some actions take no time at all.
any_time = st.integers(0, 8).map(lambda quarters: quarters / 4)


@st.composite
def predictions(draw):
    """A schedule of the catalogue, and times for each op of each of its stages."""
    name = draw(st.sampled_from(sorted(BY_NAME)))
    p = draw(st.integers(1, 4))
    fewest = 2 * p if name == "dualpipe_v" else 1
    schedule = BY_NAME[name](p, draw(st.integers(fewest, fewest + 4)))
    stages = schedule.num_stages
    per_stage = st.lists(any_time, min_size=stages, max_size=stages)
    forward, backward, half, rest = (draw(per_stage) for _ in range(4))
    return schedule, Costs(forward, backward, half, rest, latency=draw(any_time))


@settings(deadline=None)
@given(predictions())
def test_the_order_is_by_end_and_respects_every_dependency(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    order = timeline.order()
    assert sorted(order) == sorted(timeline.end)
    ends = [timeline.end[action] for action in order]
    assert ends == sorted(ends)
    place = {action: i for i, action in enumerate(order)}
    needs = timeline.needs()
    for row in schedule.rows:
        # What takes no time holds nobody up, and may come later than its neighbours.
        busy = [action for action in row if costs.of(action)]
        assert sorted(busy, key=place.__getitem__) == busy
        for action in row:
            assert all(place[need] < place[action] for need in needs(action))


@settings(deadline=None)
@given(predictions())
def test_the_critical_path_is_a_chain_whose_times_add_up_to_the_makespan(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    path, needs = timeline.critical_path, timeline.needs()
    # Of the same rank, and earlier: what is between takes no time.
    earlier = {p for row in schedule.rows for p in itertools.combinations(row, 2)}
    total = sum(costs.of(action) for action in path)
    for before, after in itertools.pairwise(path):
        reads = before in needs(after)
        assert reads or (before, after) in earlier
        ranks = {schedule.placement[action.stage] for action in (before, after)}
        if len(ranks) == 2:
            assert reads
            total += costs.latency
    assert total == timeline.makespan
    assert timeline.start[path[0]] == 0.0


def test_the_critical_path_of_a_slow_stage_goes_through_all_its_work():
    # 0F0, then stage 1 without a pause, then 0B2; the transfers belong to it.
    timeline = gpipe(2, 3).simulate(Costs([1, 5], [2, 10], latency=0.5))
    assert list(map(str, timeline.critical_path)) == (
        ["0F0", "1F0", "1F1", "1F2", "1B0", "1B1", "1B2", "0B2"]
    )
    assert timeline.makespan == 1 + 0.5 + 3 * 15 + 0.5 + 2


@settings(deadline=None)
@given(predictions())
def test_median_costs_of_a_prediction_are_what_it_was_made_of(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    medians = timeline.median_costs()
    ran = {(action.op, action.stage) for action in timeline.end}
    fields = {
        "F": "forward",
        "B": "backward",
        "I": "input_grad",
        "W": "weight_grad",
    }
    for op, field in fields.items():
        given_ = getattr(costs, field)
        stages = [stage for stage in range(schedule.num_stages) if (op, stage) in ran]
        if not stages:
            assert getattr(medians, field) == given_
        else:
            assert [getattr(medians, field)[s] for s in stages] == [
                given_[s] for s in stages
            ]
    assert schedule.simulate(medians).start == timeline.start
    assert schedule.simulate(medians).memory == timeline.memory


def test_the_median_ignores_a_micro_batch_that_was_slow():
    # As the first one is that has to be compiled.
    slow = Costs(forward=[[90, 1, 2], [3, 3, 70]], backward=4, parameter_bytes=7)
    timeline = gpipe(2, 3).simulate(slow)
    medians = timeline.median_costs()
    assert (medians.forward, medians.backward) == ([2, 3], [4, 4])
    assert (medians.input_grad, medians.parameter_bytes) == (None, 7)
    other = timeline.median_costs(Costs(latency=3.0))
    assert (other.forward, other.latency, other.parameter_bytes) == ([2, 3], 3.0, 0)


def test_a_measured_timeline_counts_from_its_first_start():
    # 0F0 from 100 to 101, 1F0 from 101 to 104: rank 0 waits 3 of 4, rank 1 1 of 4.
    first, second = Action("F", 0, 0), Action("F", 1, 0)
    timeline = Timeline(
        "measured",
        (0, 1),
        ((first,), (second,)),
        {first: 100.0, second: 101.0},
        {first: 101.0, second: 104.0},
    )
    assert timeline.makespan == 4.0
    assert timeline.idle == (3.0, 1.0)
    assert timeline.bubble_fraction == 0.5
    assert timeline.bottleneck == 1
    assert timeline.critical_path == (first, second)
    assert timeline.median_costs().forward == [1.0, 3.0]
    assert timeline.peak_bytes == (0.0, 0.0)


def test_the_bottleneck_is_the_rank_with_most_to_do_not_the_one_that_ends_last():
    timeline = one_f_one_b(3, 4).simulate(Costs([1, 1, 4], [1, 1, 4]))
    assert timeline.bottleneck == 2
    assert max(timeline.rows, key=lambda row: timeline.end[row[-1]])[0].stage == 0


# --------------------------------------------------------------------- comparison


def test_a_comparison_prints_as_a_table():
    schedules = [
        gpipe(4, 8),
        one_f_one_b(4, 8),
        interleaved(4, 8),
        zb_h1(4, 8),
        zb_v(4, 8),
        dualpipe_v(4, 8),
    ]
    comparison = compare(schedules, Costs(latency=0.25, parameter_bytes=1000))
    assert isinstance(comparison, Comparison)
    assert (
        str(comparison)
        == """\
| schedule    | stages | time  | bubble | peak bytes per rank    |
| ----------- | ------ | ----- | ------ | ---------------------- |
| gpipe       | 4      | 34.5  | 30.4 % | 1008, 1008, 1008, 1008 |
| 1f1b        | 4      | 37    | 35.1 % | 1004, 1003, 1002, 1001 |
| interleaved | 8      | 32    | 25.0 % | 1006, 1004, 1004, 1002 |
| zb_h1       | 4      | 30    | 20.0 % | 1004, 1004, 1004, 1004 |
| zb_v        | 8      | 28.75 | 16.5 % | 1004, 1004, 1004, 1004 |
| dualpipe_v  | 8      | 29.5  | 18.6 % | 1004, 1004, 1004, 1004 |"""
    )


def test_a_comparison_takes_costs_per_stage_for_one_stage_per_rank():
    costs = Costs([1, 1, 1, 1.5], [2, 2, 2, 3])
    timelines = compare(iter([gpipe(4, 8), one_f_one_b(4, 8)]), costs).timelines
    assert [timeline.makespan for timeline in timelines] == [45.0, 45.0]
    assert [timeline.name for timeline in timelines] == ["gpipe", "1f1b"]


def test_costs_per_stage_compare_schedules_of_that_many_stages():
    costs = Costs(forward=[1.0] * 8, backward=[2.0] * 7 + [3.0])
    both = [BY_NAME["interleaved"](4, 8), BY_NAME["zb_v"](4, 8)]
    compared = compare(both, costs).timelines
    assert compared == tuple(schedule.simulate(costs) for schedule in both)
    with pytest.raises(
        ValueError, match="costs are for 8 stages, gpipe has 4; give one"
    ):
        compare([*both, BY_NAME["gpipe"](4, 8)], costs)
    uneven = Costs(forward=[1.0] * 8, backward=[2.0] * 4)
    with pytest.raises(ValueError, match="forward: 8, backward: 4"):
        compare(both, uneven)


def test_a_forward_that_takes_no_time_does_not_hold_up_its_rank():
    # Where the stage with the loss runs F and B as one program, its F takes no time,
    # and under GPipe its first B need not wait until all inputs are there.
    costs = Costs(forward=[1.0, 0.0], backward=[2.0, 3.0])
    timeline = gpipe(2, 3).simulate(costs)
    assert timeline.start[Action("B", 1, 0)] == 1.0
    assert timeline.makespan == 1.0 + 3 * 3.0 + 2.0
    path = timeline.critical_path
    assert sum(costs.of(action) for action in path) == timeline.makespan


class TestSkipTransfers:
    """A skip connection moves bytes from rank to rank, past those between."""

    def costs(self, size, **options):
        skip = Skip(0, 2, size, options.pop("back", size))
        return Costs(forward=1.0, backward=1.0, skips=(skip,), **options)

    def test_a_forward_waits_for_its_skip(self):
        # F0 ends at 1; its skip takes 10; the neighbour's result is there at 2.
        timeline = gpipe(3, 1).simulate(self.costs(10, back=0, bandwidth=1.0))
        assert timeline.start[Action("F", 2, 0)] == 11
        assert timeline.makespan == 11 + 1 + 3

    def test_a_backward_waits_for_the_gradient_of_its_skip(self):
        costs = dataclasses.replace(self.costs(0, back=10), bandwidth=1.0)
        timeline = gpipe(3, 1).simulate(costs)
        # B of the last stage ends at 4; its gradient reaches the first at 14.
        assert timeline.end[Action("B", 2, 0)] == 4
        assert timeline.start[Action("B", 0, 0)] == 14
        assert timeline.critical_path[-2:] == (Action("B", 2, 0), Action("B", 0, 0))

    def test_split_backwards_send_it_with_the_first_half(self):
        costs = dataclasses.replace(self.costs(0, back=10), bandwidth=1.0)
        timeline = zb_h1(3, 3).simulate(costs)
        assert timeline.start[Action("I", 0, 0)] >= timeline.end[Action("I", 2, 0)] + 10

    def test_latency_counts_and_nothing_moves_within_a_rank(self):
        far = gpipe(3, 1).simulate(self.costs(1, latency=3.0))
        assert far.start[Action("F", 2, 0)] == 1 + 3 + 1 + 3
        near = zb_v(1, 1).simulate(
            Costs(forward=1.0, backward=1.0, skips=(Skip(0, 1, 99, 99),), bandwidth=1.0)
        )
        free = zb_v(1, 1).simulate(Costs(forward=1.0, backward=1.0))
        assert near.makespan == free.makespan

"""The time that no schedule beats: never above any order; known where it is met."""

import re

import pytest
from hypothesis import given, settings

from jpipe.schedules import (
    Action,
    Costs,
    ScheduleError,
    Skip,
    Timeline,
    forward_only,
    gpipe,
    lower_bound,
    one_f_one_b,
    zb_h2,
    zb_v,
)

from .predictions import predictions


@settings(max_examples=60, deadline=None)
@given(predictions())
def test_no_schedule_of_the_catalogue_beats_the_bound(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    assert timeline.lower_bound <= timeline.makespan
    sizes = schedule.num_ranks, schedule.num_microbatches
    if not schedule.forward_only:
        assert lower_bound(costs, *sizes, schedule.placement) == timeline.lower_bound
    forwards = schedule.forwards().simulate(costs)
    assert forwards.lower_bound <= forwards.makespan
    assert timeline.gap == pytest.approx(
        max(timeline.makespan / (timeline.lower_bound or 1) - 1, 0)
        * bool(timeline.lower_bound)
    )


def test_the_bound_is_the_busiest_rank_with_what_must_come_before_and_after():
    # Rank 1: nothing before 1 + 0.5; then 3 F, 3 I and 3 W; what follows the last I,
    # 0.5 and the 1 + 1 of stage 0, is less than the W that can wait.
    costs = Costs([1, 4], [2, 6], latency=0.5)
    assert lower_bound(costs, 2, 3) == 1.5 + 3 * 10
    # One micro-batch: the longest chain, at its end the second half on rank 0.
    costs = Costs([1, 4], [2, 4], latency=0.5)
    assert lower_bound(costs, 2, 1) == 1 + 0.5 + 4 + 2 + 0.5 + 1 + 1
    # Whole backwards are cheaper here, and halves there.
    assert lower_bound(Costs([1], [2], [2], [2]), 1, 4) == 12
    assert lower_bound(Costs([1], [5], [2], [2]), 1, 4) == 20


def test_schedules_that_are_known_to_be_the_best_reach_the_bound():
    for p in range(1, 6):
        m = 2 * p
        assert zb_h2(p, m).simulate().gap == 0
        assert zb_v(p, m).simulate().gap == 0
        assert forward_only(p, m).simulate().gap == 0
        assert lower_bound(Costs(), p, m) == (p - 1) + 3 * m


def test_without_a_placement_the_bound_is_the_least_of_those_that_fit_tries():
    costs = Costs([1, 2, 3, 1], latency=1.0)
    in_a_v = lower_bound(costs, 2, 4, (0, 1, 1, 0))
    in_a_loop = lower_bound(costs, 2, 4, (0, 1, 0, 1))
    assert lower_bound(costs, 2, 4) == min(in_a_v, in_a_loop)


def test_a_skip_connection_does_not_raise_the_bound_above_the_time():
    costs = Costs([1, 1, 1], latency=1.0, bandwidth=1.0, skips=(Skip(0, 2, 9, 9),))
    timeline = one_f_one_b(3, 4).simulate(costs)
    assert timeline.lower_bound <= timeline.makespan


def test_a_timeline_prints_its_time_its_gap_its_bubble_and_its_peaks():
    assert str(gpipe(2, 2).simulate()) == (
        "gpipe: time 9 (28.6 % above the bound), bubble 33.3 %, "
        "peak bytes per rank 2, 2"
    )
    first = Action("F", 0, 0)
    measured = Timeline("measured", (0,), ((first,),), {first: 1.0}, {first: 3.5})
    assert str(measured) == "measured: time 2.5 s, bubble 0.0 %"
    costs = Costs(1e-3, 2e-3, residual_bytes=3000, in_seconds=True)
    assert str(gpipe(2, 2).simulate(costs)) == (
        "gpipe: time 9 ms (28.6 % above the bound), bubble 33.3 %, "
        "peak bytes per rank 5.9 KiB, 5.9 KiB"
    )
    with pytest.raises(ValueError, match=r"^measured was measured: schedule\.simulate"):
        _ = measured.lower_bound


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            (Costs(), 0, 0),
            "num_ranks=0, num_microbatches=0: must be ints of at least 1",
        ),
        (
            (Costs([1, 2, 3]), 2, 4),
            "costs are for 3 stages, num_ranks=2: give costs for 2 stages, or for a "
            "multiple of it",
        ),
        (
            (Costs([1, -2], [float("nan"), 1], latency=-1, bandwidth=0), 2, 4),
            "costs cannot be used:\n"
            "  * forward[1]=-2 is not 0 or more and finite\n"
            "  * backward[0]=nan is not 0 or more and finite\n"
            "  * latency=-1 is not 0 or more and finite\n"
            "  * bandwidth=0 moves nothing",
        ),
        (
            (Costs([1, 1]), 2, 3, (0, 2)),
            "placement=(0, 2) is not a rank below 2 for each stage",
        ),
    ],
)
def test_what_has_no_bound_is_refused(arguments, says):
    with pytest.raises(ScheduleError, match=f"^lower_bound: {re.escape(says)}$"):
        lower_bound(*arguments)

"""The time that no schedule beats: never above any order; known where it is met."""

import pytest
from hypothesis import given

from jpipe.schedules import Costs, forward_only, gpipe, zb_h2, zb_v

from .predictions import predictions


@given(predictions())
def test_no_schedule_of_the_catalogue_beats_the_bound(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    assert timeline.lower_bound <= timeline.makespan
    forwards = schedule.forwards().simulate(costs)
    assert forwards.lower_bound <= forwards.makespan
    assert timeline.gap == pytest.approx(
        max(timeline.makespan / (timeline.lower_bound or 1) - 1, 0)
        * bool(timeline.lower_bound)
    )


def bound(costs: Costs, num_ranks: int, num_microbatches: int) -> float:
    return gpipe(num_ranks, num_microbatches).simulate(costs).lower_bound


def test_the_bound_is_the_busiest_rank_with_what_must_come_before_and_after():
    # Rank 1: nothing before 1 + 0.5; then 3 F, 3 I and 3 W; what follows the last I,
    # 0.5 and the 1 + 1 of stage 0, is less than the W that can wait.
    costs = Costs([1, 4], [2, 6], latency=0.5)
    assert bound(costs, 2, 3) == 1.5 + 3 * 10
    # One micro-batch: the longest chain, at its end the second half on rank 0.
    costs = Costs([1, 4], [2, 4], latency=0.5)
    assert bound(costs, 2, 1) == 1 + 0.5 + 4 + 2 + 0.5 + 1 + 1
    # Whole backwards are cheaper here, and halves there.
    assert bound(Costs([1], [2], [2], [2]), 1, 4) == 12
    assert bound(Costs([1], [5], [2], [2]), 1, 4) == 20


def test_schedules_that_are_known_to_be_the_best_reach_the_bound():
    for p in range(1, 6):
        m = 2 * p
        assert zb_h2(p, m).simulate().gap == 0
        assert zb_v(p, m).simulate().gap == 0
        assert forward_only(p, m).simulate().gap == 0
        assert bound(Costs(), p, m) == (p - 1) + 3 * m

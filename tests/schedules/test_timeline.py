"""Timelines: when actions start, their costs, those that were measured."""

import itertools

from hypothesis import given

from jpipe.schedules import Action, Schedule, Timeline

from .predictions import predictions


@given(predictions())
def test_actions_start_after_those_they_need_and_those_before_in_their_row(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    start, end = timeline.start, timeline.end
    assert sorted(action for row in schedule.rows for action in row) == sorted(end)
    for row in schedule.rows:
        # What takes no time holds nobody up, and may come later than its neighbours.
        busy = [action for action in row if costs.of(action)]
        assert all(end[a] <= start[b] for a, b in itertools.pairwise(busy))
        for action in row:
            assert all(end[need] <= start[action] for need in timeline.needs(action))


@given(predictions())
def test_median_costs_of_a_prediction_are_what_it_was_made_of(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    again = schedule.simulate(timeline.median_costs())
    assert (again.start, again.end) == (timeline.start, timeline.end)
    assert again.memory == timeline.memory


def test_a_measured_timeline_counts_from_its_first_start():
    # 0F0 from 100 to 101, 1F0 from 101 to 104: rank 0 waits 3 of 4, rank 1 1 of 4.
    first, second = Action("F", 0, 0), Action("F", 1, 0)
    timeline = Timeline(
        Schedule.from_text("0F0\n1F0"),
        {first: 100.0, second: 101.0},
        {first: 101.0, second: 104.0},
    )
    assert timeline.makespan == 4.0
    assert timeline.idle == (3.0, 1.0)
    assert timeline.bubble_fraction == 0.5
    assert timeline.bottleneck == 1
    assert timeline.median_costs().forward == [1.0, 3.0]
    assert timeline.peak_bytes == (0.0, 0.0)

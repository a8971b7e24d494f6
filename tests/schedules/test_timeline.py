"""Timelines: their order, their costs, those that were measured."""

from hypothesis import given

from jpipe.schedules import Action, Timeline

from .predictions import predictions


@given(predictions())
def test_the_order_is_by_end_and_respects_every_dependency(prediction):
    schedule, costs = prediction
    timeline = schedule.simulate(costs)
    order = timeline.order()
    assert sorted(order) == sorted(timeline.end)
    ends = [timeline.end[action] for action in order]
    assert ends == sorted(ends)
    place = {action: i for i, action in enumerate(order)}
    needs = timeline.needs
    for row in schedule.rows:
        # What takes no time holds nobody up, and may come later than its neighbours.
        busy = [action for action in row if costs.of(action)]
        assert sorted(busy, key=place.__getitem__) == busy
        for action in row:
            assert all(place[need] < place[action] for need in needs(action))


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
    assert timeline.median_costs().forward == [1.0, 3.0]
    assert timeline.peak_bytes == (0.0, 0.0)

"""Orders at random: the validator, the simulator and graph theory agree."""

import itertools
import random
from graphlib import CycleError, TopologicalSorter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpipe.schedules import Action, Costs, Schedule, ScheduleError

from .orders import any_rows, by_hand, halves, reads, refusal_of, sums


@st.composite
def any_orders(draw):
    """Complete schedules of up to two stages per rank; most of them can run."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    num_ranks, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=num_ranks))
    placement = tuple(draw(st.permutations([*range(num_ranks), *more])))
    rows = any_rows(chance, placement, m)
    for row in rows:
        if chance.randrange(4) == 0:
            i, j = chance.choices(range(len(row)), k=2)
            row[i], row[j] = row[j], row[i]
    return Schedule("any", len(placement), m, placement, tuple(map(tuple, rows)))


COST = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}


def starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The start of each action: the longest path to it in the graph of what it needs.

    Raises:
      CycleError: if there is no order.
    """
    split, rank = halves(schedule), schedule.placement
    # What each action comes after, and how long after its end.
    needs = {
        action: {
            read: costs.latency * (rank[read.stage] != rank[action.stage])
            for read in reads(action, schedule.num_stages, split)
        }
        for row in schedule.rows
        for action in row
    }
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            needs[later].setdefault(earlier, 0.0)
    start: dict[Action, float] = {}
    for action in TopologicalSorter(needs).static_order():
        arrivals = [
            start[need] + getattr(costs, COST[need.op]) + delay
            for need, delay in needs[action].items()
        ]
        start[action] = max(arrivals, default=0.0)
    return start


ANY_COSTS = [
    Costs(1.0, 2.0, 1.0, 1.0),
    Costs(1.0, 1.0, 0.25, 0.75, latency=0.5),
    Costs(3.0, 0.5, 0.5, 0.0, latency=2.0),
]


@given(any_orders(), st.sampled_from(ANY_COSTS))
def test_validator_and_simulator_agree_with_graph_theory(schedule, costs):
    # Neither a schedule that can run is refused, nor one accepted that cannot.
    orders = [list(sums(row, schedule.num_stages)) for row in schedule.rows]
    losses = [order for in_row in orders for order in in_row[::2]]
    gradients = [order for in_row in orders for order in in_row[1::2]]
    ascending = all(order == sorted(order) for order in losses) and any(
        all(order == sorted(order, reverse=descends) for order in gradients)
        for descends in (False, True)
    )
    try:
        start = starts(schedule, costs)
    except CycleError:
        start = None
    if start is None or not ascending:
        faults = refusal_of(schedule)
        assert ("E7" in faults) == ("E6" not in faults)
    else:
        assert schedule.validate() is schedule
        timeline = schedule.simulate(costs)
        assert timeline.start == start
        assert timeline.lower_bound <= timeline.makespan
        assert Schedule.from_text(schedule.to_text(), "any") == schedule
    if start is None:
        with pytest.raises(ScheduleError, match="the schedule deadlocks: rank"):
            schedule.simulate()


def test_simulate_names_an_action_that_no_rank_runs():
    # `validate` finds it before; a schedule made by hand may not have been asked.
    with pytest.raises(ScheduleError, match="0B0 waits for 1B0, which nobody runs"):
        by_hand("0F0 0B0\n1F0", 1).simulate()

"""Stages with several ranks that take turns: orders, rules, times, memory."""

import dataclasses
import math
import pickle
import random
import re

import numpy as np
import pytest

from jpipe.schedules import Action, Costs, Exchange, Schedule, ScheduleError, replicated


def costs_of(times):
    return Costs(forward=list(times), backward=[float(time) for time in times])


def between(timeline, replicas):
    """The time from one micro-batch to the next, in the middle of a step."""
    count = max(a.microbatch for a in timeline.start) + 1
    turn = math.lcm(*replicas)
    first, last = count // 3, count // 3 + count // 3 // turn * turn
    ends = [timeline.end[Action("B", 0, i)] for i in (first, last)]
    return (ends[1] - ends[0]) / (last - first)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_but_the_slowest_stage_counts_in_the_steady_state(seed):
    rng = random.Random(seed)
    replicas = [rng.randint(1, 4) for _ in range(rng.randint(1, 5))]
    forward = [rng.random() for _ in replicas]
    backward = [3 * rng.random() for _ in replicas]
    slowest = max(
        (f + b) / r for f, b, r in zip(forward, backward, replicas, strict=True)
    )
    timeline = (
        replicated(replicas, 240, eager=rng.random() < 0.5)
        .validate()
        .simulate(Costs(forward=forward, backward=backward))
    )
    assert between(timeline, replicas) == pytest.approx(slowest, rel=1e-9)
    assert timeline.lower_bound <= timeline.makespan * (1 + 1e-12)


def test_peaks_are_the_micro_batches_in_flight_of_pipedream():
    def peaks(replicas):
        timeline = replicated(replicas, 100).simulate()
        ends = [sum(replicas[:s]) for s in range(len(replicas))]
        return [timeline.peak_bytes[end] for end in ends]

    for replicas in ([3, 2, 2, 1], [7, 1], [2, 2, 2, 2], [1, 1, 1], [2, 1, 1]):
        total = sum(replicas)
        assert peaks(replicas) == [
            (total - 1 - sum(replicas[:s])) // r + 1 for s, r in enumerate(replicas)
        ]
    # Four after three: with two in warm-up on each of the three, all would wait.
    assert peaks([3, 4, 1]) == [4, 2, 1]
    enough = replicated([3, 4, 1], 240).simulate(costs_of([3, 4, 1]))
    assert between(enough, [3, 4, 1]) == pytest.approx(2.0)


def test_the_exchange_of_gradients_is_at_the_end_or_hidden():
    schedule, costs = replicated([2, 2], 4), costs_of([1, 1])
    plain = schedule.simulate(costs)
    ends = [max(plain.end[Action("B", s, i)] for i in range(4)) for s in (0, 1)]
    assert ends == [6.0, 5.0]
    shown = schedule.simulate(dataclasses.replace(costs, exchange=[0.0, 3.0]))
    assert shown.exchanges == (Exchange(1, (2, 3), 5.0, 8.0),)
    assert shown.makespan == 8.0
    hidden = schedule.simulate(dataclasses.replace(costs, exchange=[0.0, 1.0]))
    assert hidden.makespan == plain.makespan == 6.0
    assert hidden.start == plain.start
    forwards = schedule.forwards().simulate(dataclasses.replace(costs, exchange=3.0))
    assert forwards.exchanges == ()


def test_numbers_of_ranks_may_be_an_array():
    assert replicated(np.array([2, 1]), 4) == replicated([2, 1], 4)


def test_json_and_text_keep_who_shares_a_stage():
    schedule = replicated([3, 1, 2], 7)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_text(schedule.to_text(), schedule.name) == schedule
    # Two pipelines in opposite directions, as in Chimera, and inference.
    text = "0F0 1F1 1B1 0B0\n1F0 0F1 1B0 0B1"
    assert Schedule.from_text(text).replicas == ((0, 1), (0, 1))
    assert Schedule.from_text(text).forwards().replicas == ((0, 1), (0, 1))
    forwards = Schedule.from_text("0F0 1F1\n1F0 0F1")
    assert (forwards.placement, forwards.replicas) == ((0, 0), ((0, 1), (0, 1)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # A rank that runs no forward of a stage does not share it.
        ("0F0 0F1 0B0 1B1 0B1\n1F0 1B0 1F1", "E4 1B1: stage 1 is placed on rank 1"),
        ("0F0 0B0\n1I0 1W0", "E5 stage 1 runs I W on micro-batch 0, needs F B or"),
        # These do, and each runs the backwards of its forwards.
        ("0F0 0B1\n0F1 0B0", "E8 0B1: its forward runs on rank 1 (rank 0, position 1)"),
    ],
)
def test_a_text_in_which_a_backward_is_not_with_its_forward_is_refused(text, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        Schedule.from_text(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"replicas": ((1, 0), (2,))},
            "E4 replicas[0]=(1, 0): needs different ranks, placement[0]=0 first",
        ),
        ({"replicas": ((0,), (2,))}, "E4 0F1: stage 0 is placed on rank 0"),
    ],
)
def test_ranks_that_share_a_stage_are_validated(change, says):
    schedule = dataclasses.replace(replicated([2, 1], 2), **change)
    with pytest.raises(ScheduleError) as refusal:
        schedule.validate()
    assert says in str(refusal.value)


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1]])
def test_schedule_in_use_is_pickled(replicas):
    schedule = replicated(replicas, 4)
    schedule.simulate()
    assert list(schedule.rank_of[3]) == [replicas[0] - 1, replicas[0]]
    assert pickle.loads(pickle.dumps(schedule)) == schedule

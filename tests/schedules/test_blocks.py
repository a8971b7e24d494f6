"""Schedules in a V that repeat one block: what they hold, how long they idle."""

import math
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jpipe.schedules import Costs, Schedule, ScheduleError, build_v

BLOCKS = {
    # What a rank holds, in micro-batches of both its stages; the most that it idles
    # in slots, of which a micro-batch has six.
    "v_min": (lambda p: math.ceil((p + 2) / 3), lambda p: 4 * p - (5 if p % 3 else 3)),
    "v_half": (lambda p: p // 2 + 1, lambda p: 7 * p // 2 - (2 if p % 2 == 0 else 3)),
    "zb_v": (lambda p: p, lambda p: p - 1),
    "1f1b_v": (lambda p: 2 * p // 3 + 1, lambda p: 6 * (p - 1) + (2 if p > 2 else 0)),
}
every_block = pytest.mark.parametrize("block", BLOCKS)


def held(schedule: Schedule) -> list[int]:
    """The most stages of micro-batches that each rank has begun and not ended."""
    found = []
    for row in schedule.rows:
        now = [0]
        for action in row:
            now.append(now[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[action.op])
        found.append(max(now))
    return found


@every_block
def test_a_block_of_the_literature_holds_and_idles_what_its_table_says(block):
    peak, idle = BLOCKS[block]
    for p in (1, 2, 3, 6, 8):
        for m in {1, 2, p, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p}:
            schedule = build_v(p, m, block=block).validate()
            assert (schedule.name, schedule.num_stages) == (block, 2 * p)
            assert schedule.placement == (*range(p), *reversed(range(p)))
            timeline = schedule.simulate()
            assert max(held(schedule)) == max(timeline.peak_bytes)
            assert max(held(schedule)) <= 2 * min(m, peak(p))
            if m >= 2 * p:
                assert max(held(schedule)) == 2 * peak(p)
            # Few micro-batches cannot fill a steady phase.
            longest = idle(p) if m >= 2 * p - 1 else max(idle(p), 6 * p - 6)
            assert max(timeline.idle) <= max(longest, 0)
            assert len(set(timeline.idle)) == 1


def test_more_in_flight_is_used_and_never_exceeded():
    costs = Costs(latency=1.0)
    times = []
    for most in (6, 8, 12, 16):
        schedule = build_v(4, 16, block="v_half", costs=costs, max_in_flight=most)
        assert max(held(schedule.validate())) <= most
        times.append(schedule.simulate(costs).makespan)
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


@st.composite
def blocks(draw):
    """Slots of one's own: along the V, each as soon as its rank is free, or later."""
    p = draw(st.integers(1, 5))
    starts: list[list[int]] = [[] for _ in range(p)]
    now = draw(st.integers(0, 3))
    for at in range(4):
        for rank in range(p) if at % 2 == 0 else reversed(range(p)):
            now += 1 + draw(st.integers(0, 2))
            while now % 6 in {slot % 6 for slot in starts[rank]}:
                now += 1
            starts[rank].append(now)
    return starts


@given(blocks(), st.integers(1, 9))
def test_any_block_that_can_be_repeated_makes_a_valid_schedule(starts, m):
    schedule = build_v(len(starts), m, block=starts).validate()
    assert (schedule.name, schedule.num_microbatches) == ("v", m)
    # No more than the slots from the first forward to the last second half allow.
    for rank, (first, second, after, last) in enumerate(starts):
        life = (last + 12 - first) + (after + 12 - second)
        assert held(schedule)[rank] <= max(held(schedule)) <= 2 * m
        assert held(build_v(len(starts), m, block=starts))[rank] <= life // 6 + 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block": "v_third"}, "unknown block 'v_third': choose 'v_min', 'v_half', "),
        (
            {"block": [(0, 3, 4, 5), (2, 1, 5, 6)]},
            "v: its block cannot be repeated: the schedule deadlocks: rank ",
        ),
        (
            {"max_in_flight": 3},
            "v_half: max_in_flight=3: its block holds 4 stages of micro-batches on "
            "rank 0; give at least that, or another block",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, says):
    with pytest.raises(ScheduleError, match=f"^{re.escape(says)}"):
        build_v(2, 4, **arguments)

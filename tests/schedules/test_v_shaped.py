"""Schedules in a V that repeat one block: what they hold, how long they idle."""

import math

import pytest

from jpipe.schedules import BY_NAME, Schedule

BLOCKS = {
    # What a rank holds, in micro-batches of both its stages; the most that it idles
    # in slots, of which a micro-batch has six.
    "v_min": (lambda p: math.ceil((p + 2) / 3), lambda p: 4 * p - (5 if p % 3 else 3)),
    "v_half": (lambda p: p // 2 + 1, lambda p: 7 * p // 2 - (2 if p % 2 == 0 else 3)),
    "1f1b_v": (lambda p: 2 * p // 3 + 1, lambda p: 6 * (p - 1) + (2 if p > 2 else 0)),
}


def held(schedule: Schedule) -> list[int]:
    """The most stages of micro-batches that each rank has begun and not ended."""
    peaks = []
    for row in schedule.rows:
        counts = [0]
        for action in row:
            counts.append(counts[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[action.op])
        peaks.append(max(counts))
    return peaks


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_literature_holds_and_idles_what_its_table_says(block):
    peak, idle = BLOCKS[block]
    for p in (1, 2, 3, 6, 8):
        for m in {1, 2, p, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p}:
            schedule = BY_NAME[block](p, m).validate()
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


def test_zb_v_takes_less_time_than_v_half_or_as_much_in_no_more_memory():
    for p in range(1, 8):
        for m in range(1, 2 * p + 2):
            fast = BY_NAME["zb_v"](p, m).validate().simulate()
            small = BY_NAME["v_half"](p, m).simulate()
            assert fast.makespan <= small.makespan
            if fast.makespan == small.makespan:
                assert max(fast.peak_bytes) <= max(small.peak_bytes)
            assert max(fast.peak_bytes) <= 2 * min(p, m)
    few = BY_NAME["zb_v"](4, 4).simulate()
    assert (few.makespan, max(few.peak_bytes)) == (27.0, 8.0)

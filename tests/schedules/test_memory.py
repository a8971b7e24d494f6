"""Bytes that ranks hold, from when to when: made by hand."""

import dataclasses

import hypothesis.strategies as st
from hypothesis import given

from jpipe.schedules import Costs, Schedule, Timeline

from .predictions import predictions

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
        (1.0, "111120104"),  # 0F0: its input became a residual; it emitted
        (1.0, "111120101"),  # it has sent
        (2.0, "112120203"),  # 0F1
        (2.0, "112120200"),
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
        (3.0, "333333033"),  # 1I0 leaves what 1W0 needs
        (3.0, "333333003"),  # it has sent
        (4.0, "333330003"),  # 1W0
        (5.0, "336330300"),  # 1F1
        (7.0, "336000030"),  # 1B1
        (7.0, "336000000"),
    ]
    assert timeline.peak_bytes == (112120230, 336330300)


@given(st.data())
def test_peaks_are_those_of_one_order_whatever_times_are(data):
    schedule, costs = data.draw(predictions())
    sizes = {name: 1 + number for number, name in enumerate(DIGITS)}
    timeline = schedule.simulate(dataclasses.replace(costs, **sizes))
    assert timeline.peak_bytes == schedule.simulate(Costs(**sizes)).peak_bytes

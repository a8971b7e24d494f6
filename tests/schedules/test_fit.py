"""Schedules made to measure: valid, under their cap, never behind the catalogue."""

import dataclasses
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jpipe.schedules import (
    BY_NAME,
    Costs,
    Schedule,
    ScheduleError,
    Skip,
    fit,
    interleaved,
)

from .predictions import any_time

any_bytes = st.integers(0, 9)
BYTES = [field.name for field in dataclasses.fields(Costs) if "_bytes" in field.name]


@st.composite
def any_costs(draw, stages: int) -> Costs:
    """Times and bytes of each stage; of some fields one number for all."""

    def per_stage(of):
        return draw(st.lists(of, min_size=stages, max_size=stages))

    times = [per_stage(any_time) for _ in range(2)]
    halves = [per_stage(any_time) if draw(st.booleans()) else None for _ in range(2)]
    sizes = {name: per_stage(any_bytes) for name in BYTES if draw(st.booleans())}
    skips = ()
    if stages > 2 and draw(st.booleans()):
        skips = (Skip(0, stages - 1, draw(any_bytes), draw(any_bytes)),)
    exchange = per_stage(any_time) if draw(st.booleans()) else 0.0
    fields = {**sizes, "skips": skips, "exchange": exchange}
    return Costs(*times, *halves, draw(any_time), 4.0, **fields)


def catalogue(p: int, m: int, stages: int) -> list[Schedule]:
    """All schedules of this number of stages that train."""
    schedules = []
    for build in BY_NAME.values():
        try:
            schedule = build(p, m)
        except ScheduleError:
            continue  # too few micro-batches
        if schedule.num_stages == stages and not schedule.forward_only:
            schedules.append(schedule)
    return schedules


@given(st.data())
def test_fit_is_never_slower_than_the_best_of_the_catalogue_under_the_same_cap(data):
    p = data.draw(st.sampled_from([1, 2, 3, 4]))
    chunks = data.draw(st.sampled_from([1, 2]))
    m = data.draw(st.integers(1, 9))
    costs = data.draw(any_costs(chunks * p))
    timelines = [s.simulate(costs) for s in catalogue(p, m, chunks * p)]
    # Caps that some of the catalogue meet exactly, or nearly, or nobody.
    caps = [max(timeline.peak_bytes) for timeline in timelines]
    cap = data.draw(st.sampled_from([None, *caps])) if caps else None
    if cap is not None:
        cap += data.draw(st.sampled_from([0, 0, 1, -1]))
    try:
        fitted = fit(costs, p, m, cap)
    except ScheduleError:
        assert cap is not None
        assert all(peak > cap for peak in caps)
        return
    assert fitted.validate() is fitted
    assert (fitted.num_ranks, fitted.num_stages) == (p, chunks * p)
    assert fitted.num_microbatches == m
    timeline = fitted.simulate(costs)
    assert cap is None or max(timeline.peak_bytes) <= cap
    fitting = [t for t in timelines if cap is None or max(t.peak_bytes) <= cap]
    for other in fitting:
        assert timeline.makespan <= other.makespan
    assert timeline.lower_bound <= timeline.makespan * (1 + 1e-12)
    if fitted.name in BY_NAME:
        assert fitted == BY_NAME[fitted.name](p, m)


UNEVEN = Costs([1, 1.5, 1, 0.8], [2, 2.5, 2, 2], latency=0.3)
IN_CHUNKS = Costs(
    [1, 1.2, 0.8, 1, 1.1, 0.9, 1, 1.3], [2, 2.4, 1.6, 2, 2.2, 1.8, 2, 2.6], latency=0.6
)


@pytest.mark.parametrize(
    ("costs", "m", "cap", "margin"),
    [
        # Between what zb_h1 (4) and zb_h2 (7) hold.
        pytest.param(UNEVEN, 16, 6, 0.03, id="uneven stages"),
        pytest.param(Costs([1] * 4, latency=0.4), 8, 6, 0.10, id="latency"),
        pytest.param(IN_CHUNKS, 8, None, 0.03, id="two stages per rank"),
        pytest.param(IN_CHUNKS, 16, 7, 0.02, id="less than zb_v holds"),
    ],
)
def test_fit_is_faster_than_the_best_of_the_catalogue_by_a_margin(
    costs, m, cap, margin
):
    timelines = [s.simulate(costs) for s in catalogue(4, m, costs.num_stages)]
    best = min(t.makespan for t in timelines if cap is None or max(t.peak_bytes) <= cap)
    fitted = fit(costs, 4, m, cap)
    assert fitted.name == "fit"
    timeline = fitted.validate().simulate(costs)
    assert cap is None or max(timeline.peak_bytes) <= cap
    assert timeline.makespan <= best * (1 - margin)


def test_a_plan_that_cannot_fit_says_the_missing_bytes_and_a_way_out():
    costs = Costs([1, 1], residual_bytes=[3, 5], parameter_bytes=[10, 20])
    assert fit(costs, 2, 4, [13, 25]).simulate(costs).peak_bytes == (13, 25)
    says = (
        "fit: no schedule was found that fits into max_bytes, not even with one "
        "micro-batch at a time:\n"
        "  * rank 1 holds at least 25 bytes, 1 more than 24\n"
        "max_bytes of 25 would do, or by rank [13, 25]; or cut the stages "
        "elsewhere, or make micro-batches smaller"
    )
    with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
        fit(costs, 2, 4, 24)


def test_stages_that_the_user_places_get_an_order():
    # Two waves over four ranks: v = 4.
    costs = Costs([0.25] * 16, [0.5] * 16)
    waves = fit(costs, 4, 4, placement=[0, 1, 2, 3, 3, 2, 1, 0] * 2)
    timeline = waves.simulate(costs)
    assert timeline.makespan == timeline.lower_bound == 12.75
    assert interleaved(4, 4, 4).simulate(costs).makespan == 14.25
    # Not as many stages on every rank, and one number for all.
    uneven = fit(Costs(), 2, 3, 5, placement=[0, 1, 1, 0, 1])
    assert uneven.placement == (0, 1, 1, 0, 1)
    assert max(uneven.validate().simulate().peak_bytes) <= 5
    # An array of NumPy, for which the catalogue has schedules.
    assert fit(Costs(), 2, 4, placement=np.array([0, 1])) == fit(Costs(), 2, 4)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ([0, 1, 2], ": needs the rank of each stage, in which each of the 2 ranks"),
        ([0, 0], ": needs the rank of each stage, in which each of the 2 ranks"),
        ([0, [1]], ": needs the rank of each stage, in which"),
        ("01", ": needs the rank of each stage, in which"),
        (2, ": needs the rank of each stage, in which"),
        ([0, 1, 1], " is for 3 stages, costs are for 2"),
    ],
)
def test_placements_for_something_else_are_refused(placement, says):
    refusal = re.escape(f"fit: placement={placement!r}{says}")
    with pytest.raises(ScheduleError, match=refusal):
        fit(Costs([1, 1]), 2, 4, placement=placement)


def test_stages_that_do_not_divide_among_the_ranks_are_refused():
    says = "costs are for 3 stages, num_ranks=2: give costs for 2 stages, or for a mult"
    with pytest.raises(ScheduleError, match=f"^fit: {says}"):
        fit(Costs([1, 2, 3]), 2, 4)


@given(st.data())
def test_the_least_cap_that_is_named_does_and_no_schedule_does_with_less(data):
    p, chunks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    m = data.draw(st.integers(1, 5))
    costs = data.draw(any_costs(chunks * p))
    with pytest.raises(ScheduleError, match="would do") as refusal:
        fit(costs, p, m, -1)
    said = re.search(r"or by rank \[(.*)\]", str(refusal.value))
    least = [float(number) for number in said.group(1).split(", ")]
    peaks = fit(costs, p, m, least).simulate(costs).peak_bytes
    assert all(x <= most for x, most in zip(peaks, least, strict=True))
    for schedule in catalogue(p, m, chunks * p):
        assert max(schedule.simulate(costs).peak_bytes) >= max(least)

"""Cuts for a schedule: its simulated time, and several stages on a rank."""

import dataclasses
import itertools
import random
import time

import pytest

from jpipe import schedules
from jpipe.planning import _in_flight
from jpipe.planning._partition import partition
from jpipe.planning._profile import LayerProfile, Profile, SkipProfile

from .chains import every_cut, profile, stages, times

LINEAR = ["1f1b", "gpipe", "zb_h1"]
SEVERAL = ["zb_v", "interleaved"]


def built(name, num_stages, count):
    builder = schedules.BY_NAME[name]
    return builder(num_stages // 2 if name in SEVERAL else num_stages, count)


def simulated(profile, balance, schedule, **question):
    costs = profile.costs(balance, remat="none", **question)
    return schedule.simulate(costs)


def loads(profile, balance, schedule):
    each = [0.0] * schedule.num_ranks
    own = times(profile, balance, ["none"] * len(balance))
    for rank, seconds in zip(schedule.placement, own, strict=True):
        each[rank] += seconds
    return each


@pytest.mark.parametrize("name", LINEAR + SEVERAL)
def test_no_cut_of_a_small_model_is_simulated_to_be_faster(name):
    for seed in range(12):
        rng = random.Random(seed)
        given = profile(rng, 8, skips=rng.randrange(3))
        count, num_stages = rng.choice([2, 6]), 4 if name in SEVERAL else 3
        speed = rng.choice([{}, {"bandwidth": 20.0, "latency": 0.2}])
        schedule = built(name, num_stages, count)
        question = dict(speed, num_microbatches=count, schedule=name, remat="none")
        found = partition(given, num_stages, objective="step", **question)
        every = list(every_cut(8, num_stages))
        spans = [simulated(given, b, schedule, **speed).makespan for b in every]
        span = simulated(given, found, schedule, **speed).makespan
        assert span == pytest.approx(min(spans), rel=1e-9), seed
        found = partition(given, num_stages, objective="max", **question)
        best = min(max(loads(given, b, schedule)) for b in every)
        assert max(loads(given, found, schedule)) == pytest.approx(best), seed


@pytest.mark.parametrize("name", SEVERAL)
def test_a_limit_counts_all_stages_of_a_rank(name):
    """A rank needs the most of what its stages keep at the same time."""
    refused = 0
    for seed in range(12):
        given = profile(random.Random(seed), 7)
        schedule = built(name, 4, 5)

        def needs(balance, given=given, schedule=schedule):
            costs = given.costs(balance, remat="none")
            peak = [0] * schedule.num_ranks
            for rank, row in enumerate(schedule.rows):
                now = 0
                for op, stage, _ in row:
                    kept = costs.residual_bytes[stage]
                    now += {"F": kept, "B": -kept, "I": 0, "W": -kept}[op]
                    peak[rank] = max(peak[rank], now)
            for stage, rank in enumerate(schedule.placement):
                peak[rank] += costs.parameter_bytes[stage]
                peak[rank] += costs.accumulator_bytes[stage]
            return peak

        every = list(every_cut(7, 4))
        least = min(max(needs(balance)) for balance in every)
        question = {"num_microbatches": 5, "schedule": name, "remat": "none"}
        for more in (-1, 0, 60):
            limit = least + more
            fitting = [b for b in every if max(needs(b)) <= limit]
            if not fitting:
                refused += 1
                says = f"works is max_bytes={least:,};"
                with pytest.raises(ValueError, match=says):
                    partition(given, 4, max_bytes=limit, **question)
                continue
            found = partition(given, 4, max_bytes=limit, **question)
            assert found in fitting
            best = min(max(loads(given, b, schedule)) for b in fitting)
            assert max(loads(given, found, schedule)) == pytest.approx(best)
    assert refused == 12


def test_what_belongs_together_is_on_one_rank():
    costs = [3, 1, 1, 1, 1, 1, 1, 3]
    with pytest.raises(ValueError, match="leave 1 stages at most, num_stages=4"):
        partition(costs, 4, together=[(0, 7)])
    question = {"num_microbatches": 8, "objective": "step"}
    # In a V the first and the last stage share a rank; in a loop they never do.
    partition(costs, 4, together=[(0, 7)], schedule="zb_v", **question)
    with pytest.raises(ValueError, match="no cut was found that keeps together"):
        partition(costs, 4, together=[(0, 7)], schedule="interleaved", **question)
    for name, group in (("zb_v", (1, 6)), ("interleaved", (0, 5)), ("zb_v", (2, 3))):
        found = partition(costs, 4, together=[group], schedule=name, **question)
        own = stages(found)
        placement = built(name, 4, 8).placement
        ranks = [{placement[s] for s in range(4) if i in own[s]} for i in group]
        assert ranks[0] == ranks[1]
    found = partition(costs, 4, cuts=[5, 6], schedule="zb_v", **question)
    assert {5, 6} <= set(itertools.accumulate(found))


def test_what_is_in_flight_is_counted_from_the_rows():
    held = _in_flight.of_schedule(schedules.one_f_one_b(4, 8))
    assert held == _in_flight.of_one_f_one_b(4, 8)
    assert [h.counts for h in held] == [((4, 0),), ((3, 0),), ((2, 0),), ((1, 0),)]
    assert _in_flight.of_one_f_one_b(4, 2)[0].counts == ((2, 0),)
    for name in ("gpipe", "zb_h1", "zb_h2", "interleaved", "zb_v", "dualpipe_v"):
        schedule = schedules.BY_NAME[name](4, 9)
        peaks = [
            max(sum(counts) for counts in rank.counts)
            for rank in _in_flight.of_schedule(schedule)
        ]
        assert peaks == list(schedule.simulate().peak_bytes), name


def test_a_late_skip_connection_counts():
    """One that takes longer than all it passes decides where to cut."""
    layers = tuple(LayerProfile(f"layer{i}", 1.0, 1.0) for i in range(4))
    late = SkipProfile("late", 1, 2, 100, 100)
    question = {"objective": "step", "num_microbatches": 2, "bandwidth": 1.0}
    assert partition(Profile(layers), 2, **question) == [2, 2]
    assert partition(Profile(layers, skips=(late,)), 2, **question) in ([1, 3], [3, 1])


def test_full_remat_is_time_but_not_in_the_last_stage():
    layers = tuple(
        LayerProfile(f"layer{i}", 1.0, 1.0, output_bytes=1, kept_bytes={"none": 9})
        for i in range(10)
    )
    given = Profile(layers)
    assert partition(given, 2, remat="none") == [5, 5]
    # Two thirds each of the first and of the last.
    assert partition(given, 2, remat="full") == [4, 6]
    # What fits is 5 with a micro-batch in flight, and 2 with two.
    assert partition(given, 2, remat="none", max_bytes=72) == [4, 6]
    assert partition(given, 2, remat=["full", "none"], max_bytes=54) == [4, 6]


def test_five_hundred_layers_are_cut_within_a_second():
    given = profile(random.Random(1), 500)
    question = {"num_microbatches": 64, "bandwidth": 10.0, "latency": 0.1}
    for more in ({}, {"max_bytes": 60_000}):
        began = time.process_time()
        found = partition(given, 32, objective="step", **question, **more)
        assert time.process_time() - began < 1
        assert len(found) == 32
        assert sum(found) == 500


def test_a_rank_without_stages_is_no_matter():
    rows = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    given = schedules.Schedule.from_text(rows)
    idle = dataclasses.replace(given, rows=(*given.rows, ()))
    with pytest.warns(UserWarning, match="E12 rank 2 runs nothing"):
        found = partition([1, 2, 3], 2, objective="step", schedule=idle)
    assert found == [2, 1]

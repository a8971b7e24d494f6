"""Stages with replicas: published plans, the best of all, and a plan as a value."""

import itertools
import random

import pytest

import jpipe
from jpipe import replicate
from jpipe.schedules import Action, Schedule, ScheduleError

from .chains import (
    LayerProfile,
    Profile,
    Replicated,
    ReplicatedStage,
    costs_of,
    every_cut,
    profile,
)
from .published import PUBLISHED, read


@pytest.mark.parametrize(
    ("name", "devices", "straight", "transfers", "seconds", "faster"), PUBLISHED
)
def test_plans_are_those_of_pipedream(
    name, devices, straight, transfers, seconds, faster
):
    plan = replicate(
        read(name), devices, bandwidth=1e9, straight=straight, transfers=transfers
    )
    assert plan.seconds == pytest.approx(seconds, abs=6e-10, rel=0)
    assert plan.alone / plan.seconds == pytest.approx(faster, abs=6e-4, rel=0)
    assert sum(plan.replicas) == devices


def figure(count=12, replicas=(3, 2, 2, 1), **costs):
    """PipeDream's figure: each stage has as much work as devices."""
    each, nothing = tuple(map(float, replicas)), (0.0,) * len(replicas)
    times = {"forward": each, "backward": each, "bandwidth": 1.0}
    moved = dict.fromkeys(("boundary_bytes", "cotangent_bytes", "exchange"), nothing)
    stages = tuple(ReplicatedStage(i, i + 1, r) for i, r in enumerate(replicas))
    return Replicated(stages, costs_of(**times | moved | costs), 6.0, count)


def crossing(profile, cut):
    layer = profile.layers[cut - 1]
    arrays = {(cut - 1, None): layer.output_bytes + layer.cotangent_bytes}
    for skip in profile.skips:
        if skip.source < cut <= skip.target:
            name = None if skip.is_output and skip.source == cut - 1 else skip.name
            arrays[skip.source, name] = skip.bytes + skip.cotangent_bytes
    return sum(arrays.values())


def bottleneck(given, balance, each, bandwidth):
    """The slowest stage or link, term by term."""
    found, end = [], 0
    for size, r in zip(balance, each, strict=True):
        own, start, end = given.layers[end : end + size], end, end + size
        ring = 4 * (r - 1) * sum(x.param_bytes for x in own) / (bandwidth * r)
        found.append((sum(x.forward + x.backward for x in own) + ring) / r)
        for cut in {start, end} - {0, len(given.layers)}:
            found.append(crossing(given, cut) / bandwidth / r)
    return max(found)


def test_no_bottleneck_of_a_random_chain_is_smaller():
    """All plans that use all devices."""
    for seed in range(30):
        rng = random.Random(seed)
        layers, devices = rng.randint(1, 5), rng.randint(1, 6)
        given = profile(rng, layers, skips=rng.randrange(3) if layers > 1 else 0)
        bandwidth, straight = rng.choice([5.0, 50.0, 500.0]), rng.random() < 0.3
        devices = min(devices, layers) if straight else devices
        plan = replicate(given, devices, bandwidth=bandwidth, straight=straight)
        best = min(
            bottleneck(given, balance, each, bandwidth)
            for count in range(1, min(layers, devices) + 1)
            for balance in every_cut(layers, count)
            for each in itertools.product(range(1, devices + 1), repeat=count)
            if sum(each) == devices and (not straight or max(each) == 1)
        )
        assert plan.seconds == pytest.approx(best, rel=1e-9), seed


def test_the_figure_of_pipedream():
    plan = figure()
    assert plan.seconds == 2.0
    assert plan.alone == 16.0
    timeline = plan.simulate()
    assert timeline == plan.simulate(12)
    assert timeline.makespan == 38.0
    assert timeline.replicas == ((0, 1, 2), (3, 4), (5, 6), (7,))
    # In the steady state a micro-batch ends every two seconds.
    ends = [plan.simulate(60).end[Action("B", 0, i)] for i in (18, 36)]
    assert (ends[1] - ends[0]) / 18 == plan.seconds
    assert Schedule.from_json(plan.schedule().to_json()) == plan.schedule()
    assert plan.schedule().validate().rows == timeline.rows
    # Twice as many as devices, where no number was given.
    assert figure(None).schedule().num_microbatches == 16
    with pytest.raises(ScheduleError, match="num_microbatches=0: "):
        plan.simulate(0)


def test_a_plan_says_why():
    plan = figure(exchange=(2.0, 1.0, 3.0, 0.0), boundary_bytes=(0.0, 4.0, 4.0, 1.0))
    assert str(plan).splitlines() == [
        "5 s a micro-batch on 8 devices, 3.200 times as fast as one",
        "with one device per stage 6 s, 1.200 times as long",
        "slowest: stage 2, 3 s of it exchange of gradients",
        "stage  layers  devices  computes  exchange  transfers",
        "    0  0 to 0        3       2 s       2 s",
        "    1  1 to 1        2       2 s       1 s        2 s",
        "    2  2 to 2        2       2 s       3 s        2 s",
        "    3  3 to 3        1       2 s       0 s        1 s",
    ]


def test_what_cannot_be_planned_is_refused():
    bad = Profile((LayerProfile("a", -1.0, 1.0),))
    with pytest.raises(ValueError, match="replicate cannot plan this") as refusal:
        replicate(bad, 0, bandwidth=-1.0)
    for says in (
        "layer 0 (a): forward=-1.0; needs a number, finite and not negative",
        "num_devices=0; needs an int of at least 1",
        "bandwidth=-1.0; needs bytes per second, more than 0",
    ):
        assert says in str(refusal.value)
    one = Profile((LayerProfile("a", 1.0, 1.0),))
    assert jpipe.replicate(one, 3).straight == 2.0
    with pytest.raises(ValueError, match="num_devices=2 is more than the 1 layers"):
        replicate(one, 2, straight=True)
    huge = Profile((LayerProfile("a", 1e308, 1e308),) * 3)
    with pytest.raises(ValueError, match="longer than a float can say"):
        replicate(huge, 2)

"""Stages with replicas: the best of all, beside PipeDream's, and a plan that runs."""

import dataclasses
import itertools
import math
import random

import pytest

import jpipe
from jpipe import draw, replicate, schedules

from .chains import LayerProfile, Profile, every_cut, random_chain
from .published import PUBLISHED, minimize_bottleneck, read


@pytest.mark.parametrize(
    ("name", "devices", "is_unreplicated", "transfers", "seconds", "faster"), PUBLISHED
)
def test_stages_of_pipedream_are_those_that_were_published(
    name, devices, is_unreplicated, transfers, seconds, faster
):
    given = read(name)
    if not transfers:
        none = {"output_bytes": 0, "cotangent_bytes": 0}
        layers = tuple(dataclasses.replace(layer, **none) for layer in given.layers)
        given = dataclasses.replace(given, layers=layers, skips=())
    most = 1 if is_unreplicated else devices
    takes, stages = minimize_bottleneck(given, 1e9, devices, most)
    assert takes == pytest.approx(seconds, abs=6e-10, rel=0)
    whole = sum(layer.forward + layer.backward for layer in given.layers)
    assert whole / takes == pytest.approx(faster, abs=6e-4, rel=0)
    assert sum(count for _, count in stages) == devices


def step(given, balance, each, count, link, remat):
    """A step as it is simulated: gradients are exchanged once, at its end.

    The last stage runs each forward in the backward right behind it, and the first has
    no gradient of its input.
    """
    schedule = schedules.replicated(each, count)
    costs = given.costs(balance, remat=remat, **link)
    bandwidth, latency = link["bandwidth"] or math.inf, link["latency"]
    exchange = [
        2 * ((r - 1) * size / bandwidth + latency) * (r > 1)
        for r, size in zip(each, costs.accumulator_bytes, strict=True)
    ]
    last = 0.0 if remat == "full" else costs.forward[-1]
    backward = [*costs.backward[:-1], costs.backward[-1] + last]
    forward = [*costs.forward[:-1], 0.0]
    costs = dataclasses.replace(
        costs, forward=forward, backward=backward, exchange=exchange
    )
    return schedule.simulate(costs).makespan


def every_way(num_layers, devices):
    for count in range(1, min(num_layers, devices) + 1):
        for each in itertools.product(range(1, devices + 1), repeat=count):
            if sum(each) <= devices:
                for balance in every_cut(num_layers, count):
                    yield balance, each


def test_no_step_of_a_random_chain_is_much_shorter():
    """Of all stages on all numbers of devices; in most chains it is the shortest."""
    ratios = []
    for seed in range(24):
        rng = random.Random(seed)
        layers, devices = rng.randint(1, 5), rng.randint(1, 5)
        count = rng.choice([2, 4, 7, 12])
        given = random_chain(
            rng,
            layers,
            is_whole=rng.random() < 0.5,
            num_skips=rng.randrange(2) if layers > 1 else 0,
        )
        link = {"bandwidth": rng.choice([None, 20.0, 100.0, 1000.0])}
        link["latency"] = rng.choice([0.0, 0.1])
        remat = rng.choice(["min_cut", "full"])
        plan = replicate(given, devices, count, remat=remat, **link)
        each = [len(ranks) for ranks in plan.schedule.ranks_of]
        own = step(given, plan.balance, each, count, link, remat)
        assert plan.forecast.seconds == pytest.approx(own, rel=1e-9), seed
        least = min(
            step(given, *way, count, link, remat) for way in every_way(layers, devices)
        )
        ratios.append(own / least if least else 1.0)
    assert max(ratios) < 1.01
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 23


def test_a_limit_leaves_what_fits():
    """Bytes are those of the forecast: with workspace and arrays on their way."""
    given = random_chain(random.Random(5), 4)
    options = {"bandwidth": 50.0, "remat": "none"}

    def most(plan):
        return max(memory.total for memory in plan.forecast.memory)

    plan = replicate(given, 4, 8, **options)
    seconds, refusal = [plan.forecast.seconds], ""
    while not refusal:
        limit = most(plan) - 1
        try:
            plan = replicate(given, 4, 8, max_bytes=limit, **options)
        except ValueError as error:
            refusal = str(error)
        else:
            seconds.append(plan.forecast.seconds)
            assert most(plan) <= limit
            assert f"{limit} B a device" in str(plan)
    assert len(seconds) > 2
    assert seconds == sorted(seconds)
    assert "nothing was found that fits. The nearest has stages of" in refusal
    # What holds least of all: no stages of one device each hold less in 1F1B.
    least = min(
        max(schedules.one_f_one_b(count, 8).simulate(costs).peak_bytes)
        for count in range(1, 5)
        for balance in every_cut(4, count)
        for costs in [given.costs(balance, remat="none")]
    )
    assert limit > 0.7 * least


def figure(count=16, **options):
    """PipeDream's figure: each stage has as much work as devices."""
    rows = [(3.0, 600, 100), (2.0, 400, 200), (2.0, 1200, 40), (1.0, 800, 0)]
    layers = [
        LayerProfile(
            "a",
            t,
            t,
            param_bytes=own,
            output_bytes=n,
            cotangent_bytes=n,
            residual_bytes={"min_cut": 2 * n},
        )
        for t, own, n in rows
    ]
    return replicate(Profile(tuple(layers)), 8, count, **options)


def test_many_parameters_get_fewer_devices_only_where_steps_are_short():
    """PipeDream exchanges them for each micro-batch, a step of jpipe once."""

    def replicas(plan):
        return [len(ranks) for ranks in plan.schedule.ranks_of]

    assert sum(replicas(figure(256, bandwidth=1e3))) == 8
    few, many = figure(4, bandwidth=100.0), figure(256, bandwidth=100.0)
    assert max(replicas(few)) < max(replicas(many))


def test_a_replicated_plan_is_printed_saved_and_drawn():
    plan = figure(bandwidth=1e4)
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    for says in (
        "one device: 256 s a step, ",
        "one device per stage: ",
        "exchange: the devices of a stage share parameters and gradients once in a ",
        "memory: ",
        "times the least that any order of these stages can take",
    ):
        assert says in text
    assert "exchange of gradients" in draw.svg(plan)
    free = figure()
    assert "bytes were taken to cost no time; bandwidth= says what they do" in str(free)


def test_models_that_cannot_be_planned_are_refused():
    bad = Profile((LayerProfile("a", -1.0, 1.0),))
    with pytest.raises(ValueError, match="replicate cannot plan this") as refusal:
        replicate(bad, 0, 0, bandwidth=-1.0, max_bytes=-1)
    for says in (
        "layer 0 (a): forward=-1.0; needs a number, finite and not negative",
        "num_devices=0: needs an int of at least 1",
        "num_microbatches=0: needs an int of at least 1",
        "bandwidth=-1.0; needs bytes per second, more than 0",
        "max_bytes=-1; needs a number, finite and not negative",
    ):
        assert says in str(refusal.value)
    one = Profile((LayerProfile("a", 1.0, 1.0),))
    with pytest.raises(ValueError, match="what remat='min_cut' keeps is not in the"):
        replicate(one, 3, 4)
    plan = replicate(one, 3, 3, remat="full")
    assert plan.forecast.seconds == 2.0

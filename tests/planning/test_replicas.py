"""Stages with replicas: published plans, the best of all, and a plan as a value."""

import dataclasses
import itertools
import random

import pytest

import jpipe
from jpipe import replicate

from .chains import LayerProfile, Profile, every_cut, profile
from .published import PUBLISHED, read


@pytest.mark.parametrize(
    ("name", "devices", "is_unreplicated", "transfers", "seconds", "faster"), PUBLISHED
)
def test_plans_are_those_of_pipedream(
    name, devices, is_unreplicated, transfers, seconds, faster
):
    given = read(name)
    if not transfers:
        none = {"output_bytes": 0, "cotangent_bytes": 0}
        layers = tuple(dataclasses.replace(layer, **none) for layer in given.layers)
        given = dataclasses.replace(given, layers=layers, skips=())
    plan = replicate(given, devices, bandwidth=1e9)
    takes = plan.unreplicated_seconds if is_unreplicated else plan.seconds
    assert takes == pytest.approx(seconds, abs=6e-10, rel=0)
    assert plan.single_device_seconds / takes == pytest.approx(faster, abs=6e-4, rel=0)
    assert sum(plan.replicas) == devices


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
        bandwidth = rng.choice([5.0, 50.0, 500.0])
        plan = replicate(given, devices, bandwidth=bandwidth)

        def best(devices, most, given=given, layers=layers, bandwidth=bandwidth):
            return min(
                bottleneck(given, balance, each, bandwidth)
                for count in range(1, min(layers, devices) + 1)
                for balance in every_cut(layers, count)
                for each in itertools.product(range(1, most + 1), repeat=count)
                if sum(each) == devices
            )

        assert plan.seconds == pytest.approx(best(devices, devices), rel=1e-9), seed
        unreplicated = best(min(devices, layers), 1)
        assert plan.unreplicated_seconds == pytest.approx(unreplicated, rel=1e-9), seed


def figure(**options):
    """PipeDream's figure: each stage has as much work as devices."""
    rows = [(3.0, 600, 100), (2.0, 400, 200), (2.0, 1200, 40), (1.0, 800, 0)]
    layers = [
        LayerProfile("a", t, t, param_bytes=own, output_bytes=n, cotangent_bytes=n)
        for t, own, n in rows
    ]
    return replicate(Profile(tuple(layers)), 8, **options)


def test_the_example_of_pipedream_has_its_published_plan():
    plan = figure()
    assert (plan.balance, plan.replicas) == ((1, 1, 1, 1), (3, 2, 2, 1))
    assert plan.seconds == 2.0
    assert plan.single_device_seconds == 16.0


def test_a_replicated_plan_prints_seconds_and_devices():
    # A ring of 7 sends 12 / 7 of 2200 bytes; a cut is of 40 bytes and 40 of gradients.
    assert str(figure(bandwidth=1e4)).splitlines() == [
        "2.10776 s a micro-batch on 8 devices, 7.591 times as fast as one",
        "with one device per stage 6 s, 2.847 times as long",
        "stage  layers  devices",
        "    0       3        7",
        "    1       1        1",
    ]


def test_models_that_cannot_be_planned_are_refused():
    bad = Profile((LayerProfile("a", -1.0, 1.0),))
    with pytest.raises(ValueError, match="replicate cannot plan this") as refusal:
        replicate(bad, 0, bandwidth=-1.0)
    for says in (
        "layer 0 (a): forward=-1.0; needs a number, finite and not negative",
        "num_devices=0: needs an int of at least 1",
        "bandwidth=-1.0; needs bytes per second, more than 0",
    ):
        assert says in str(refusal.value)
    one = Profile((LayerProfile("a", 1.0, 1.0),))
    assert jpipe.replicate(one, 3).unreplicated_seconds == 2.0

"""A plan's cut: by the step of its schedule, simulated, exchanges included."""

import dataclasses
import itertools
import random

import pytest

from jpipe.planning._better import preferred, ranked
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._search import Space, search
from jpipe.planning._shapes import Shape
from jpipe.schedules import BY_NAME

from . import chains

NAMES = ("1f1b", "gpipe", "zb_h1", "zb_v")
LAYERS, DEVICES, MICROBATCHES = 7, 4, 4


def space(seed, data, devices=DEVICES, microbatches=MICROBATCHES):
    """A random chain; of every third the ends have by far the most parameters."""
    one = chains.profile(random.Random(seed), LAYERS, skips=seed % 2)
    layers = list(one.layers)
    if seed % 3 == 0:
        for end in (0, -1):
            layers[end] = dataclasses.replace(layers[end], param_bytes=2000)
    given = (Shape(microbatches, data),)
    profiles = {given[0].parts: dataclasses.replace(one, layers=tuple(layers))}
    hardware = Hardware(devices, bandwidth=100.0)
    modes = ("min_cut",)
    return Space(
        profiles, [0] * LAYERS, hardware, NAMES, modes, made=False, given=given
    )


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_no_cut_under_any_schedule_has_a_shorter_step(seed, data):
    given = space(seed, data)
    (profile,) = given.profiles.values()
    every = [
        evaluate(profile, [0] * LAYERS, cut, ["min_cut"] * len(cut), schedule, *where)
        for ranks in range(1, DEVICES // data + 1)
        for name in NAMES
        for schedule in [BY_NAME[name](ranks, MICROBATCHES)]
        if schedule.num_stages <= LAYERS
        for cut in chains.every_cut(LAYERS, schedule.num_stages)
        for where in [(given.hardware, data)]
    ]
    best = ranked(every, given.hardware)[0]
    assert search(given)[0].seconds == pytest.approx(best.seconds, rel=1e-9)


def test_workspace_above_the_limit_leaves_no_cut_to_look_for():
    given = space(1, 1)
    (one,) = given.profiles.values()
    limit = 500
    layers = [dataclasses.replace(x, workspace_bytes=3 * limit) for x in one.layers]
    found = search(
        dataclasses.replace(
            given,
            profiles={MICROBATCHES: dataclasses.replace(one, layers=tuple(layers))},
            hardware=Hardware(DEVICES, memory_limit=limit, bandwidth=100.0),
        )
    )
    assert found
    assert not any(each.fits(Hardware(DEVICES, memory_limit=limit)) for each in found)


def test_halves_of_backwards_must_pay_where_devices_share_cores():
    measured = {"how": "measured", "device": "cpu (of some host)"}
    seen = set()
    for seed, microbatches in itertools.product(range(8), (2, 8, 24)):
        given = space(seed, 1, 2, microbatches)
        found, hardware = search(given), given.hardware
        cores = [
            dataclasses.replace(
                each, profile=dataclasses.replace(each.profile, made=measured)
            )
            for each in found
        ]
        assert preferred(found, hardware) == found
        taken, *others = preferred(cores, hardware)
        assert others == [each for each in cores if each is not taken]
        whole = [
            each
            for each in cores
            if "zb" not in each.schedule.name
            and each.num_devices == cores[0].num_devices
        ]
        is_near = whole[0].seconds <= 1.05 * cores[0].seconds
        seen.add((taken is cores[0], is_near))
        assert taken is (whole[0] if is_near else cores[0])
    assert seen == {(False, True), (True, False)}

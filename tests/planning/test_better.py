"""A plan's cut: by the step of its schedule, simulated, exchanges included."""

import dataclasses
import random

import pytest

from jpipe.planning._better import ranked
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._search import Space, search
from jpipe.planning._shapes import Shape
from jpipe.schedules import BY_NAME

from . import chains

NAMES = ("1f1b", "gpipe", "zb_h1", "zb_v")
LAYERS, DEVICES, MICROBATCHES = 7, 4, 4


def space(seed, data):
    """A random chain; of every third the ends have by far the most parameters."""
    one = chains.profile(random.Random(seed), LAYERS, skips=seed % 2)
    layers = list(one.layers)
    if seed % 3 == 0:
        for end in (0, -1):
            layers[end] = dataclasses.replace(layers[end], param_bytes=2000)
    given = (Shape(MICROBATCHES, data),)
    profiles = {given[0].parts: dataclasses.replace(one, layers=tuple(layers))}
    hardware = Hardware(DEVICES, bandwidth=100.0)
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

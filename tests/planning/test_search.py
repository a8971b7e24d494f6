"""How a plan is searched: the best of all, what is not tried, what fits a limit."""

import dataclasses
import random

import jax
import pytest
from flax import linen as nn

from jpipe.planning import _search
from jpipe.planning._confirm import confirmed, decided
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._profiler import answer
from jpipe.planning._request import Request
from jpipe.planning._search import Space, preferred, ranked, search
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


@pytest.mark.parametrize(("data", "seed"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 3)])
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


def test_halves_of_backwards_must_pay_where_devices_share_cores():
    measured = {"how": "measured", "device": "cpu (of some host)"}
    seen = set()
    for seed, microbatches in ((0, 2), (1, 8), (2, 24), (3, 2), (4, 8), (6, 2)):
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


def several_shapes(seed, limit):
    """A random chain in micro-batches of several sizes, shared by devices or not."""
    rng = random.Random(seed)
    one = chains.profile(rng, 7, skips=seed % 2)
    shapes = [Shape(m, data) for data in (1, 2, 4) for m in (1, 4)]
    profiles = {
        parts: dataclasses.replace(
            one,
            layers=tuple(
                dataclasses.replace(
                    x, forward=x.forward / parts, backward=x.backward / parts
                )
                for x in one.layers
            ),
            action_seconds=(0.0, 0.01, 1.0)[seed % 3],
        )
        for parts in {shape.parts for shape in shapes}
    }
    hardware = Hardware(4, limit, bandwidth=(None, 100.0, 1000.0)[seed % 3])
    names, modes = ("1f1b", "gpipe", "zb_h1", "zb_v"), ("min_cut", "full")
    return Space(profiles, [0] * 7, hardware, names, modes, False, given=tuple(shapes))


@pytest.mark.parametrize(("seed", "limit"), [(1, None), (2, 900), (5, None)])
def test_what_is_not_tried_is_none_of_the_best(seed, limit, monkeypatch):
    given = several_shapes(seed, limit)
    found = search(given)
    with monkeypatch.context() as patch:
        patch.setattr(_search, "_least", lambda *_: 0.0)
        everything = search(given)
    assert len(found) <= len(everything)

    def named(candidates):
        """Those that the reasons name: the best, of each kind, on all devices."""
        kinds = [
            candidates,
            *([c for c in candidates if (c.data > 1) == several] for several in (0, 1)),
            [c for c in candidates if c.num_devices == 4],
        ]
        return [kind[0].seconds for kind in kinds]

    assert named(found) == named(everything)


def test_a_cut_under_a_limit_leaves_room_for_the_optimizer():
    for seed in range(8):
        given = chains.profile(random.Random(seed), 8)
        state = [2 * layer.param_bytes for layer in given.layers]
        schedule = BY_NAME["1f1b"](3, 4)
        every = [
            evaluate(given, state, cut, ["min_cut"] * 3, schedule, Hardware(3))
            for cut in chains.every_cut(8, 3)
        ]
        # Beside what a cut is made by: what is on its way to a rank.
        limit = min(c.most_bytes for c in every) + 40
        space = Space({4: given}, state, Hardware(3, limit), ("1f1b",), ("min_cut",))
        assert search(space)[0].fits(space.hardware), seed


@pytest.fixture(scope="module")
def lowered():
    layers = [layer for _ in range(4) for layer in (nn.Dense(32), nn.tanh)]
    question = {"num_microbatches": 4, "measure": False}
    request = Request(layers, jax.ShapeDtypeStruct((2048, 8), "float32"), **question)
    hardware = Hardware(2, bandwidth=1e9)
    names = ("1f1b", "interleaved", "zb_v")
    space = Space({4: answer(request)}, [0] * 8, hardware, names, ("min_cut", "full"))
    return space, request


def under(space, limit, **changes):
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    return dataclasses.replace(space, hardware=hardware, **changes)


def test_the_list_of_instructions_says_what_fits(lowered):
    """Too little was thought of all candidates: that they keep nothing."""
    space, request = lowered
    candidates = search(dataclasses.replace(space, made=False))[:12]
    given = [
        dataclasses.replace(
            one, memory=tuple(dataclasses.replace(own, held=0) for own in one.memory)
        )
        for one in candidates
    ]
    (first, *_), _ = confirmed(given, space, request)
    limited = under(space, first.most_bytes - 1)
    (found, *others), more = confirmed(given, limited, request)
    assert found.kept
    assert more > 1
    short = [one for one in others if one.kept]
    assert short
    assert not any(one.fits(limited.hardware) for one in short)
    assert all(one.most_bytes >= found.most_bytes for one in short)


def test_what_needs_less_than_was_thought_is_found(lowered):
    space, request = lowered
    space = dataclasses.replace(space, remats=("min_cut",), made=False)
    # Less than the fastest plan holds by a seventh.
    limited = under(space, decided(space, request)[0].most_bytes * 6 // 7)
    assert not any(one.fits(limited.hardware) for one in search(limited))
    assert decided(limited, request)[0].fits(limited.hardware)

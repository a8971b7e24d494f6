"""Cuts under a limit of memory: what fits is found."""

import dataclasses
import itertools
import random

import jax
import pytest
from flax import linen as nn

from jpipe.planning._better import ranked
from jpipe.planning._confirm import Confirm, decided
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._partition import least_bytes, partition
from jpipe.planning._profiler import answer
from jpipe.planning._reasons import chosen
from jpipe.planning._request import Request
from jpipe.planning._search import Space, search
from jpipe.schedules import BY_NAME

from .chains import every_cut, profile


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_under_a_limit_leaves_room_for_the_optimizer(seed):
    rng = random.Random(seed)
    given = profile(rng, 8)
    state = [2 * layer.param_bytes for layer in given.layers]
    schedule = BY_NAME["1f1b"](3, 4)
    every = [
        evaluate(given, state, cut, ["min_cut"] * 3, schedule, Hardware(3))
        for cut in every_cut(8, 3)
    ]
    # Beside what a cut is made by: what is on its way to a rank.
    limit = min(c.most_bytes for c in every) + 40
    space = Space({4: given}, state, Hardware(3, limit), ("1f1b",), ("min_cut",))
    assert search(space)[0].fits(space.hardware)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_to_be_enough_for_several_stages_per_rank_is(seed):
    given = profile(random.Random(seed), 60)
    question = {"num_microbatches": 16, "schedule": "zb_v", "remat": "none"}
    least = least_bytes(given, 16, **question)
    assert len(partition(given, 16, max_bytes=least, **question)) == 16
    with pytest.raises(ValueError, match="no cut was found with max_bytes") as refusal:
        partition(given, 16, max_bytes=least / 2, **question)
    assert f"works is max_bytes={least:,.0f};" in str(refusal.value)


def lean(candidate):
    """A candidate of which too little was thought: that it keeps nothing."""
    memory = tuple(dataclasses.replace(own, held=0) for own in candidate.memory)
    return dataclasses.replace(candidate, memory=memory)


@pytest.fixture(scope="module")
def searched():
    layers = [layer for _ in range(4) for layer in (nn.Dense(32), nn.tanh)]
    question = {"num_microbatches": 4, "measure": False}
    request = Request(layers, jax.ShapeDtypeStruct((2048, 8), "float32"), **question)
    profiles, modes = {4: answer(request)}, ("min_cut", "full")
    hardware = Hardware(2, bandwidth=1e9)
    names = ("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved")
    space = Space(profiles, [0] * len(layers), hardware, names, modes)
    shapes = itertools.product(names, (["min_cut"], ["full"]))
    found = [
        evaluate(profiles[4], [0] * 8, cut, mode * len(cut), schedule, hardware)
        for name, mode in shapes
        for schedule in [BY_NAME[name](2, 4)]
        for cut in [[8 // schedule.num_stages] * schedule.num_stages]
    ]
    return ranked(found, hardware), space, request


def test_where_the_first_need_more_than_was_thought_others_are_looked_at(searched):
    candidates, space, request = searched
    exact = [Confirm(space, request)([one])[0][0] for one in candidates]
    limit = exact[0].most_bytes - 1
    assert any(one.most_bytes <= limit for one in exact)
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    under = dataclasses.replace(space, hardware=hardware)
    given = [lean(candidates[0])] * 2 + candidates[1:]
    (found, *others), more = Confirm(under, request)(given)
    assert found.kept
    assert found.fits(hardware)
    assert more > 1
    short = [one for one in others if one.kept]
    assert short
    assert not any(one.fits(hardware) for one in short)


def test_the_last_that_is_looked_at_needs_least(searched):
    candidates, space, request = searched
    # All but the last are of other kinds, of each of which too little was thought.
    exact = [Confirm(space, request)([one])[0][0] for one in candidates]
    (*others, least) = sorted(candidates, key=lambda one: -one.most_bytes)
    limit = confirmed_bytes(least, exact)
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    under = dataclasses.replace(space, hardware=hardware)
    confirm = Confirm(under, request)
    confirm._is_likely = lambda candidate: candidate is not least
    found, *_ = confirm([*others, least])[0]
    assert found.fits(hardware)


def confirmed_bytes(candidate, exact):
    """What a candidate needs as its instructions say."""
    ways = "schedule", "balance", "remat"
    (found,) = (
        one
        for one in exact
        if all(getattr(one, way) == getattr(candidate, way) for way in ways)
    )
    return found.most_bytes


def test_what_fits_only_as_it_was_thought_is_not_taken(searched):
    candidates, space, request = searched
    given = [lean(one) for one in candidates]
    limit = max(one.most_bytes for one in given)
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    under = dataclasses.replace(space, hardware=hardware)
    (found, *others), _ = Confirm(under, request)(given)
    assert found.kept
    assert not found.fits(hardware)
    assert all(one.most_bytes >= found.most_bytes for one in others if one.kept)
    with pytest.raises(ValueError, match=r"no plan fits\. The nearest is (?s:.)* rank"):
        chosen([found, *others], under, [])


def test_what_needs_less_than_was_thought_is_found(searched):
    _, space, request = searched
    space = dataclasses.replace(space, remats=("min_cut",))
    # Less than the fastest plan holds by a fifth.
    limit = decided(space, request)[0].most_bytes * 4 // 5
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    under = dataclasses.replace(space, hardware=hardware)
    assert not any(one.fits(hardware) for one in search(under))
    assert decided(under, request)[0].fits(hardware)


def test_cuts_are_looked_for_anew_where_too_little_was_thought(searched):
    _, space, request = searched
    # Of layers that keep much less than they do, by as much each.
    few = {
        number: dataclasses.replace(
            profile,
            layers=tuple(
                dataclasses.replace(
                    layer,
                    kept_bytes={m: n // 3 for m, n in layer.kept_bytes.items()},
                )
                for layer in profile.layers
            ),
        )
        for number, profile in space.profiles.items()
    }
    # Under every limit: what is taken fits, or nothing does.
    most = decided(space, request)[0].most_bytes
    for share in range(2, 11, 2):
        limit = most * share // 10
        hardware = dataclasses.replace(space.hardware, memory_limit=limit)
        names = {"hardware": hardware, "remats": ("min_cut",)}
        right, wrong = (
            decided(dataclasses.replace(space, profiles=own, **names), request)[0]
            for own in (space.profiles, few)
        )
        assert right.kept
        assert wrong.kept
        if right.fits(hardware):
            assert wrong.fits(hardware)
            assert wrong.seconds <= 1.3 * right.seconds

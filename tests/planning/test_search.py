"""The search of a plan, beside all cuts, remat modes and schedules of small chains.

Private names are imported because a search of layers by hand has no public door:
`jpipe.plan` profiles, traces and lowers a model.
"""

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpipe import schedules
from jpipe.planning._forecast import evaluate
from jpipe.planning._mesh_shapes import MeshShape
from jpipe.planning._plan_search import search
from jpipe.planning._space import Choice, Hardware, SearchSpace

from .chains import LayerProfile, Profile, every_cut

MODES = ("min_cut", "full")


@st.composite
def spaces(draw, schedule_names, most_layers=4):
    """A chain without skip connections, on two or three devices without a limit."""
    times = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])
    sizes = st.integers(0, 40)
    layers = [
        LayerProfile(
            name=f"layer{i}",
            forward=draw(times),
            backward=draw(times),
            param_bytes=draw(sizes),
            state_bytes=draw(sizes),
            output_bytes=draw(sizes),
            cotangent_bytes=draw(sizes),
            residual_bytes={"min_cut": draw(st.integers(0, 200)), "none": 0},
            workspace_bytes=draw(sizes),
        )
        for i in range(draw(st.integers(2, most_layers)))
    ]
    count = draw(st.sampled_from([1, 2, 5]))
    profile = Profile(tuple(layers), input_bytes=draw(sizes))
    hardware = Hardware(
        num_devices=draw(st.integers(2, 3)),
        bandwidth=draw(st.sampled_from([None, 50.0])),
        overlap=draw(st.booleans()),
    )
    return SearchSpace(
        profiles={count: profile},
        optimizer_bytes=[0] * len(layers),
        hardware=hardware,
        schedule_names=schedule_names,
        remat_modes=MODES,
        fits_schedules=False,
        balance=None,
        mesh_shapes=(MeshShape(count),),
    )


def every_candidate(space):
    """All cuts, remat modes, schedules and numbers of ranks."""
    (shape,) = space.mesh_shapes
    for name in space.schedule_names:
        for ranks in range(1, space.hardware.num_devices + 1):
            try:
                schedule = schedules.BY_NAME[name](ranks, shape.num_microbatches)
            except schedules.ScheduleError:
                continue
            count = schedule.num_stages
            if count > space.num_layers:
                continue
            for balance in every_cut(space.num_layers, count):
                for modes in itertools.product(space.remat_modes, repeat=count):
                    yield evaluate(space, Choice(tuple(balance), modes, schedule))


def under(space, limit):
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    return dataclasses.replace(space, hardware=hardware)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "1f1b_v"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_other_cut_and_modes_are_faster(name, data):
    """Without a limit, and under limits down to one that nothing keeps to."""
    space = data.draw(spaces((name,)))
    every = [
        (candidate.seconds, candidate.max_bytes) for candidate in every_candidate(space)
    ]
    best, *_ = search(space)
    assert best.seconds == pytest.approx(min(every)[0], rel=1e-9)

    least_bytes = min(size for _, size in every)
    most_bytes = max(size for _, size in every)
    for limit in (least_bytes, (3 * least_bytes + most_bytes) // 4):
        fastest = min(seconds for seconds, size in every if size <= limit)
        best, *_ = search(under(space, limit))
        assert best.max_bytes <= limit
        # Which of its stages compute again matters to a rank by their sum alone.
        slack = 1e-9 if name == "1f1b" else 0.1
        assert fastest * (1 - 1e-9) <= best.seconds <= fastest * (1 + slack)
    best, *_ = search(under(space, least_bytes - 1))
    assert best.max_bytes == least_bytes


def chain(*sizes, **fields):
    """Layers of 1 s forward and 2 s backward, by the bytes of their residuals."""
    layers = [
        LayerProfile(
            name="a",
            forward=1.0,
            backward=2.0,
            output_bytes=1,
            residual_bytes={"min_cut": size},
            **fields,
        )
        for size in sizes
    ]
    return Profile(tuple(layers))


def test_only_the_stages_that_have_to_store_less_compute_again():
    """1F1B has two micro-batches in flight in the first of two stages."""
    space = SearchSpace(
        profiles={4: chain(10, 100, 10, 10)},
        optimizer_bytes=[0] * 4,
        hardware=Hardware(2),
        schedule_names=("1f1b",),
        remat_modes=MODES,
        fits_schedules=False,
        balance=(2, 2),
        mesh_shapes=(MeshShape(4),),
    )
    best, *_ = search(space)
    assert best.choice.remat == ("min_cut", "min_cut")
    assert best.max_bytes > 220
    best, *_ = search(under(space, best.max_bytes - 1))
    assert best.choice.remat == ("full", "min_cut")


def random_space(seed, *, num_layers, num_devices, num_microbatches, schedule_names):
    """Layers whose times differ by several times, without a limit."""
    rng = random.Random(seed)
    layers = []
    for i in range(num_layers):
        forward = rng.lognormvariate(0, 0.7)
        layers.append(
            LayerProfile(
                name=f"layer{i}",
                forward=forward,
                backward=2 * forward,
                residual_bytes={"min_cut": 1},
            )
        )
    return SearchSpace(
        profiles={num_microbatches: Profile(tuple(layers))},
        optimizer_bytes=[0] * num_layers,
        hardware=Hardware(num_devices),
        schedule_names=tuple(schedule_names),
        remat_modes=("min_cut",),
        fits_schedules=False,
        balance=None,
        mesh_shapes=(MeshShape(num_microbatches),),
    )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_out_of_a_search_is_not_the_best(seed):
    """Searches of one schedule leave out less than a search of all."""
    names = [name for name in schedules.BY_NAME if name != "forward_only"]
    space = random_space(
        seed, num_layers=7, num_devices=3, num_microbatches=6, schedule_names=names
    )
    best, *_ = search(space)
    steps = []
    for name in names:
        alone = dataclasses.replace(space, schedule_names=(name,))
        steps += [candidate.seconds for candidate in search(alone)]
    assert best.seconds == pytest.approx(min(steps), rel=1e-9)


def test_stages_of_one_rank_are_not_of_very_different_lengths():
    """In a loop all ranks wait for the slowest stage, though their sums are equal."""
    space = random_space(
        9,
        num_layers=32,
        num_devices=8,
        num_microbatches=16,
        schedule_names=["interleaved"],
    )
    best, *_ = search(space)
    (profile,) = space.profiles.values()
    seconds = sum(layer.forward + layer.backward for layer in profile.layers)
    even_step = 16 * seconds / 8
    # By the busiest rank alone the best cut takes 1.40 times as long.
    assert best.seconds < 1.37 * even_step

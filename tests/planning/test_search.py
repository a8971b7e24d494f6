"""The search of a plan, beside all cuts, remat modes and schedules of small chains.

Private names are imported because a search of layers by hand has no public door:
`jpipe.plan` profiles, traces and lowers a model.
"""

import dataclasses
import itertools
import math
import random

import pytest

from jpipe import schedules
from jpipe.planning._forecast import evaluate
from jpipe.planning._layer_profile import Link
from jpipe.planning._plan_search import search
from jpipe.planning._space import (
    Choice,
    Hardware,
    MeshShape,
    PlanChoices,
    SearchSpace,
)

from .chains import LayerProfile, Profile, every_cut, random_chain

MODES = ("min_cut", "full")
TRAINING = tuple(name for name in schedules.BY_NAME if name != "forward_only")


def random_space(
    seed, schedule_names, *, most_layers, most_devices=3, remat_modes=("min_cut",)
):
    """A chain on some devices, without a limit."""
    rng = random.Random(seed)
    num_layers = rng.randint(2, most_layers)
    count = rng.choice([2, 5, 8])
    chain = random_chain(rng, num_layers, is_whole=rng.random() < 0.5)
    return SearchSpace(
        profiles={count: chain},
        optimizer_bytes=[0] * num_layers,
        hardware=Hardware(
            num_devices=rng.randint(2, most_devices),
            link=Link(
                bandwidth=rng.choice([math.inf, 50.0]), overlap=rng.random() < 0.5
            ),
        ),
        choices=PlanChoices(
            schedule_names=tuple(schedule_names),
            remat_modes=remat_modes,
        ),
        mesh_shapes=(MeshShape(count),),
    )


def every_candidate(space):
    """All cuts, remat modes, schedules and numbers of ranks."""
    (shape,) = space.mesh_shapes
    for name in space.choices.schedule_names:
        for ranks in range(1, space.hardware.num_devices + 1):
            try:
                schedule = schedules.BY_NAME[name](ranks, shape.num_microbatches)
            except schedules.ScheduleError:
                continue
            count = schedule.num_stages
            if count > space.num_layers:
                continue
            for balance in every_cut(space.num_layers, count):
                for modes in itertools.product(space.choices.remat_modes, repeat=count):
                    yield evaluate(space, Choice(tuple(balance), modes, schedule))


def under(space, limit):
    hardware = dataclasses.replace(space.hardware, memory_limit=limit)
    return dataclasses.replace(space, hardware=hardware)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "1f1b_v", "zb_v"])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_and_modes_are_faster(name, seed):
    """Without a limit, and under limits down to one that nothing keeps to."""
    space = random_space(seed, (name,), most_layers=4, remat_modes=MODES)
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
        slack = 1e-9 if name in ("1f1b", "zb_h1") else 0.1
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
        choices=PlanChoices(
            schedule_names=("1f1b",),
            remat_modes=MODES,
            balance=(2, 2),
        ),
        mesh_shapes=(MeshShape(4),),
    )
    best, *_ = search(space)
    assert best.choice.remat == ("min_cut", "min_cut")
    assert best.max_bytes > 220
    best, *_ = search(under(space, best.max_bytes - 1))
    assert best.choice.remat == ("full", "min_cut")


@pytest.mark.parametrize("name", TRAINING)
def test_a_forecast_holds_what_a_timeline_of_its_schedule_shows(name):
    """With skip connections and tied parameters; a loss that is fused or is not."""
    for seed, ranks in itertools.product(range(4), (1, 2)):
        chain = random_chain(random.Random(seed), 8, num_skips=4, num_ties=1)
        schedule = schedules.BY_NAME[name](ranks, 4)
        ends = sorted(random.Random(seed).sample(range(1, 8), schedule.num_stages - 1))
        balance = tuple(b - a for a, b in itertools.pairwise([0, *ends, 8]))
        modes = [*itertools.islice(itertools.cycle(MODES), len(balance) - 1), "min_cut"]
        space = SearchSpace(
            profiles={4: chain},
            optimizer_bytes=[0] * 8,
            hardware=Hardware(ranks),
            choices=PlanChoices(
                schedule_names=(name,),
                remat_modes=MODES,
            ),
            mesh_shapes=(MeshShape(4),),
        )
        candidate = evaluate(space, Choice(balance, tuple(modes), schedule))
        held = [memory.total - memory.workspace for memory in candidate.memory]
        assert held == [*schedule.simulate(candidate.costs).peak_bytes]


@pytest.mark.parametrize("seed", range(24))
def test_no_cut_under_any_schedule_ranks_before_the_best_of_a_search(seed):
    """Candidates that a search leaves out would not be the best."""
    space = random_space(seed, TRAINING, most_layers=7, most_devices=4)
    least = min(x.objective(space.hardware)[1] for x in every_candidate(space))
    best, *_ = search(space)
    assert best.objective(space.hardware)[1] <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_that_is_wanted_is_found_behind_others(seed):
    """What was tried hides nothing, though its forecast is shorter."""
    space = random_space(seed, TRAINING, most_layers=6)
    tried = []

    def is_wanted(candidate):
        return not any(candidate.is_same_run(x) for x in tried)

    for _ in range(4):
        fastest = min(x.seconds for x in every_candidate(space) if is_wanted(x))
        candidates = search(space, is_wanted=is_wanted)
        found = next(filter(is_wanted, candidates))
        # Of six schedules other cuts are simulated, also of those that were tried.
        assert found.seconds <= 1.1 * fastest
        tried.append(found)


def test_stages_of_one_rank_are_not_of_very_different_lengths():
    """In a loop all ranks wait for the slowest stage, though their sums are equal."""
    chain = random_chain(random.Random(5), 32)
    space = SearchSpace(
        profiles={16: chain},
        optimizer_bytes=[0] * 32,
        hardware=Hardware(8),
        choices=PlanChoices(
            schedule_names=("interleaved",),
            remat_modes=("min_cut",),
        ),
        mesh_shapes=(MeshShape(16),),
    )
    best, *_ = search(space)
    seconds = sum(layer.forward + layer.backward for layer in chain.layers)
    even_step = 16 * seconds / 8
    assert best.seconds < 1.34 * even_step

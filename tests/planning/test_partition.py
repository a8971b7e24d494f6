"""The best cut, by trying all; and what `partition` refuses."""

import dataclasses
import math
import random

import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe import partition, schedules

from ..reference import dense
from .chains import (
    MODES,
    LayerProfile,
    Profile,
    every_cut,
    random_chain,
    times,
    transfers,
)
from .models import X

SEVERAL = ["zb_v", "interleaved", "dualpipe_v"]


def drawn(seed, per_rank=1):
    """A random question."""
    rng = random.Random(seed)
    num_layers = rng.randint(2, 8)
    num_stages = rng.randint(1, min(4, num_layers) // per_rank) * per_rank
    modes = tuple(rng.choice(MODES) for _ in range(num_stages))
    bandwidth, latency = rng.choice([(None, 0.0), (10.0, 0.0), (100.0, 0.3)])
    return (
        rng,
        random_chain(
            rng, num_layers, is_whole=rng.random() < 0.5, num_ties=rng.randrange(2)
        ),
        modes,
        {
            "num_stages": num_stages,
            "num_microbatches": rng.choice([1, 2, 5, 30]),
            "bandwidth": bandwidth,
            "latency": latency,
            "overlap": rng.choice([True, True, False]),
            "remat": modes,
        },
    )


def worth(profile, balance, modes, question):
    """The slowest stage and the step."""
    has_halves = question["schedule"] == "zb_h1"
    each = times(profile, balance, modes, has_halves=has_halves)
    bandwidth = question["bandwidth"] or math.inf
    moved = transfers(profile, balance, bandwidth, question["latency"])
    if not question["overlap"]:  # half before a cut, half behind it
        for cut, seconds in enumerate(moved):
            each[cut] += seconds / 2
            each[cut + 1] += seconds / 2
        moved = []
    count = question["num_microbatches"] - 1
    return max(each), sum(each) + sum(moved) + count * max(each)


def needs(profile, balance, modes, schedule):
    """The bytes of each rank, but for what is on its way."""
    costs = profile.costs(balance, remat=modes)
    costs = dataclasses.replace(costs, boundary_bytes=0, cotangent_bytes=0, skips=())
    return schedule.simulate(costs).peak_bytes


def built(name, num_stages, count):
    builder = schedules.BY_NAME[name]
    return builder(num_stages // 2 if name in SEVERAL else num_stages, count)


@pytest.mark.parametrize("schedule", [None, "zb_h1", "interleaved"])
def test_no_other_cut_is_faster(schedule):
    """Of all, or of those that a limit leaves."""
    refused = 0
    for seed in range(250):
        rng, given, modes, question = drawn(seed, 1 + (schedule in SEVERAL))
        count = question["num_stages"]
        run = built(schedule or "1f1b", count, question["num_microbatches"])
        one_each = [rng.randrange(300, 1500) for _ in range(run.num_ranks)]
        limit = rng.choice([None, None, 600, 1200, one_each])
        limits = np.broadcast_to(limit or math.inf, run.num_ranks)
        over = {
            tuple(b): max(np.subtract(needs(given, b, modes, run), limits))
            for b in every_cut(len(given.layers), count)
        }
        fitting = [list(b) for b, more in over.items() if more <= 0]
        question |= {"schedule": schedule, "max_bytes": limit}
        if not fitting:
            refused += 1
            with pytest.raises(ValueError, match="partition") as refusal:
                partition(given, **question)
            if isinstance(limit, int):
                least = int(min(over.values()) + limit)
                says = f"needs {least:,} bytes, {least - limit:,} more than {limit:,}"
                assert says in str(refusal.value)
                assert partition(given, **question | {"max_bytes": least})
            continue
        # The step of a schedule is simulated, and the load of a rank is of its stages.
        for objective in ("max", "step")[: 1 if schedule else 2]:
            found = partition(given, objective=objective, **question)
            assert found in fitting, seed
            if schedule in SEVERAL:
                continue
            every = [worth(given, b, modes, question) for b in fitting]
            slowest, step = worth(given, found, modes, question)
            if objective == "max":
                least = min(every)[0] * (1 + 1e-9)
                assert slowest <= least, seed
                # Of those whose slowest stage is as fast, that with the shortest step.
                every = [own for own in every if own[0] <= least]
            assert step == pytest.approx(min(s for _, s in every), rel=1e-9), seed
    assert 20 < refused < 180


def busiest(costs, schedule):
    """The time of one micro-batch on the rank that has most to do."""
    loads = [sum(map(costs.of, row)) for row in schedule.rows]
    return max(loads) / schedule.num_microbatches


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", *SEVERAL])
def test_no_cut_of_a_small_model_is_simulated_to_be_faster(name):
    for seed in range(12):
        rng = random.Random(seed)
        given = random_chain(
            rng, 8, is_whole=rng.random() < 0.5, num_skips=rng.randrange(3)
        )
        count, num_stages = rng.choice([4, 6]), 4 if name in SEVERAL else 3
        speed = rng.choice([{}, {"bandwidth": 20.0, "latency": 0.2}])
        if speed:
            speed["overlap"] = rng.choice([True, False])
        schedule = built(name, num_stages, count)

        def simulated(balance, own=(given, schedule, speed)):
            given, schedule, speed = own
            costs = given.costs(balance, remat="none", **speed)
            return schedule.simulate(costs).makespan

        question = dict(speed, num_microbatches=count, schedule=name, remat="none")
        found = partition(given, num_stages, objective="step", **question)
        every = list(every_cut(8, num_stages))
        span = simulated(found)
        assert span == pytest.approx(min(map(simulated, every)), rel=1e-9), seed
        if not speed.get("overlap", True):
            continue  # a rank has its halves of transfers besides
        found = partition(given, num_stages, objective="max", **question)
        costs = {tuple(b): given.costs(b, remat="none") for b in [found, *every]}
        best = min(busiest(of_cut, schedule) for of_cut in costs.values())
        assert busiest(costs[tuple(found)], schedule) == pytest.approx(best), seed


def test_a_rank_that_runs_nothing_changes_no_cut():
    chain = random_chain(random.Random(1), 6)
    schedule = schedules.one_f_one_b(2, 4)
    first, last = schedule.rows
    idle = dataclasses.replace(schedule, placement=(0, 2), rows=(first, (), last))
    for options in ({"objective": "step"}, {"max_bytes": 1e4}):
        with pytest.warns(UserWarning, match="rank 1"):
            cut = partition(chain, 2, schedule=idle, **options)
        assert cut == partition(chain, 2, schedule=schedule, **options)


def test_a_partition_of_a_profile_is_a_balance():
    layers = [dense(6), jnp.tanh, dense(6), jnp.tanh, dense(4)]
    costs = jpipe.profile(layers, X, num_microbatches=2)
    balance = partition(costs, 2)
    assert jpipe.pipeline(layers, 2, balance=balance).plan.balance == balance
    # Parameters: 54, 0, 42, 0, 28.
    assert partition([layer.num_params for layer in costs.layers], 2) == [1, 4]


def alike(count, **fields):
    """Layers of one second, forward and backward."""
    return Profile(tuple(LayerProfile("a", 1.0, 1.0, **fields) for _ in range(count)))


def test_full_remat_is_time_but_not_in_the_last_stage():
    given = alike(10, output_bytes=1, residual_bytes={"none": 9})
    assert partition(given, 2, remat="none") == [5, 5]
    # Two thirds each of the first and of the last.
    assert partition(given, 2, remat="full") == [4, 6]
    # What fits is 5 with a micro-batch in flight, and 2 with two.
    assert partition(given, 2, remat="none", max_bytes=72) == [4, 6]
    assert partition(given, 2, remat=["full", "none"], max_bytes=54) == [4, 6]


def test_costs_as_numbers_are_cut_as_documented():
    assert partition([1, 2, 3, 4, 5, 6], 3) == [3, 2, 1]
    # Several are as good: the most even one.
    for costs in ([1] * 10, [0.1] * 10, np.ones(10, np.float32), jnp.ones(10)):
        assert partition(costs, 4) == [2, 2, 3, 3]
    assert partition([0, 0, 0], 2) == partition([0.0] * 3, 2) == [1, 2]
    assert partition([5e-324] * 4, 2) == [2, 2]
    assert partition([1e300] * 4, 2, objective="step", num_microbatches=8) == [2, 2]


GIVEN = random_chain(random.Random(0), 6)


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ({"num_stages": 7}, "num_stages=7; needs 1 to 6"),
        ({"num_stages": "2"}, "num_stages='2': needs an int of at least 1"),
        ({"objective": "fast"}, "objective='fast'; needs 'max' or 'step'"),
        ({"objective": "memory"}, "'max' or 'step'; a limit of bytes is max_bytes="),
        ({"objective": "step"}, "a step or a schedule needs num_microbatches="),
        ({"schedule": "2f2b", "num_microbatches": 4}, "unknown schedule '2f2b'"),
        ({"schedule": "forward_only", "num_microbatches": 4}, "has no backward"),
        (
            {"schedule": schedules.replicated([2, 1], 8), "objective": "step"},
            "cut the layers under the schedule without replicas",
        ),
        ({"bandwidth": -1}, "bandwidth=-1; needs bytes per second, more than 0"),
        ({"remat": "dots", "max_bytes": 9}, "what remat='dots' keeps is not in the"),
        ({"remat": "nope"}, "remat: 'nope' is unknown: choose 'full', 'min_cut'"),
        ({"max_bytes": [1, 2, 3]}, "max_bytes=[1, 2, 3]; needs bytes, more than 0"),
        ({"costs": [1, 2], "remat": "full"}, "and remat='full' need a Profile"),
        (
            {"costs": [1.0, float("nan")]},
            "costs[1]=nan; needs a number, finite",
        ),
        ({"costs": [1e308] * 4}, "a step takes longer than a float can hold"),
        (
            {"costs": Profile((LayerProfile("a", -1.0, 1.0),) * 2)},
            "layer 0 (a): forward=-1.0; needs a number",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(question, fault):
    with pytest.raises(ValueError, match=r"partition|schedule") as refusal:
        partition(**{"costs": GIVEN, "num_stages": 2, **question})
    assert fault in str(refusal.value)


def test_costs_that_are_none_are_answered_with_what_to_give():
    for costs in (3, ["a", "b"], [jnp.sin]):
        with pytest.raises(TypeError, match=r"costs is a .*; needs a jpipe\.Profile"):
            partition(costs, 2)
    with pytest.raises(AttributeError, match=r"'replicate'; type jpipe\.plan\(layers"):
        getattr(jpipe, "replicate")  # noqa: B009


def test_a_limit_that_no_cut_keeps_is_refused_with_the_missing_bytes():
    given = alike(4, param_bytes=1000, residual_bytes={"none": 100})
    with pytest.raises(ValueError, match="partition") as refusal:
        partition(given, 2, remat="none", max_bytes=4000)
    assert str(refusal.value) == (
        "partition: no cut was found that keeps to max_bytes: in the one that needs "
        "least, rank 0 (layers 0 to 1) needs 4,400 bytes, 400 more than 4,000; take "
        "more stages, a remat mode that keeps less, or max_bytes larger by as much"
    )
    assert partition(given, 2, remat="none", max_bytes=4400) == [2, 2]
    with pytest.raises(ValueError, match="300 more than 1,900"):
        partition(given, 2, remat="none", max_bytes=[1900, 6100])
    assert partition(given, 2, remat="none", max_bytes=[2200, 6400]) == [1, 3]

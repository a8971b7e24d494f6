"""`jpipe.plan`: what it decides fits, is predicted as it is simulated, and runs."""

import dataclasses
import functools
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe.planning._layer_profile import MeasuredLink
from jpipe.schedules._costs import TIME_FIELDS

from .. import reference as ref
from . import models
from .chains import every_cut, random_chain
from .models import SAMPLE

model = functools.partial(models.dense, 5)
planned = functools.partial(models.planned, 5, data=1)


def test_a_plan_is_built_and_gives_the_numbers_of_one_device():
    plan = planned()
    pipe, twin = jpipe.pipeline(model(), plan=plan), jpipe.sequential(model(), 4)
    assert pipe.schedule == plan.schedule
    assert [len(stage.layers) for stage in pipe.plan.stages] == plan.balance
    assert pipe.plan.remat == plan.remat
    assert pipe.plan.forecast == plan.forecast
    assert "runner-up: " in str(pipe)
    x = jax.random.normal(jax.random.key(0), SAMPLE.shape)
    targets = jnp.ones((16, 4))
    found, expected = (
        p.value_and_grad(ref.mse)(p.init(jax.random.key(1), x), x, targets)
        for p in (pipe, twin)
    )
    ref.assert_close(found, expected, ref.FLOAT32)


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved"])
def test_a_builder_of_a_user_gets_the_plan_that_the_same_order_gets_by_name(name):
    def mine(num_ranks, num_microbatches):
        return schedules.BY_NAME[name](num_ranks, num_microbatches)

    options = {"memory_limit": 2_000_000, "num_devices": 4}
    plan, expected = (
        planned(schedules=("gpipe", schedule), **options) for schedule in (mine, name)
    )
    assert plan.schedule == expected.schedule
    assert plan.balance == expected.balance
    assert plan.remat == expected.remat
    assert plan.forecast.seconds == expected.forecast.seconds
    assert plan.forecast.memory == expected.forecast.memory


def test_a_schedule_of_a_user_is_planned_and_gives_the_numbers_of_one_device():
    # No schedule of the catalogue has five stages on two ranks.
    wave = schedules.fit(schedules.Costs(), 2, 4, placement=[0, 1, 1, 0, 1])
    wave = dataclasses.replace(wave, name="wave")
    plan = planned(schedules=wave, num_microbatches=4, num_devices=2)
    assert plan.schedule == wave
    pipe, twin = jpipe.pipeline(model(), plan=plan), jpipe.sequential(model(), 4)
    x = jax.random.normal(jax.random.key(0), SAMPLE.shape)
    found, expected = (
        p.value_and_grad(ref.mse)(p.init(jax.random.key(1), x), x, jnp.ones((16, 4)))
        for p in (pipe, twin)
    )
    ref.assert_close(found, expected, ref.FLOAT32)


def test_a_plan_prints_its_reasons():
    forecast = planned().forecast
    assert [line.partition(":")[0] for line in forecast.reasons] == [
        "bottleneck",
        "memory",
        "transfers",
        "runner-up",
        "on paper",
        "profile",
        "loss",
    ]
    text = str(planned())
    assert all(reason in text for reason in forecast.reasons)
    assert "times the least that any order of these stages can take" in text


def test_a_user_balance_is_forecast_without_another_cut():
    best, free = planned(schedules="1f1b"), planned(schedules="1f1b", balance=(2, 9))
    assert free.balance == [2, 9]
    assert free.forecast.seconds > best.forecast.seconds
    same = planned(schedules="1f1b", balance=tuple(best.balance))
    assert same.forecast.memory == best.forecast.memory
    assert same.forecast.seconds == best.forecast.seconds
    with pytest.raises(ValueError, match=r"(?s)balance=\[2, 2\]:.*its sum is 4"):
        planned(balance=(2, 2))
    with pytest.raises(ValueError, match="have no order for"):
        planned(balance=(2, 3, 6))


def test_a_text_that_is_no_plan_is_refused():
    fields = json.loads(planned().to_json())
    moved = json.loads(json.dumps(fields))
    moved["stages"][0]["rank"] = 7
    for text, says in (
        ("plan.json", "JSONDecodeError.*; give its text, not its path"),
        ("[]", "it is .., needs an object"),
        ("{}", "stages is missing; schedule is missing"),
        (json.dumps(fields | {"more": 1}), "more is unknown"),
        (json.dumps(fields | {"stages": fields["stages"][:1]}), "stages are on ranks"),
        (json.dumps(moved), "stages are on ranks"),
    ):
        with pytest.raises(ValueError, match=rf"no plan as Plan\.to_json .*{says}"):
            jpipe.Plan.from_json(text)


def test_a_plan_is_refused_beside_other_options_and_for_other_layers():
    plan = planned()
    for balance in ([5, 6], np.array([5, 6])):
        with pytest.raises(ValueError, match="it decides balance, which was given too"):
            jpipe.pipeline(model(), plan=plan, balance=balance)
    with pytest.raises(ValueError, match="layer 10 is missing, in the plan Dense"):
        jpipe.pipeline(model()[:-1], plan=plan)
    with pytest.raises(ValueError, match="layer 0 is tanh, in the plan Dense"):
        jpipe.pipeline([nn.tanh, *model()[1:]], plan=plan)
    with pytest.raises(TypeError, match=r"what jpipe\.plan returned"):
        jpipe.pipeline(model(), plan=[5, 6])


CHIMERA = schedules.Schedule.from_text("0F0 1F1 1B1 0B0\n1F0 0F1 1B0 0B1")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_devices": 0}, "num_devices=0: needs an int of at least 1"),
        ({"num_microbatches": "8"}, "num_microbatches='8': needs an int of at least 1"),
        ({"num_microbatches": 17}, r"=\(17,\) leave nothing to choose for 16 examples"),
        ({"bandwidth": 5e-324}, "longer than a float can hold"),
        ({"schedules": "compare"}, "'?compare'? is unknown: choose from"),
        ({"schedules": schedules.forward_only}, "forward_only'? is unknown: choose"),
        ({"schedules": schedules.gpipe(2, 4)}, "'gpipe' is the name of another sch"),
        ({"schedules": CHIMERA, "num_microbatches": 2}, "custom has replicas of stage"),
        ({"schedules": CHIMERA, "num_microbatches": 4}, "no order for 11 layers on"),
        ({"schedules": "dualpipe_v", "num_microbatches": 1}, "no order for 11 layers"),
        ({"remat": "most"}, "remat: 'most' is unknown: choose"),
        ({"data": 3, "num_devices": 3}, r"data=\(3,\) and .* data divides the 3 dev"),
        (
            {"data": 2, "num_microbatches": 9},
            "data times num_microbatches is no more than 16",
        ),
    ],
)
def test_models_that_cannot_be_planned_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        planned(**options)


TINY = [nn.Dense(4) for _ in range(16)]


def test_tiny_layers_are_not_spread_over_devices():
    def tiny(**options):
        given = {"num_devices": 4, "data": 1, "measure": False, **options}
        sample = jax.ShapeDtypeStruct((64, 4), jnp.float32)
        return jpipe.plan(TINY, sample, optax.sgd(0.1), schedules="1f1b", **given)

    free, real = tiny(action_seconds=0.0), tiny()
    assert free.schedule.num_ranks == 4
    assert (real.schedule.num_ranks, real.schedule.num_microbatches) == (1, 1)
    # What one program takes, and next to nothing that it computes.
    assert 2e-5 < real.forecast.seconds < 2.2e-5
    says = "3 of 4 devices are left idle: no better plan"
    assert any(says in line for line in real.forecast.reasons)
    # One thread has all programs run: forwards of the last stage are in its backwards.
    halves = {"num_microbatches": 4, "balance": [8, 8]}
    two = tiny(num_devices=2, **halves)
    assert two.forecast.seconds == 2e-5 * (3 * 4 + 2 * 4)
    # Each stage has its shards add up their gradients.
    assert tiny(data=2, **halves).forecast.seconds == 2e-5 * (3 * 4 + 2 * 4 + 2)
    says = "bottleneck: the host: dispatching a step takes 400 µs, the devices need "
    assert any(line.startswith(says) for line in two.forecast.reasons)


def keep(x):
    jpipe.stash("x", x)
    return 2 * x


def add(x):
    return x + jpipe.pop("x")


@pytest.mark.parametrize(
    ("remat", "schedule", "first", "last", "kept", "workspace"),
    [
        # The last stage runs its forwards in its backwards, and keeps its input.
        ("min_cut", "zb_h1", (4.0, 8.0), (0.0, 3.0), (200, 128), (0, 50)),
        # Here no backward follows its forward.
        ("none", "gpipe", (4.0, 8.0), (1.0, 2.0), (280, 70), (0, 0)),
        ("full", "gpipe", (4.0, 12.0), (0.0, 3.0), (32 * 4, 128), (200, 50)),
    ],
)
def test_a_forecast_is_that_counted_by_hand(
    remat, schedule, first, last, kept, workspace
):
    """Layers of 1 s and 2 s, which need 1000 bytes; arrays are of 128 bytes."""
    layers = [nn.Dense(8), keep, nn.tanh, add, nn.Dense(4)]
    own = jpipe.profile(layers, SAMPLE, num_microbatches=4, measure=False)
    known = {"residual_bytes": {"min_cut": 50, "none": 70}, "workspace_bytes": 1000}
    known |= {"forward": 1.0, "backward": 2.0, "input_grad": None, "weight_grad": None}
    each = tuple(dataclasses.replace(layer, **known) for layer in own.layers)
    given = {"num_devices": 2, "balance": [4, 1], "data": 1, "num_microbatches": 4}
    given |= {"profile": dataclasses.replace(own, layers=each, action_seconds=0.0)}
    given |= {"measure": False, "bandwidth": 1e3, "latency": 0.0}
    plan = jpipe.plan(
        layers, SAMPLE, optax.sgd(0.1), remat=remat, schedules=schedule, **given
    )
    costs = plan.forecast.costs
    # Nobody needs the gradient of the input: W does all of the first stage's backward.
    assert (costs.forward[0], costs.backward[0]) == first
    assert (costs.input_grad[0], costs.weight_grad[0]) == (0.0, first[1])
    # All micro-batches cost the same: one number, from which simulations are faster.
    assert (costs.forward[1], costs.backward[1]) == last
    assert tuple(costs.residual_bytes) == kept
    assert costs.is_uniform
    # Beside its own, a layer of the first has two arrays, and what skips it.
    needs = [memory.workspace for memory in plan.forecast.memory]
    assert needs == [1000 + 3 * 128 + workspace[0], 1000 + workspace[1]]


def runner_up(plan):
    """What a plan says of the best that was not chosen."""
    lines = plan.forecast.reasons
    return [line for line in lines if line.startswith("runner-up: ")]


def test_the_same_plan_under_another_name_is_no_runner_up():
    # Of a first stage W is all of the backward: in one micro-batch both are F B.
    given = {"num_devices": 1, "num_microbatches": 1}
    assert runner_up(planned(schedules=("gpipe", "zb_h1"), **given)) == []
    (other,) = runner_up(planned(schedules=("1f1b", "gpipe"), num_devices=1))
    assert re.search("gpipe, .*: as long, and .* in the device that needs most$", other)


def test_transfers_of_a_latency_alone_are_not_called_free():
    given = {"schedules": "1f1b", "balance": (5, 6), "bandwidth": None}
    for latency, says in ((0.25, "; 250 ms for each, whatever its size"), (0.0, "no ")):
        reasons = planned(latency=latency, **given).forecast.reasons
        (line,) = [line for line in reasons if line.startswith("transfers: ")]
        assert says in line
        assert ("cost no time" in line) == (latency == 0)


NAMES = ("1f1b", "zb_h1", "zb_v")


@pytest.mark.parametrize(
    "seed", [0, 4, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3, 5))]
)
def test_no_cut_under_any_schedule_has_a_shorter_step(seed):
    """Layers with random times; bytes are those of the model."""
    rng = random.Random(seed)
    layers = [nn.Dense(8), nn.tanh, nn.Dense(8), nn.Dense(4)]
    own = jpipe.profile(layers, SAMPLE, num_microbatches=4, measure=False)
    timed = []
    chain = random_chain(rng, len(layers))
    for layer, random_layer in zip(own.layers, chain.layers, strict=True):
        times = {name: getattr(random_layer, name) for name in TIME_FIELDS.values()}
        timed.append(dataclasses.replace(layer, **times))
    given = {"profile": dataclasses.replace(own, layers=tuple(timed)), "data": 1}
    given |= {"remat": "min_cut", "bandwidth": 1e3, "measure": False}

    def made(devices, **options):
        tx = optax.sgd(0.1)
        return jpipe.plan(layers, SAMPLE, tx, num_devices=devices, **given | options)

    def worth(plan):
        most = max(memory.total for memory in plan.forecast.memory)
        return plan.forecast.seconds, most

    every = [
        worth(made(ranks, schedules=name, balance=cut))
        for ranks in (1, 2, 3)
        for name in NAMES
        for count in [schedules.BY_NAME[name](ranks, 4).num_stages]
        for cut in (every_cut(4, count) if count <= 4 else ())
    ]
    seconds, most = worth(made(3, schedules=NAMES))
    assert seconds == pytest.approx(min(every)[0], rel=1e-9)
    for limit in (most - 1, min(each[1] for each in every)):
        best = min(each for each in every if each[1] <= limit)
        seconds, own_most = worth(made(3, schedules=NAMES, memory_limit=limit))
        assert own_most <= limit
        # Under a limit bytes are those of the program, maybe fewer than forecast.
        assert seconds <= best[0] * (1 + 1e-9)
    with pytest.raises(ValueError, match="take more devices \\(num_devices=\\)"):
        made(3, schedules=NAMES, memory_limit=limit - 1)


def test_an_unknown_link_is_measured():
    layers, x = [nn.Dense(4), nn.relu, nn.Dense(4)], jnp.ones((8, 4))
    profile = jpipe.profile(layers, x, num_microbatches=2, rounds=1)

    def made(**options):
        given = {"num_devices": 2, "data": 1, "balance": [2, 1], "schedules": "1f1b"}
        given |= {"num_microbatches": 2, **options}
        return jpipe.plan(layers, x, optax.sgd(0.1), **given)

    plan, says = made(), f"measured from {jax.devices()[0]} to {jax.devices()[1]}"
    assert says in str(plan)
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    # A byte per second, or all of memory in a microsecond, is no link.
    assert 0 <= plan.forecast.costs.latency < 1
    assert 1e6 < plan.forecast.costs.bandwidth < 1e14
    slow = made(latency=0.25)
    assert slow.forecast.costs.latency == 0.25
    assert "between devices; 250 ms for each and " in str(slow)
    # A core that copies does not compute: two halves, of two micro-batches, there and
    # back. Elsewhere the second micro-batch is computed meanwhile.
    assert slow.forecast.seconds > 6 * 0.25 / 2
    says_busy = "; a transfer keeps both devices from computing, each for half of it"
    assert says_busy in str(slow)
    overlapping = made(latency=0.25, overlap=True)
    assert 2 * 0.25 < overlapping.forecast.seconds < slow.forecast.seconds
    assert says_busy not in str(overlapping)
    assert f" per second, the latter {says}" in str(slow)
    for options in (
        {"profile": profile, "latency": 0.0, "bandwidth": 1e9},
        {"profile": dataclasses.replace(profile, link=None)},
        {"measure": False},
    ):
        assert "measured from" not in str(made(**options))
    # A profile has the link of the place where it was made.
    link = MeasuredLink(0.125, 2.0**20, "here", "there")
    elsewhere = made(profile=dataclasses.replace(profile, link=link))
    assert (
        "; 125 ms for each and 1.0 MiB per second, measured from here to there; "
        in str(elsewhere)
    )
    assert elsewhere.forecast.costs.bandwidth == 2.0**20
    # A CPU copies with the cores that compute; a GPU does not.
    assert not elsewhere.forecast.costs.overlap
    gpu = dataclasses.replace(
        profile, origin=profile.origin | {"device": "NVIDIA H100 (gpu)"}
    )
    assert made(profile=gpu).forecast.costs.overlap

"""`jpipe.plan`: what it decides fits, is predicted as it is simulated, and runs."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import draw, schedules
from jpipe._instructions import _progress
from jpipe.planning._made import kind_of

from .. import reference as ref

KIB = 1 << 10
SAMPLE = jax.ShapeDtypeStruct((16, 8), float)


def model():
    return [layer for _ in range(5) for layer in (nn.Dense(32), nn.tanh)] + [
        nn.Dense(4)
    ]


@functools.cache
def planned(**options):
    given = {
        "num_devices": 2,
        "data": 1,
        "num_microbatches": 4,
        "measure": False,
        "action_seconds": 0.0,
        "bandwidth": 1e9,
    }
    return jpipe.plan(model(), SAMPLE, optax.adam(1e-3), **given | options)


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


def test_a_plan_says_why():
    forecast = planned().forecast
    assert forecast.seconds >= forecast.bound > 0
    assert [line.partition(":")[0] for line in forecast.reasons] == [
        "bottleneck",
        "memory",
        "transfers",
        "runner-up",
        "layers",
        "loss",
    ]
    text = str(planned())
    assert all(reason in text for reason in forecast.reasons)
    assert "times the least that any order of these stages can take" in text


def test_a_cut_that_is_known_is_told_what_it_takes():
    best, free = planned(schedules="1f1b"), planned(schedules="1f1b", balance=(2, 9))
    assert free.balance == [2, 9]
    assert free.forecast.seconds > best.forecast.seconds
    same = planned(schedules="1f1b", balance=tuple(best.balance))
    assert same.forecast.memory == best.forecast.memory
    assert same.forecast.seconds == best.forecast.seconds
    with pytest.raises(ValueError, match=r"balance=\[2, 2\]: its sum is 4"):
        planned(balance=(2, 2))
    with pytest.raises(ValueError, match="have no order for"):
        planned(balance=(2, 3, 6))


def stashes(x):
    jpipe.stash("x", x)
    return 2 * x


def pops(x):
    return x + jpipe.pop("x")


def test_plans_are_saved_and_drawn():
    plan = jpipe.plan(
        [nn.Dense(8), stashes, nn.Dense(8), nn.Dense(8), pops],
        SAMPLE,
        optax.sgd(0.1),
        num_devices=2,
        data=1,
        measure=False,
        action_seconds=0.0,
        schedules="1f1b",
    )
    assert plan.forecast.costs.skips
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    assert "Infinity" not in plan.to_json()
    assert draw.svg(plan).count("<title>parameters: ") == 2
    with pytest.raises(ValueError, match="a plan without a forecast"):
        draw.svg(jpipe.pipeline([nn.relu], 2).plan)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward": [1.0]}, "IndexError|different numbers of stages"),
        ({"forward": "soon"}, "forward is a str"),
        ({"latency": -1}, "latency=-1 is not 0 or more"),
        ({"other": 1}, "other"),
        ({"skips": [1]}, "TypeError"),
    ],
)
def test_costs_that_no_schedule_could_have_are_refused(change, says):
    fields = json.loads(planned().to_json())
    fields["forecast"]["costs"] |= change
    with pytest.raises(ValueError, match=f"no plan as .* writes it: .*({says})"):
        jpipe.Plan.from_json(json.dumps(fields))


def test_a_text_that_is_no_plan_is_refused():
    fields = json.loads(planned().to_json())
    moved = json.loads(json.dumps(fields))
    moved["stages"][0]["rank"] = 7
    for text, says in (
        ("plan.json", r"'plan.json' is not JSON: .*; give the text"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        (json.dumps(fields | {"more": 1}), "more"),
        (json.dumps(fields | {"stages": fields["stages"][:1]}), "stages are on ranks"),
        (json.dumps(moved), "stages are on ranks"),
    ):
        with pytest.raises(ValueError, match=rf"no plan as Plan\.to_json .*{says}"):
            jpipe.Plan.from_json(text)


def test_a_plan_decides_alone_and_for_its_own_layers():
    plan = planned()
    with pytest.raises(ValueError, match="it decides balance, which was given too"):
        jpipe.pipeline(model(), plan=plan, balance=[5, 6])
    with pytest.raises(ValueError, match="layer 10 is missing, in the plan Dense"):
        jpipe.pipeline(model()[:-1], plan=plan)
    with pytest.raises(ValueError, match="layer 0 is tanh, in the plan Dense"):
        jpipe.pipeline([nn.tanh, *model()[1:]], plan=plan)
    with pytest.raises(TypeError, match=r"what jpipe\.plan returned"):
        jpipe.pipeline(model(), plan=[5, 6])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_devices": 0}, "num_devices=0: needs an int of at least 1"),
        ({"memory_limit": 1.5}, "memory_limit=1.5: needs an int of at least 1"),
        ({"batch_size": "8"}, "batch_size='8': needs an int of at least 1"),
        ({"num_microbatches": 17}, "num_microbatches=17 for 16 examples"),
        ({"bandwidth": -1}, "bandwidth=-1; needs bytes per second"),
        ({"bandwidth": 5e-324}, "longer than a float can say"),
        ({"schedules": schedules.build_v}, "build_v is unknown: choose from"),
        ({"schedules": ()}, r"schedules=\(\): name one or more"),
        ({"schedules": "dualpipe_v", "num_microbatches": 1}, "no order for 11 layers"),
        ({"remat": "most"}, "remat: 'most' is unknown: choose"),
        ({"data": 3}, "data=3 does not divide num_devices=2"),
        ({"batch_size": 15, "data": 2}, "data=2 does not divide 15 examples"),
        (
            {"data": 2, "num_microbatches": 9},
            "data=2 with num_microbatches=9 needs 18 examples, there are 16",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        planned(**options)


def test_what_is_no_argument_is_refused():
    with pytest.raises(TypeError, match=r"profile='x' is a str; needs what jpipe.prof"):
        planned(profile="x")
    with pytest.raises(TypeError, match=r"plan takes no schedule; see help"):
        planned(schedule="x")


def test_an_estimate_is_taken_as_it_was_made():
    rates = {"peak_flops": 1.5e12, "memory_bandwidth": 3e9, "action_seconds": 1e-6}
    known = jpipe.profile(model(), SAMPLE, num_microbatches=4, measure=False, **rates)
    given = {"num_devices": 2, "data": 1, "profile": known}
    made = jpipe.plan(model(), SAMPLE, optax.adam(1e-3), **given)
    again = jpipe.plan(
        model(),
        SAMPLE,
        optax.adam(1e-3),
        num_devices=2,
        data=1,
        num_microbatches=4,
        measure=False,
        **rates,
    )
    assert made.balance == again.balance
    assert made.forecast.seconds == again.forecast.seconds
    changed = dataclasses.replace(known, made=known.made | {"flops per second": "many"})
    with pytest.raises(ValueError, match="flops per second: 'many' in the profile, '1"):
        jpipe.plan(model(), SAMPLE, optax.adam(1e-3), **given | {"profile": changed})


def test_the_batch_size_replaces_that_of_the_sample():
    def planned(examples, **options):
        tokens = jnp.zeros((examples, 5), jnp.int32)
        layers = [nn.Embed(30, 8), nn.Dense(3)]
        return jpipe.plan(
            layers,
            tokens,
            optax.sgd(0.1),
            num_devices=2,
            measure=False,
            loss=ref.mse,
            targets=jnp.ones((examples, 5, 3)),
            schedules="1f1b",
            num_microbatches=2,
            data=1,
            **options,
        )

    assert planned(4, batch_size=64) == planned(64)


def test_a_plan_of_an_estimate_says_for_which_device():
    (said,) = (x for x in planned().forecast.reasons if x.startswith("layers: "))
    assert said == (
        "layers: estimated for a device of 1e+12 flops and 1e+11 bytes of memory per "
        "second, and 0 µs more for each action; peak_flops=, memory_bandwidth= and "
        "action_seconds= describe yours"
    )
    own = planned(peak_flops=3e9, memory_bandwidth=2e8, action_seconds=1e-3)
    assert "of 3e+09 flops and 2e+08 bytes of memory per second, and 1000 µs" in (
        str(own)
    )


def test_on_a_terminal_it_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "_LONG", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    planned.__wrapped__(memory_limit=1 << 20)
    shown = capsys.readouterr().err
    for what in (
        "layers traced",
        "numbers of devices and micro-batches planned",
        "schedules made to measure",
        "candidates lowered",
    ):
        assert what in shown
    assert shown.endswith("\r\x1b[K")


TINY = [nn.Dense(4) for _ in range(16)]


def test_tiny_layers_are_not_spread_over_devices():
    def tiny(**options):
        given = {"num_devices": 4, "data": 1, "measure": False, **options}
        sample = jax.ShapeDtypeStruct((64, 4), float)
        return jpipe.plan(TINY, sample, optax.sgd(0.1), schedules="1f1b", **given)

    free, real = tiny(action_seconds=0.0), tiny()
    assert free.schedule.num_ranks == 4
    assert (real.schedule.num_ranks, real.schedule.num_microbatches) == (1, 1)
    # What one program takes, and next to nothing that it computes.
    assert 2e-5 < real.forecast.seconds < 2.2e-5
    says = "3 of 4 devices are left idle: with all 4"
    assert any(says in line for line in real.forecast.reasons)
    # One thread has all programs run: forwards of the last stage are in its backwards.
    two = tiny(num_devices=2, num_microbatches=4, balance=[8, 8])
    assert two.forecast.seconds == 2e-5 * (3 * 4 + 2 * 4)
    says = "host: one thread has all programs and transfers run, which takes "
    assert any(line.startswith(says) for line in two.forecast.reasons)


def test_cores_that_devices_share_are_named(monkeypatch):
    layers = [nn.Dense(3) for _ in range(4)]
    made = jpipe.profile(layers, SAMPLE, num_microbatches=4, rounds=1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    made = dataclasses.replace(
        made,
        layers=tuple(dataclasses.replace(x, forward=1.0) for x in made.layers),
        made=made.made | {"device": kind_of(jax.devices()[0])},
    )
    plan = jpipe.plan(layers, SAMPLE, optax.sgd(0.1), num_devices=4, profile=made)
    says = "cores: 4 devices share the 3 cores of this machine"
    assert any(line.startswith(says) for line in plan.forecast.reasons)

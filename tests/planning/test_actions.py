"""What an action takes whatever it computes: on its rank, and on the one host."""

import dataclasses
import os

import jax
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe.planning._forecast import Hardware, as_run, evaluate
from jpipe.planning._profile import LayerProfile, Profile

from .models import X, profile

TINY = [nn.Dense(4) for _ in range(16)]
SAMPLE = jax.ShapeDtypeStruct((64, 4), float)

# Sums that floating point has exactly.
CALL = 0.125
GIVEN = Profile(
    tuple(
        LayerProfile(name, 1.0, 2.0, 1.0, 1.0, kept_bytes={"none": 8}) for name in "ab"
    ),
    action_seconds=CALL,
)


def planned(**options):
    given = {"num_devices": 8, "data": 1, "measure": False, **options}
    return jpipe.plan(TINY, SAMPLE, optax.sgd(0.1), **given)


def test_tiny_layers_are_not_spread_over_devices():
    free, real = planned(action_seconds=0.0), planned()
    assert free.schedule.num_ranks == 8
    assert real.schedule.num_ranks == 1
    assert real.schedule.num_microbatches == 1
    # What one program takes, and next to nothing that it computes.
    assert 2e-5 < real.forecast.seconds < 2.2e-5
    assert any(
        "7 of 8 devices are left idle: with all 8" in line
        for line in real.forecast.reasons
    )


def test_more_micro_batches_of_tiny_layers_take_longer():
    seconds = [planned(num_microbatches=m).forecast.seconds for m in (1, 4, 16)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_each_action_of_a_stage_takes_it_once():
    costs = GIVEN.costs([1, 1], remat="none")
    assert costs.forward == [1 + CALL] * 2
    assert costs.backward == [2 + CALL] * 2
    assert costs.input_grad == costs.weight_grad == [1 + CALL] * 2
    frozen = dataclasses.replace(
        GIVEN, layers=(LayerProfile("a", 1.0, 0.0), GIVEN.layers[1])
    )
    costs = frozen.times([0, 1, 2], ["none"] * 2, None, 0.0)
    assert costs.forward == [1 + CALL] * 2
    assert (costs.backward[0], costs.input_grad[0], costs.weight_grad[0]) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_runs_as_one_program_takes_it_once(mode):
    schedule = schedules.one_f_one_b(2, 3)
    costs = GIVEN.costs([1, 1], remat=mode)
    costs = as_run(costs, schedule, mode == "full", CALL)
    assert costs.forward == [1 + CALL, [0.0] * 3]
    # With its forward, which it computes anyway.
    assert costs.backward[1] == [3 + CALL] * 3
    assert costs.input_grad[1] == [2 + CALL] * 3
    # The first has no gradient of its input.
    assert costs.weight_grad[0] == costs.backward[0]
    assert costs.input_grad[0] == 0


def test_one_thread_has_all_programs_and_transfers_run():
    still = dataclasses.replace(GIVEN, action_seconds=10.0)
    schedule = schedules.gpipe(2, 4)
    arguments = [0, 0], [1, 1], ["none"] * 2, schedule, Hardware(2)
    made = evaluate(still, *arguments)
    # Forwards and backwards, and between them transfers without gradients.
    assert made.host == 10.0 * (4 * 4 + 4)
    assert made.seconds == made.host > made.timeline.makespan
    assert made.bubble == 1 - sum(made.timeline.busy) / 2 / made.host
    fast = evaluate(dataclasses.replace(GIVEN, action_seconds=0.0), *arguments)
    assert fast.seconds == fast.timeline.makespan
    assert fast.bubble == pytest.approx(fast.timeline.bubble_fraction)


def test_a_host_that_holds_all_up_is_told():
    layers = [nn.Dense(256) for _ in range(4)]

    def planned(**options):
        sample = jax.ShapeDtypeStruct((8, 256), float)
        return jpipe.plan(
            layers, sample, optax.sgd(0.1), num_devices=2, measure=False, **options
        )

    free = planned()
    assert not any(line.startswith("host: ") for line in free.forecast.reasons)
    # Two devices, whether it pays or not.
    (one,) = (memory.total for memory in free.forecast.memory)
    tight = planned(memory_limit=one * 2 // 3, num_microbatches=4)
    assert tight.schedule.num_ranks == 2
    says = [line for line in tight.forecast.reasons if line.startswith("host: ")]
    assert says[0].startswith(
        "host: one thread has all programs and transfers run, which takes "
    )
    # Of the last stage forwards are a part of the backwards.
    assert tight.forecast.seconds == 2e-5 * (3 * 4 + 2 * 4)


def test_an_estimate_is_told_what_an_action_takes():
    made = profile("blocks", measure=False, action_seconds=3e-6)
    assert made.action_seconds == 3e-6
    assert made.made["seconds per action"] == "3e-06"
    assert profile("blocks", measure=False).action_seconds == 2e-5
    with pytest.raises(ValueError, match="action_seconds=1e-06 is for an estimate"):
        profile("blocks", action_seconds=1e-6)
    with pytest.raises(ValueError, match="action_seconds=-1; needs a number"):
        profile("blocks", measure=False, action_seconds=-1)
    bad = dataclasses.replace(made, action_seconds=float("nan"))
    (fault,) = bad.faults()
    assert fault == "action_seconds=nan; needs a number, finite and not negative"


def test_it_is_measured_and_saved(tmp_path):
    made = jpipe.profile([nn.Dense(3)], X, rounds=2)
    assert 1e-7 < made.action_seconds < 1e-2
    made.save(tmp_path / "costs.json")
    assert Profile.load(tmp_path / "costs.json") == made


def test_cores_that_devices_share_are_told(monkeypatch):
    def reasons(**options):
        # So slow that all devices are worth it.
        layers = [nn.Dense(3) for _ in range(4)]
        made = jpipe.profile(layers, X, num_microbatches=4, **options)
        slow = tuple(dataclasses.replace(x, forward=1.0) for x in made.layers)
        made = dataclasses.replace(made, layers=slow)
        plan = jpipe.plan(
            layers,
            X,
            optax.sgd(0.1),
            num_devices=4,
            num_microbatches=4,
            profile=made,
            **options,
        )
        assert plan.schedule.num_ranks == 4
        return plan.forecast.reasons

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    says = "cores: 4 devices share the 3 cores of this machine"
    assert any(line.startswith(says) for line in reasons(rounds=1))
    assert not any("cores" in line for line in reasons(measure=False))

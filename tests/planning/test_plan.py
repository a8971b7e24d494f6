"""`jpipe.plan`: what it decides fits, is predicted as it is simulated, and runs."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import draw, schedules
from jpipe.planning._forecast import as_run
from jpipe.planning._profile import LayerProfile, Profile

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


class Down(nn.Module):
    @nn.compact
    def __call__(self, x):
        jpipe.stash("across", x)
        return nn.avg_pool(x, (2, 2), (2, 2))


class Up(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2) + jpipe.pop("across")


def convolutions():
    """Layers so fine that a stage keeps much less than all of them by themselves."""
    parts = [(nn.Conv(8, (3, 3)), nn.BatchNorm(), nn.relu) for _ in range(3)]
    return [*itertools.chain(*parts), nn.Conv(4, (3, 3))]


def across():
    return [nn.Conv(4, (3, 3)), Down(), nn.relu, nn.Conv(4, (3, 3)), nn.tanh, Up()]


IMAGES = jax.ShapeDtypeStruct((16, 8, 8, 3), float)
KEEPING = [
    (model, SAMPLE, schedule, remat)
    for schedule in ("1f1b", "gpipe", "zb_h1", "zb_v")
    for remat in ("min_cut", "full")
]
KEEPING += [(convolutions, IMAGES, "1f1b", "min_cut"), (across, IMAGES, "1f1b", "dots")]


@pytest.mark.parametrize(("made", "sample", "schedule", "remat"), KEEPING)
def test_what_a_plan_would_hold_is_what_the_list_of_instructions_says(
    made, sample, schedule, remat
):
    """Parameters, gradients and activations."""
    plan = jpipe.plan(
        made(),
        sample,
        optax.sgd(0.1),
        num_devices=2,
        data=1,
        num_microbatches=4,
        measure=False,
        action_seconds=0.0,
        schedules=schedule,
        remat=remat,
    )
    pipe = jpipe.pipeline(made(), plan=plan)
    x = jax.random.normal(jax.random.key(0), sample.shape)
    state = pipe.init_train_state(jax.random.key(1), x, optax.sgd(0.1))
    targets = jnp.ones(sample.shape[0])
    step = pipe.train_step(lambda y, t: y.mean() - t.mean(), optax.sgd(0.1))
    pipe.compile(step, state, x, targets)
    stages = pipe.plan.stages
    params = [sum(s.param_bytes for s in stages if s.rank == r) for r in (0, 1)]
    assert [memory.gradients for memory in plan.forecast.memory] == params
    held = [stage.held_bytes for stage in stages]
    # The pipeline has a loss, whose residuals are a few numbers.
    assert [s.held_bytes for s in plan.stages] == pytest.approx(held, abs=64)
    for said, own in zip(plan.stages, stages, strict=True):
        # Neither has the last stage of the other, where a forward has its own program.
        assert said.kept.keys() == own.kept.keys()
        assert list(said.kept.values()) == pytest.approx([*own.kept.values()], abs=64)
        assert said.again == own.again or said.index == len(stages) - 1
    for (_, peak), memory in zip(
        pipe.plan.peak_bytes, plan.forecast.memory, strict=True
    ):
        held = memory.parameters + memory.gradients + memory.held
        # Beside these: the mini-batch, its targets, losses, keys.
        assert held == pytest.approx(peak, abs=512)


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


def test_a_limit_is_kept_by_keeping_less():
    free = planned(schedules=("gpipe",))
    most = max(memory.total for memory in free.forecast.memory)
    tight = planned(schedules=("gpipe",), memory_limit=most - 1)
    assert max(memory.total for memory in tight.forecast.memory) < most
    assert (tight.balance, tight.remat) != (free.balance, free.remat)


def test_devices_that_are_left_idle_are_told():
    plan = jpipe.plan(
        [nn.Dense(2)], SAMPLE, optax.sgd(0.1), num_devices=3, measure=False
    )
    assert plan.schedule.num_ranks == 1
    assert plan.forecast.reasons[-3].startswith("2 of 3 devices are left idle: nothing")


def stashes(x):
    jpipe.stash("x", x)
    return 2 * x


def pops(x):
    return x + jpipe.pop("x")


def test_plans_are_saved_and_drawn():
    plan = planned()
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    for text in ("{", "[]", "{}", plan.to_json().replace('"stages"', '"other"')):
        with pytest.raises(ValueError, match="no plan as"):
            jpipe.Plan.from_json(text)
    with pytest.raises(ValueError, match=r"'plan.json': .*Path\(path\).read_text\(\)"):
        jpipe.Plan.from_json("plan.json")
    with pytest.raises(TypeError, match=r"is a PosixPath; needs the text"):
        jpipe.Plan.from_json(pathlib.Path("plan.json"))
    fast = jpipe.plan(
        model(), SAMPLE, optax.sgd(0.1), num_devices=2, measure=False, schedules="1f1b"
    )
    assert jpipe.Plan.from_json(fast.to_json()) == fast
    assert "Infinity" not in fast.to_json()
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
    with pytest.raises(ValueError, match="a plan without a forecast"):
        draw.svg(jpipe.pipeline([nn.relu], 2).plan)
    text = draw.svg(plan)
    assert text.count("<title>parameters: ") == plan.schedule.num_ranks


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


def test_a_pipeline_keeps_what_its_plan_foretold():
    plan = planned()
    pipe = jpipe.pipeline(model(), plan=plan)
    assert pipe.plan.forecast == plan.forecast
    assert "runner-up: " in str(pipe)


def test_a_loss_without_targets_is_told_what_it_was_given():
    with pytest.raises(TypeError) as raised:
        planned(loss=lambda y, t: jnp.mean((y - t) ** 2))
    assert raised.value.__notes__[-1] == (
        "loss= was given and no targets=: the loss was called with () in their place"
    )


def test_stages_of_one_plan_may_keep_different_things():
    free = planned(schedules=("gpipe",))
    first, last = (memory.total for memory in free.forecast.memory)
    tight = planned(schedules="gpipe", memory_limit=max(first, last) - 1)
    both = planned(schedules="gpipe", remat="full")
    assert set(both.remat) == {"full"}
    assert tight.forecast.seconds <= both.forecast.seconds


def test_a_schedule_is_named_as_it_is_for_a_pipeline():
    plan = planned(schedules="1f1b")
    assert planned(schedules="one_f_one_b") == plan
    assert planned(schedules=(schedules.one_f_one_b,)) == plan


def test_schedules_that_have_no_order_are_told():
    options = {"num_devices": 2, "num_microbatches": 1, "measure": False}
    with pytest.raises(ValueError, match="have no order for 11 layers on 2 devices"):
        jpipe.plan(model(), SAMPLE, optax.sgd(0.1), schedules="dualpipe_v", **options)
    with pytest.raises(ValueError, match="'forward_only' runs no backward, and a plan"):
        planned(schedules=("forward_only", "gpipe"))


def test_layers_may_come_one_by_one():
    options = {"num_devices": 2, "measure": False}
    made = jpipe.plan((x for x in model()), SAMPLE, optax.sgd(0.1), **options)
    assert made == jpipe.plan(model(), SAMPLE, optax.sgd(0.1), **options)


def test_faults_are_told_together():
    with pytest.raises(ValueError, match=r"num_devices=0.*bandwidth=-1.*nope.*'most'"):
        jpipe.plan(
            model(),
            SAMPLE,
            optax.sgd(0.1),
            num_devices=0,
            bandwidth=-1,
            schedules=("nope",),
            remat=("most",),
            measure=False,
        )


def test_a_plan_decides_alone_and_for_its_own_layers():
    plan = planned()
    with pytest.raises(ValueError, match="it decides balance, which was given too"):
        jpipe.pipeline(model(), plan=plan, balance=[5, 6])
    with pytest.raises(ValueError, match="for 11 layers, there are 10"):
        jpipe.pipeline(model()[:-1], plan=plan)
    with pytest.raises(ValueError, match="layer 0 is tanh, in the plan Dense"):
        jpipe.pipeline([nn.tanh, *model()[1:]], plan=plan)
    with pytest.raises(TypeError, match=r"what jpipe\.plan returned"):
        jpipe.pipeline(model(), plan=[5, 6])


def test_costs_as_they_run():
    """Forwards that their backwards follow are a part of them."""
    profile = Profile(
        (LayerProfile("a", 1.0, 2.0, 0.5, 1.5), LayerProfile("b", 1.0, 2.0))
    )
    schedule = schedules.one_f_one_b(2, 3)
    costs = as_run(profile.costs([1, 1], remat="full"), schedule, keeps_nothing=True)
    assert costs.forward == [1.0, [0.0, 0.0, 0.0]]
    assert costs.backward == [3.0, [3.0, 3.0, 3.0]]
    assert costs.weight_grad[0] == 3.0
    assert costs.input_grad[0] == 0.0
    split = as_run(
        dataclasses.replace(profile.costs([1, 1], remat="full")),
        schedules.gpipe(2, 3),
        keeps_nothing=False,
    )
    assert split.forward[1] == [1.0, 1.0, 1.0]


def test_what_is_no_argument_is_told():
    wrong = {
        "profile": r"profile='x' is a str; needs what jpipe.profile returned",
        "schedule": r"plan takes no schedule=, but schedules=",
        "turbo": r"plan takes no turbo=$",
        "devices": r"plan takes no devices=, but .*num_devices=",
    }
    for name, says in wrong.items():
        with pytest.raises(TypeError, match=says):
            jpipe.plan(model(), SAMPLE, optax.adam(1e-3), **{name: "x"})
    with pytest.raises(ValueError, match=r"schedules: build_v is unknown: choose from"):
        jpipe.plan(model(), SAMPLE, optax.adam(1e-3), schedules=schedules.build_v)
    for name in ("schedules", "remat"):
        with pytest.raises(ValueError, match=rf"{name}=\(\): name one or more"):
            planned(**{name: ()})
    with pytest.raises(ValueError, match="longer than a float can say"):
        planned(bandwidth=5e-324)
    for other in (3, [3]):
        with pytest.raises(TypeError, match="a int is not a timeline: draw what Sch"):
            draw.svg(other)


def test_a_plan_without_a_loss_says_what_it_does_not_count():
    assert "loss: none was given (loss=, targets=)" in str(planned())
    targets = jax.ShapeDtypeStruct((16, 4), float)
    counted = jpipe.plan(
        model(),
        SAMPLE,
        optax.adam(1e-3),
        num_devices=2,
        measure=False,
        loss=ref.mse,
        targets=targets,
    )
    assert "loss: none" not in str(counted)


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

"""A profile is data: saved in one place, and planned with in another."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.planning._scaled_profiles import interpolate
from jpipe.schedules._costs import TIME_FIELDS

from .chains import LayerProfile, Profile, SkipProfile
from .models import SAMPLE, cross_entropy, dense

HERE = jax.devices()[0].device_kind
TX = optax.adam(1e-3)


def estimate(num_microbatches=(2, 16), layers=None, **options):
    layers = dense(3) if layers is None else layers
    options = {"measure": False, "num_microbatches": num_microbatches, **options}
    return jpipe.profile(layers, SAMPLE, **options)


def plan(profile, layers=None, sample=SAMPLE, **options):
    layers = dense(3) if layers is None else layers
    options = {"num_devices": 2, "bandwidth": 1e9, **options}
    return jpipe.plan(layers, sample, TX, profile=profile, **options)


def origin_of(made):
    (line,) = (x for x in made.forecast.reasons if x.startswith("profile: "))
    return line


@pytest.mark.parametrize("limit", [None, 2**30])
def test_a_saved_profile_leaves_the_choice_of_micro_batches_and_data(limit):
    saved = Profile.from_json(estimate().to_json())
    assert saved.sizes == [1, 8]
    planned = plan(saved, memory_limit=limit)
    # Without a profile a plan makes one of these two sizes.
    expected = plan(None, measure=False, memory_limit=limit)
    assert planned.forecast == expected.forecast
    assert planned == expected
    counts = {plan(saved, num_microbatches=m).schedule.num_microbatches for m in (1, 8)}
    assert counts == {1, 8}
    assert plan(saved, data=2).data == 2


class Normed(nn.Module):
    """A model whose sections read values of earlier ones."""

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
        return nn.Dense(4)(nn.relu(h) + nn.Dense(16)(x))


@pytest.mark.parametrize(
    "model", [nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)]), Normed()]
)
def test_a_saved_profile_of_sections_gives_the_plan_of_the_model(model):
    """Of one example too, with which sections of a batch norm are others."""
    batch = {"loss_fn": cross_entropy, "targets": jnp.zeros(4, jnp.int32)}
    profile = jpipe.profile(model, jnp.ones((4, 8)), measure=False, **batch)
    assert profile.sizes == [1, 2]
    assert profile.skips
    saved = Profile.from_json(profile.to_json())
    assert saved == profile
    batch |= {"num_devices": 2, "bandwidth": 1e9}
    for count in (1, 4):
        batch["num_microbatches"] = count
        plan = jpipe.plan(model, jnp.ones((4, 8)), TX, profile=saved, **batch)
        assert plan.schedule.num_microbatches == count
    expected = jpipe.plan(model, jnp.ones((4, 8)), TX, measure=False, **batch)
    assert plan.forecast.seconds == expected.forecast.seconds
    assert plan.stages == expected.stages


def test_a_skip_that_a_size_lacks_has_no_bytes_there():
    layers = tuple(LayerProfile(name, 1.0, 2.0) for name in "abcd")
    early = SkipProfile("output 0", 0, 2, bytes=8, cotangent_bytes=4)
    late = dataclasses.replace(early, target=3, bytes=16, cotangent_bytes=16)
    profile = Profile(
        layers,
        skips=(early,),
        larger=Profile(layers, skips=(late,), microbatch_size=5),
    )
    assert Profile.from_json(profile.to_json()) == profile
    half = SkipProfile("output 0", 0, 2, bytes=4, cotangent_bytes=2)
    other_half = SkipProfile("output 0", 0, 3, bytes=8, cotangent_bytes=8)
    for size, skips in {1: (early,), 3: (half, other_half), 5: (late,)}.items():
        assert interpolate(profile, size).skips == skips


def test_costs_of_other_sizes_are_between_or_beyond_those_of_the_two_around_them():
    def sized(size, seconds, larger=None):
        layer = LayerProfile("a", seconds, 2 * seconds, residual_bytes={"none": size})
        return Profile((layer,), microbatch_size=size, larger=larger)

    profile = sized(2, 1.0, sized(4, 2.0, sized(8, 10.0)))
    assert profile.sizes == [2, 4, 8]
    assert Profile.from_json(profile.to_json()) == profile
    for size, seconds in ((1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (6, 6.0), (10, 14.0)):
        (layer,) = interpolate(profile, size).layers
        assert (layer.forward, layer.backward) == (seconds, 2 * seconds)
        assert layer.residual_bytes == {"none": size}
        assert interpolate(profile, size).sizes == [size]
    assert interpolate(sized(4, 2.0), 8).layers == sized(4, 2.0).layers


def test_no_cost_beyond_the_profiled_sizes_is_less_than_such_a_size_can_cost():
    """16 examples take 1 s, and four times as many seven times as long."""
    layers, x = dense(3), jax.ShapeDtypeStruct((256, 8), jnp.float32)
    small = jpipe.profile(layers, x, num_microbatches=(4, 16), measure=False)

    def timed(profile, seconds, **fields):
        times = {"forward": seconds, "backward": 2 * seconds}
        halves = {"input_grad": seconds, "weight_grad": seconds}
        layers = tuple(
            dataclasses.replace(layer, **times, **halves) for layer in profile.layers
        )
        return dataclasses.replace(profile, layers=layers, **fields)

    steep = timed(small, 1.0, larger=timed(small.larger, 7.0))
    chosen = plan(steep, layers, x, num_devices=4, data=1)
    # Of 32 micro-batches of 8, where the line is at 0, none takes less than half of 16.
    least = 16 * 3 * len(steep.layers) / 4
    assert chosen.forecast.seconds >= least
    falling = timed(small, 2.0, larger=timed(small.larger, 1.0))
    whole = plan(falling, layers, x, num_devices=1, num_microbatches=1)
    assert whole.forecast.seconds == pytest.approx(3 * len(falling.layers), rel=1e-2)


def test_a_profile_of_one_size_fixes_the_number_of_examples_of_a_device():
    profile = estimate(4)
    assert profile.sizes == [4]
    planned = plan(profile)
    assert planned.schedule.num_microbatches * planned.data == 4
    says = "it is of micro-batches of 4 alone, so that num_microbatches times data is"
    assert says in origin_of(planned)
    for chosen in (plan(estimate()), plan(profile, num_microbatches=4)):
        assert says not in origin_of(chosen)
    with pytest.raises(ValueError, match=r"16 examples in parts of 4, of which alone"):
        plan(profile, num_microbatches=8)


def test_a_plan_says_which_sizes_are_extrapolated():
    profile = estimate((4, 8))
    says = "micro-batches of 16 are extrapolated from 2 and 4 examples"
    assert says in origin_of(plan(profile, num_microbatches=1))
    assert "extrapolated" not in origin_of(plan(profile, num_microbatches=4))


def test_a_plan_says_where_it_was_profiled_and_planned():
    there = {"how": "measured", "device": "NVIDIA H100", "jax": "0.1", "flax": "0.2"}
    profile = dataclasses.replace(estimate((1, 16)), origin=there)
    assert re.fullmatch(
        rf"profile: measured on NVIDIA H100, jax 0.1, flax 0.2; planned on {HERE} "
        rf"\(.*\), jax {jax.__version__}, flax [\d.]+",
        origin_of(plan(profile)),
    )
    same = there | {"jax": jax.__version__}
    planned = plan(dataclasses.replace(profile, origin=same))
    assert "planned on" in origin_of(planned)
    assert origin_of(planned).count("jax ") == 1
    assert "planned on" not in origin_of(plan(estimate()))
    by_hand = plan(dataclasses.replace(profile, origin={}))
    assert origin_of(by_hand) == "profile: of unknown origin"


def test_the_precision_of_all_products_belongs_to_the_place():
    with jax.default_matmul_precision("bfloat16"):
        profile = estimate()
    assert ", matmul precision bfloat16, jax " in origin_of(plan(profile))
    assert plan(profile).forecast.costs == plan(estimate()).forecast.costs
    imprecise = [nn.Dense(4, precision="default")]
    with jax.default_matmul_precision("highest"):
        profile = estimate(layers=[nn.Dense(4)])
        with pytest.raises(ValueError, match=r"another model:\n  \* layer 0: 'Dense: "):
            plan(profile, imprecise)


def test_a_profile_is_of_any_mini_batch_but_of_no_other_model():
    profile = estimate()
    larger = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    assert plan(profile, sample=larger, num_microbatches=16).forecast.seconds > 0
    layers = dense(3)
    layers[4] = nn.Dense(31)
    with pytest.raises(ValueError, match="the profile is of another model") as refusal:
        plan(profile, layers)
    text = str(refusal.value)
    assert [line.split(":")[0] for line in text.splitlines()[1:-1]] == [
        "  * layer 4",
        "  * layer 5",
        "  * layer 6",
    ]
    with pytest.raises(
        ValueError, match=r"(?s)\* layer 6: .*the same loss_fn=, targets="
    ):
        plan(profile, loss_fn=lambda y, _: jnp.mean(y))
    narrow = jax.ShapeDtypeStruct((16, 7), jnp.float32)
    with pytest.raises(ValueError, match=r"\* input: 'float32\[1,8\]' in the profile"):
        plan(profile, sample=narrow)
    with pytest.raises(ValueError, match="train: 'False' in the profile, 'True' here"):
        plan(estimate(train=False))


def test_options_of_a_profile_are_not_taken_beside_one():
    with pytest.raises(TypeError, match=r"profile=jpipe\.profile\(layers, x, rounds="):
        plan(None, rounds=3)
    with pytest.raises(ValueError, match="peak_flops= is for making a profile"):
        plan(estimate(), peak_flops=1e12)
    with pytest.raises(TypeError, match=r"plan needs a jpipe.Profile, such as"):
        plan([1, 2])
    with pytest.raises(TypeError, match=r"jpipe\.plan.*lose"):
        plan(estimate(), lose=1)


# A plan decides the number of micro-batches; the others are for a profile alone.
NOT_OF_A_PLAN = {"num_microbatches", "rounds", "device", "train"}


def test_a_plan_lists_the_arguments_of_a_profile():
    of_plan = inspect.signature(jpipe.plan).parameters
    of_profile = inspect.signature(jpipe.profile).parameters
    for name in of_profile.keys() - NOT_OF_A_PLAN:
        assert of_plan[name].default == of_profile[name].default
        assert of_plan[name].annotation == of_profile[name].annotation


@pytest.mark.parametrize(
    ("num_examples", "sizes"), [(64, [4, 16]), (6, [1, 2]), (4, [1, 2]), (1, [1])]
)
def test_by_default_a_profile_has_two_sizes(num_examples, sizes):
    profile = jpipe.profile([jnp.sin], jnp.ones((num_examples, 3)), measure=False)
    assert profile.sizes == sizes
    says = "the costs of 16 examples are stored too"
    assert (says in str(profile)) == (num_examples == 64)


def test_a_profile_of_larger_micro_batches_is_one_of_the_same_layers():
    profile = estimate()
    small = dataclasses.replace(profile.larger, microbatch_size=1)
    other = dataclasses.replace(profile.larger, layers=profile.layers[:-1])
    faults = {
        "larger.microbatch_size=1: needs more than 1": small,
        "larger has other layers or remat modes": other,
    }
    for fault, larger in faults.items():
        text = dataclasses.replace(profile, larger=larger).to_json()
        with pytest.raises(ValueError, match=f"{fault}$"):
            Profile.from_json(text)


def test_a_plan_after_a_step_that_ran_has_the_times_of_its_stages():
    """The first of two equal stages ran three times as long as the second."""
    layers = [nn.Dense(32), nn.tanh, nn.Dense(32), nn.tanh]
    x = jax.random.normal(jax.random.key(0), (16, 32))
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline(layers, 4, balance=[2, 2])
    state = pipe.init_train_state(jax.random.key(1), x, tx)
    step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx, donate=False)
    step(state, x, x)
    measured = jpipe.schedules.Costs(
        forward=[0.3, 0.0],  # the last forward is a part of its backward
        backward=[0.6, 0.3],
        in_seconds=True,
    )
    options = {"num_devices": 2, "num_microbatches": 4, "data": 1, "bandwidth": 1e12}
    options |= {"schedules": "1f1b", "remat": "min_cut", "measure": False}
    same = jpipe.plan(
        layers, x, tx, ran=step.plan, costs=measured, balance=[2, 2], **options
    )
    costs = same.forecast.costs
    assert costs.forward == pytest.approx([0.3, 0.0], rel=1e-6)
    assert costs.backward == pytest.approx([0.6, 0.3], rel=1e-6)
    # A forward that was fused took its share of that program.
    apart = options | {"schedules": "gpipe", "balance": [2, 2]}
    costs = jpipe.plan(layers, x, tx, ran=step.plan, costs=measured, **apart)
    forward = costs.forecast.costs.forward[-1]
    assert 0.05 < np.ravel(forward)[0] < 0.15
    # So the first layer alone is the first stage.
    free = jpipe.plan(layers, x, tx, ran=step.plan, costs=measured, **options)
    assert free.balance == [1, 3]
    assert any(line.startswith("costs: ") for line in free.forecast.reasons)
    # What a step measured will do.
    profiled = step.profile(state, x, x).costs
    jpipe.plan(layers, x, tx, ran=step.plan, costs=profiled, **options)

    with pytest.raises(ValueError, match=r"belong together: type ran=step\.plan"):
        jpipe.plan(layers, x, tx, ran=step.plan)
    with pytest.raises(TypeError, match=r"costs= a list: type ran=step\.plan"):
        jpipe.plan(layers, x, tx, ran=step.plan, costs=[1.0])
    wrong = jpipe.schedules.Costs(forward=[1.0] * 3, in_seconds=True)
    with pytest.raises(ValueError, match="costs= are of 3 stages, ran= of 2"):
        jpipe.plan(layers, x, tx, ran=step.plan, costs=wrong)
    with pytest.raises(ValueError, match=r"ran= has the layers .* the model has"):
        jpipe.plan(layers[:3], x, tx, ran=step.plan, costs=measured, **options)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "none"), ("1f1b", "full"), ("zb_h1", "min_cut")]
)
def test_the_times_of_a_step_that_ran_hold_for_micro_batches_of_all_sizes(
    schedule, remat
):
    """Forwards took three times as long, and backwards five times."""

    def timed(profile):
        layers = [
            dataclasses.replace(
                layer,
                forward=3 * layer.forward,
                backward=5 * layer.backward,
                input_grad=5 * layer.input_grad,
                weight_grad=5 * layer.weight_grad,
            )
            for layer in profile.layers
        ]
        larger = None if profile.larger is None else timed(profile.larger)
        return dataclasses.replace(profile, layers=tuple(layers), larger=larger)

    estimated = estimate(action_seconds=0.0)
    options = {"num_devices": 3, "balance": (2, 2, 3), "data": 1}
    options |= {"schedules": schedule, "remat": remat}
    ran = plan(timed(estimated), num_microbatches=4, **options)
    step = {"ran": ran, "costs": ran.forecast.costs}
    for count in (4, 8):
        options["num_microbatches"] = count
        found = plan(estimated, **step, **options).forecast.costs
        expected = plan(timed(estimated), **options).forecast.costs
        for name in TIME_FIELDS.values():
            # In the last stage a forward may be a part of its backward.
            seconds = getattr(found, name)[:-1]
            assert seconds == pytest.approx(getattr(expected, name)[:-1], rel=1e-9)
        if count == 4:
            assert found.backward == pytest.approx(expected.backward, rel=1e-9)


def test_a_step_that_ran_in_less_than_its_actions_take_leaves_their_least_time():
    estimated = estimate(action_seconds=1.0)
    options = {"balance": (3, 4), "schedules": "gpipe", "remat": "none", "data": 1}
    options["num_microbatches"] = 4
    ran = plan(estimated, **options)
    short = jpipe.schedules.Costs(
        forward=[0.5, 0.5], backward=[0.5, 0.5], in_seconds=True
    )
    costs = plan(estimated, ran=ran, costs=short, **options).forecast.costs
    assert costs.forward == pytest.approx([1.0, 1.0], rel=1e-6)

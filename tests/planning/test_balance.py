"""`balance=` by name: what is equal, and of what."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules
from jpipe.planning._balance import balanced
from jpipe.planning._profile import LayerProfile, Profile

from .. import reference as ref
from . import chains
from .models import X

SAMPLE = jax.ShapeDtypeStruct((16, 8), float)


@pytest.mark.parametrize("kind", ["time", "flops", "params", "memory"])
def test_a_balance_by_name(kind):
    profile = Profile(
        tuple(
            LayerProfile(
                f"layer{i}",
                t,
                t,
                param_bytes=int(t),
                flops=t,
                kept_bytes={"min_cut": 0},
            )
            for i, t in enumerate([1.0, 1.0, 1.0, 3.0])
        )
    )
    pipe = jpipe.pipeline(
        [nn.relu] * 4, 4, balance=kind, sample=profile, devices=jax.devices()[:2]
    )
    assert [len(stage.layers) for stage in pipe.plan.stages] == [3, 1]


def test_it_says_what_to_type():
    with pytest.raises(ValueError, match="balance='time' needs sample="):
        jpipe.pipeline([nn.relu] * 4, 4, balance="time")
    with pytest.raises(ValueError, match="choose 'time', 'flops', 'params', 'memory'"):
        jpipe.pipeline([nn.relu] * 4, 4, balance="speed", sample=SAMPLE)
    with pytest.raises(TypeError, match="num_microbatches=None"):
        jpipe.pipeline([nn.relu] * 4)


def sizes(profile, schedule="1f1b", number=8, remat="min_cut", ranks=2):
    layers, devices = [nn.relu] * len(profile.layers), jax.devices()[:ranks]
    return balanced("memory", layers, number, profile, devices, schedule, remat, 0)


def test_memory_counts_what_a_schedule_has_in_flight():
    layer = LayerProfile("a", 1.0, 1.0, kept_bytes={"min_cut": 100, "none": 100})
    given = Profile((layer,) * 6)
    # The first rank has two micro-batches in flight, the last has one.
    assert sizes(given) == [2, 4]
    assert sizes(given, number=1) == [3, 3]
    assert sizes(given, "gpipe") == [3, 3]
    heavy = dataclasses.replace(layer, param_bytes=10**6)
    assert sizes(Profile((heavy,) * 6)) == [3, 3]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved"])
@pytest.mark.parametrize("remat", ["min_cut", "full", "none"])
def test_no_cut_needs_less_on_the_fullest_rank(name, remat):
    rng = random.Random(f"{name} {remat}")
    ranks, schedule = 2, schedules.BY_NAME[name](2, 4)
    for _ in range(5):
        given = chains.profile(rng, 7, skips=1, ties=1)

        def most(balance, given=given):
            costs = given.costs(balance, remat=remat)
            # As the limit of `partition` counts: held between actions.
            costs = dataclasses.replace(
                costs, boundary_bytes=0, cotangent_bytes=0, skips=()
            )
            return max(schedule.simulate(costs).peak_bytes)

        found = most(sizes(given, name, 4, remat, ranks))
        every = chains.every_cut(7, schedule.num_stages)
        assert found == min(map(most, every))


def test_modes_that_no_profile_knows_are_taken_for_those_it_knows():
    given = chains.profile(random.Random(0), 6)
    policy = jax.checkpoint_policies.dots_saveable
    assert sizes(given, remat=policy) == sizes(given)
    assert sizes(given, remat="except_last") == sizes(given, remat="full")
    assert sizes(given, remat=["full", "min_cut"]) == sizes(
        given, remat=("full", "min_cut")
    )


def refusal(profile, layers, kind="flops", **options):
    with pytest.raises(ValueError, match="sample= is a profile of something") as raised:
        jpipe.pipeline(layers, 2, balance=kind, sample=profile, **options)
    return str(raised.value)


def test_a_profile_of_other_layers_is_refused():
    layers = [ref.dense(6), jnp.tanh, ref.dense(4), ref.dense(3)]
    made = jpipe.profile(layers, X, num_microbatches=2, measure=False)
    two = {"devices": jax.devices()[:2]}
    jpipe.pipeline(layers, 2, balance="flops", sample=made, **two)
    message = refusal(made, layers[:-1])
    assert "it is of 4 layers, there are 3" in message
    message = refusal(made, [layers[0], jnp.sin, ref.dense(5), layers[3]], **two)
    assert (
        "layer 1 is sin: float32[4,6] -> float32[4,6], in the profile tanh: float32"
        in message
    )
    assert "layer 2 is Dense: float32[4,6] -> float32[4,5], in the profile" in message
    assert "layer 3 is Dense: float32[4,5]" in message
    assert "layer 0" not in message
    assert message.endswith("profile of these layers, or an input of a mini-batch")


def test_a_profile_of_another_device_or_version_is_refused():
    layers = [ref.dense(6), jnp.tanh]
    made = jpipe.profile(layers, X, num_microbatches=2, rounds=1)
    two = {"devices": jax.devices()[:2]}
    jpipe.pipeline(layers, 2, balance="time", sample=made, **two)
    other = dataclasses.replace(made, made={**made.made, "device": "TPU", "jax": "0.1"})
    message = refusal(other, layers, "time", **two)
    assert f"jax is {jax.__version__}, in the profile 0.1" in message
    assert "device is cpu (" in message
    assert ", in the profile TPU" in message


def test_a_profile_with_a_loss_or_of_a_tree_is_not_refused_for_that():
    layers = [ref.dense(6), ref.dense(6)]
    two = {"devices": jax.devices()[:2]}
    loss = {"loss": ref.mse, "targets": jnp.ones((8, 6))}
    made = jpipe.profile(layers, X, num_microbatches=2, measure=False, **loss)
    jpipe.pipeline(layers, 2, balance="params", sample=made, **two)
    layers = [lambda x: x["a"], ref.dense(6)]
    made = jpipe.profile(layers, {"a": X}, measure=False)
    jpipe.pipeline(layers, 2, balance="params", sample=made, **two)
    assert "layer 1 is tanh, in the profile Dense: " in refusal(
        made, [layers[0], jnp.tanh], **two
    )


def test_the_batch_axis_is_that_of_the_pipeline():
    layers, x = [lambda x: x.T, ref.dense(6)], jnp.ones((3, 8))
    options = {"in_axes": 1, "devices": jax.devices()[:2]}
    made = jpipe.profile(layers, x, num_microbatches=8, in_axes=1, measure=False)
    for sample in x, made:
        pipe = jpipe.pipeline(layers, 8, balance="params", sample=sample, **options)
        assert [len(stage.layers) for stage in pipe.plan.stages] == [1, 1]

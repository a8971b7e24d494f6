"""`balance=` by name: what is equal, and of what."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe import schedules

from .. import reference as ref
from . import chains
from .chains import LayerProfile, Profile
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


def sizes(profile, schedule="1f1b", number=8, remat="min_cut"):
    layers, devices = [nn.relu] * len(profile.layers), jax.devices()[:2]
    options = {"balance": "memory", "sample": profile, "schedule": schedule}
    pipe = jpipe.pipeline(layers, number, devices=devices, remat=remat, **options)
    return pipe.plan.balance


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("1f1b", "full"),
        ("gpipe", "min_cut"),
        ("zb_h1", "none"),
        ("interleaved", "none"),
    ],
)
def test_no_cut_needs_less_on_the_fullest_rank(name, remat):
    rng = random.Random(f"{name} {remat}")
    schedule = schedules.BY_NAME[name](2, 4)
    for _ in range(5):
        given = chains.profile(rng, 7, skips=1, ties=1)

        def most(balance, given=given):
            costs = given.costs(balance, remat=remat)
            # As the limit of `partition` counts: held between actions.
            costs = dataclasses.replace(
                costs, boundary_bytes=0, cotangent_bytes=0, skips=()
            )
            return max(schedule.simulate(costs).peak_bytes)

        found = most(sizes(given, name, 4, remat))
        every = chains.every_cut(7, schedule.num_stages)
        assert found == min(map(most, every))


def test_a_profile_of_other_layers_is_refused():
    layers = [ref.dense(6), jnp.tanh, ref.dense(4)]
    made = jpipe.profile(layers, X, num_microbatches=2, measure=False)
    two = {"devices": jax.devices()[:2], "balance": "flops", "sample": made}
    jpipe.pipeline(layers, 2, **two)
    for others in (layers[:-1], [layers[0], jnp.sin, layers[2]]):
        with pytest.raises(ValueError, match="sample= is a profile of something else"):
            jpipe.pipeline(others, 2, **two)

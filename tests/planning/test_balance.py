"""`balance=` by name: what is equal, and of what."""

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
from .test_partition import needs

SAMPLE = jax.ShapeDtypeStruct((16, 8), float)


@pytest.mark.parametrize("kind", ["time", "flops", "params", "memory"])
def test_a_balance_by_name(kind):
    own = {"residual_bytes": {"min_cut": 0}}
    profile = Profile(
        tuple(
            LayerProfile("a", t, t, param_bytes=int(t), flops=t, **own)
            for t in (1.0, 1.0, 1.0, 3.0)
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


@pytest.mark.parametrize(
    ("name", "remat"), [("gpipe", "full"), ("zb_h1", "none"), ("interleaved", "none")]
)
def test_no_cut_needs_less_on_the_fullest_rank(name, remat):
    schedule = schedules.BY_NAME[name](2, 4)
    run = {"schedule": name, "remat": remat}
    for seed in range(3):
        given = chains.profile(random.Random(seed), 7, skips=1, ties=1)
        modes = (remat,) * schedule.num_stages
        every = chains.every_cut(7, schedule.num_stages)
        least = min(max(needs(given, cut, modes, schedule)) for cut in every)
        own = {"devices": jax.devices()[:2], "balance": "memory", "sample": given}
        pipe = jpipe.pipeline([nn.relu] * 7, 4, **own, **run)
        limit = {"num_microbatches": 4, "max_bytes": least}
        expected = jpipe.partition(given, schedule.num_stages, **limit, **run)
        assert pipe.plan.balance == expected


def test_a_profile_of_other_layers_is_refused():
    layers = [ref.dense(6), jnp.tanh, ref.dense(4)]
    made = jpipe.profile(layers, X, num_microbatches=2, measure=False)
    two = {"devices": jax.devices()[:2], "balance": "flops", "sample": made}
    jpipe.pipeline(layers, 2, **two)
    for others in (layers[:-1], [layers[0], jnp.sin, layers[2]]):
        with pytest.raises(ValueError, match="sample= is a profile of something else"):
            jpipe.pipeline(others, 2, **two)

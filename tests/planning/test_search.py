"""How a plan is searched: what is not tried, what is asked, what is told meanwhile."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._instructions import _progress
from jpipe.planning import _search
from jpipe.planning._forecast import Hardware
from jpipe.planning._reasons import _same
from jpipe.planning._request import Request
from jpipe.planning._search import Space, search
from jpipe.schedules import BY_NAME

from .. import reference as ref
from . import chains

NAMES = tuple(name for name in BY_NAME if name != "forward_only")


def space(seed, limit=None):
    """A random chain, in micro-batches of several sizes."""
    rng = random.Random(seed)
    one = chains.profile(rng, 9, skips=seed % 2)
    call = rng.choice([0.0, 0.01, 1.0])
    fields = vars(one) | {"action_seconds": call}
    profiles = {
        count: type(one)(
            **fields
            | {
                "layers": tuple(
                    type(x)(**vars(x) | {"forward": x.forward / count, "backward": b})
                    for x in one.layers
                    for b in [x.backward / count]
                )
            }
        )
        for count in (1, 3, 6)
    }
    hardware = Hardware(3, limit, bandwidth=rng.choice([None, 1000.0]))
    return Space(profiles, [0] * 9, hardware, NAMES, ("min_cut", "full"), made=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [None, 1000])
def test_what_is_not_tried_is_none_of_the_best(seed, limit, monkeypatch):
    given = space(seed, limit)
    found = search(given)
    with monkeypatch.context() as patch:
        patch.setattr(_search, "_least", lambda *_: 0.0)
        everything = search(given)
    assert len(found) <= len(everything)

    def told(candidates):
        """What the reasons speak of."""
        best = candidates[0]
        others = [c for c in candidates if not _same(c, best)]
        full = [c for c in candidates if c.schedule.num_ranks == 3]
        return [c[0].seconds for c in ([best], others, full)]

    assert told(found) == told(everything)
    tried = [c.seconds for c in everything if c.fits(given.hardware)]
    assert all(
        _search._least(profile, ranks, count)
        <= min(
            c.seconds
            for c in everything
            if (c.schedule.num_ranks, c.schedule.num_microbatches) == (ranks, count)
        )
        for count, profile in given.profiles.items()
        for ranks in (1, 2, 3)
    )
    assert tried or limit


def test_a_good_part_of_it_is_not_tried():
    given = space(1)
    numbers = {
        (c.schedule.num_ranks, c.schedule.num_microbatches) for c in search(given)
    }
    assert 0 < len(numbers) < 9


def test_it_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "_LONG", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    search(space(0))
    told = capsys.readouterr().err
    assert "jpipe: 0 of 9 numbers of devices and micro-batches planned in 0 s" in told
    assert told.endswith("\r\x1b[K")


def model():
    return [nn.Embed(30, 8), ref.Residual(8), nn.Dense(3)]


class TestBatchSize:
    def test_replaces_that_of_the_sample(self):
        def planned(examples, **options):
            tokens = jnp.zeros((examples, 5), jnp.int32)
            return jpipe.plan(
                model(),
                tokens,
                optax.sgd(0.1),
                num_devices=2,
                measure=False,
                loss=ref.mse,
                targets=jnp.ones((examples, 5, 3)),
                **options,
            )

        assert planned(4, batch_size=64) == planned(64)
        assert planned(64) != planned(4)

    def test_is_along_the_batch_axes(self):
        given = {"a": np.ones((2, 6)), "b": np.ones(7), "c": np.ones((6, 1))}
        axes = {"a": 1, "b": None, "c": -2}
        request = Request([], given, in_axes=axes).resized(9)
        found = {name: spec.shape for name, spec in request.sample.items()}
        assert found == {"a": (2, 9), "b": (7,), "c": (9, 1)}
        assert request.targets == ()

    def test_is_for_layers_that_are_measured_too(self):
        plan = jpipe.plan(
            [nn.Embed(30, 8), nn.Dense(3)],
            jnp.zeros((2, 5), jnp.int32),
            optax.sgd(0.1),
            num_devices=1,
            batch_size=6,
            num_microbatches=3,
            rounds=1,
        )
        assert plan.schedule.num_microbatches == 3

    @pytest.mark.parametrize("wrong", [0, 2.0, True, "8"])
    def test_is_refused_with_all_else(self, wrong):
        says = rf"num_devices=0: .*; batch_size={wrong!r}: needs an int of at least 1"
        with pytest.raises(ValueError, match=says):
            jpipe.plan(
                model(),
                jnp.zeros((2, 5), jnp.int32),
                optax.sgd(0.1),
                num_devices=0,
                batch_size=wrong,
                measure=False,
            )


def labels(params):
    """By depth: the first layer's parameters, and those of the others."""
    return tuple(
        jax.tree.map(lambda _, i=i: "first" if i == 0 else "rest", entry)
        for i, entry in enumerate(params)
    )


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "masked": optax.masked(
        optax.adam(1e-3),
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
    "several": optax.multi_transform(
        {"first": optax.sgd(0.1), "rest": optax.adam(1e-3)}, labels
    ),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "averaged": optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trainable", [None, "1/*"])
def test_the_optimizer_is_counted_as_a_train_step_spreads_it(name, trainable):
    tx, sample = OPTIMIZERS[name], jax.ShapeDtypeStruct((8, 5), jnp.int32)
    tied = nn.Embed(30, 8)
    layers = [tied, ref.Residual(8), ref.Residual(8), jpipe.layer(tied, "attend")]
    plan = jpipe.plan(
        layers,
        sample,
        tx,
        num_devices=2,
        data=1,
        num_microbatches=2,
        measure=False,
        action_seconds=0.0,
        schedules="1f1b",
        trainable=trainable,
    )
    assert plan.schedule.num_ranks == 2
    pipe = jpipe.pipeline(layers, plan=plan)
    x = jnp.zeros(sample.shape, sample.dtype)
    options = {} if trainable is None else {"trainable": trainable}
    state = pipe.init_train_state(jax.random.key(0), x, tx, **options)
    held = dict.fromkeys(jax.devices()[:2], 0)
    for leaf in jax.tree.leaves(state.opt_state):
        held[leaf.device] += leaf.nbytes
    assert [memory.optimizer for memory in plan.forecast.memory] == [*held.values()]

"""Random streams of any name: one key serves all that a module asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

KEY = jax.random.key(1)


class Cell(nn.Module):
    @nn.compact
    def __call__(self, h, x):
        return h, x + jax.random.normal(self.make_rng("latent"), x.shape)


class Decoder(nn.Module):
    """Draws from a stream of its own in each step of a scan."""

    @nn.compact
    def __call__(self, x):
        split = {"params": False, "latent": True}
        scan = nn.scan(Cell, in_axes=1, out_axes=1, split_rngs=split)
        return scan()(jnp.zeros(()), x)[1]


class Noise(nn.Module):
    """Draws from a stream if there is one, after it has put something aside."""

    @nn.compact
    def __call__(self, x, train):
        jpipe.stash("x", x)
        if train and self.has_rng("noise"):
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return x


def back(x):
    return x - jpipe.pop("x")


def outputs(layers, x, rngs, num_microbatches=2):
    """What a forward in training gives."""
    pipe = jpipe.pipeline(layers, num_microbatches)
    variables = pipe.init(jax.random.key(0), x)
    return pipe.apply(variables, x, rngs=rngs, train=True)


def test_a_stream_is_split_as_a_scan_says():
    x = jnp.zeros((2, 6, 3))
    y = outputs([Decoder(), jnp.negative], x, KEY)
    assert len(np.unique(y)) == y.size
    named = outputs([Decoder(), jnp.negative], x, {"latent": KEY})
    assert len(np.unique(named)) == named.size


@pytest.mark.parametrize("rngs", [KEY, {"noise": KEY}])
def test_there_is_every_stream(rngs):
    y = outputs([Noise(), back], jnp.zeros((4, 3)), rngs)
    assert len(np.unique(y)) == y.size


def test_a_stream_that_was_not_given_is_none():
    assert not outputs([Noise(), back], jnp.zeros((4, 3)), {"dropout": KEY}).any()
    assert not outputs([Noise(), back], jnp.zeros((4, 3)), None).any()


class Both(nn.Module):
    """Draws from two streams at one place."""

    @nn.compact
    def __call__(self, x):
        names = "noise", "dropout"
        noise, mask = (jax.random.normal(self.make_rng(n), x.shape) for n in names)
        return jnp.concatenate([noise, mask], axis=1)


def test_two_streams_are_two():
    y = outputs([Both(), jnp.negative], jnp.zeros((4, 3)), KEY)
    assert len(np.unique(y)) == y.size


def test_training_draws_anew_in_each_step():
    tx = optax.sgd(0.0)
    layers = [nn.Dense(3), Noise(), back]
    x = jnp.ones((4, 3))
    losses = []
    for devices in ([0, 1, 2], [0, 0, 0]):
        own = [jax.devices()[i] for i in devices]
        pipe = jpipe.pipeline(layers, 2, devices=own)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, metrics = step(state, x, jnp.zeros((4, 3)))
            losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    assert losses[:2] == losses[2:]
    assert min(losses) > 0.1


def test_what_is_seen_twice_runs_once(capfd):
    """A trace that is given up leaves no effects."""

    class Prints(nn.Module):
        @nn.compact
        def __call__(self, x):
            jax.debug.print("here")
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    outputs([Prints(), jnp.negative], jnp.zeros((4, 3)), KEY)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 2


def test_evaluation_does_not_depend_on_what_was_trained_before():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    def layer(x, train, rngs):
        if rngs is None:
            return x
        if train:
            return Inner().apply({}, x, rngs=rngs)
        return x + len(rngs)

    x = jnp.zeros((4, 3))
    pipes = [jpipe.pipeline([layer, jnp.negative], 2) for _ in range(2)]
    pipes[1].apply(({}, {}), x, rngs=KEY, train=True)
    first, second = (pipe.apply(({}, {}), x, rngs=KEY) for pipe in pipes)
    ref.assert_equal(first, second)

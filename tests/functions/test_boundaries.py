"""Boundaries between stages that carry more than floats."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.schedules import Schedule

from .. import reference as ref

DOTS = jax.checkpoint_policies.dots_saveable


def test_keys_may_pass_through_the_stages():
    layers = [
        lambda p: (jnp.sin(p[0]), p[1]),
        nn.Sequential([lambda p: p[0], ref.dense(4)]),
        jnp.tanh,
    ]
    x, targets = ref.regression(4)
    keys = jax.random.split(jax.random.key(1), 4)
    for remat in ("full", "none"):
        pipe = jpipe.pipeline(layers, 2, remat=remat)
        variables = pipe.init(jax.random.key(0), (x, keys))
        value = pipe.value_and_grad(ref.mse)(variables, (x, keys), targets)
        params = ref.params_of(variables)
        expected = ref.value_and_grad(layers, params, (x, keys), targets)
        ref.assert_close(value, expected, ref.FLOAT32)


class TestBoundariesWithoutGradients:
    """A stage whose input is integers only has no first half of a backward."""

    def layers(self):
        class Digitize(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jnp.argmax(nn.Dense(7)(x), -1)

        return [Digitize(), nn.Embed(7, 5), nn.Dense(4)]

    @pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "gpipe"])
    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_trains_under_every_schedule(self, schedule, remat):
        x, targets = ref.regression(8)
        values = [
            pipe.value_and_grad(ref.mse)(pipe.init(jax.random.key(0), x), x, targets)
            for pipe in (
                jpipe.pipeline(self.layers(), 4, schedule=schedule, remat=remat),
                jpipe.sequential(self.layers(), 4),
            )
        ]
        ref.assert_close(*values, ref.FLOAT32)

    def test_a_profile_does_not_wait_for_what_it_does_not_read(self):
        def first(x):
            jpipe.stash("x", x)
            return jnp.argmax(x, -1)

        def last(x):
            return x + jpipe.pop("x")[:, :4]

        order = Schedule.from_text(
            """
            0F0 0F1 0B0 0F2 0B1 0B2
            1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
            2F0 2B0 2F1 2B1 2F2 2B2
            """
        )
        layers = [ref.dense(6), first, nn.Embed(6, 4), last, ref.dense(4)]
        pipe = jpipe.pipeline(layers, 3, balance=[2, 1, 2], schedule=order)
        x, targets = ref.regression(6)
        state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
        assert pipe.profile_step(state, (x, targets), ref.mse).makespan > 0

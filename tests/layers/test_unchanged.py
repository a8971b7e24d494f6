"""A module that is changed after a pipeline was made of it is noticed."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = 1.0
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.drop(self.norm(x)) * self.scale


def freeze(module):
    module.norm.eval()


def scale(module):
    module.scale = 2.0


def drop(module):
    module.drop.rate = 0.5


CHANGES = {
    freeze: r"norm\.use_running_average of layer 0 \(Scaled\) was False and is True",
    scale: r"scale of layer 0 \(Scaled\) was 1\.0 and is 2\.0",
    drop: r"drop\.rate of layer 0 \(Scaled\) was 0\.0 and is 0\.5",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps_is_noticed(change):
    module, tx = Scaled(), optax.sgd(0.1)
    x, targets = ref.regression(4)
    pipe = jpipe.pipeline([module, nn.Dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    change(module)
    for call in (
        lambda: step(state, x, targets),
        lambda: pipe.apply(state.variables, x),
        lambda: pipe.value_and_grad(ref.mse)(state.variables, x, targets),
        lambda: pipe.init(jax.random.key(0), x),
    ):
        with pytest.raises(
            ValueError, match=f"make a new one.*(?s:.*){CHANGES[change]}"
        ):
            call()
    again = jpipe.pipeline([module, nn.Dense(4)], 2)
    before = jax.tree.map(jnp.copy, state.model_state)
    state, _ = again.train_step(ref.mse, tx)(state, x, targets)
    if change is freeze:
        ref.assert_equal(state.model_state, before)


def test_equal_values_and_other_arrays_are_no_change():
    module = Scaled()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([module, nn.Dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    module.scale = float("1")
    module.norm.mean[...] = jnp.ones(5)
    module(x)
    pipe.apply(variables, x)


def test_an_attribute_that_hides_one_of_the_class_is_noticed():
    class Switched(nnx.Module):
        deterministic = False
        last: jax.Array
        gain: int

        def __call__(self, x):
            return x * (1 if self.deterministic else 10)

    module = Switched()
    x, _ = ref.regression(4)
    pipe = jpipe.pipeline([jpipe.layer(module, lambda module, x: module(x))], 2)
    pipe.apply(({},), x)
    module.train()  # as it was
    module.last = jnp.ones(2)
    pipe.apply(({},), x)
    module.eval()
    fault = r"deterministic of layer 0 .* was False and is True"
    with pytest.raises(ValueError, match=f"make a new one(?s:.*){fault}"):
        pipe.apply(({},), x)
    module = Switched()
    pipe = jpipe.pipeline([jpipe.layer(module, lambda module, x: module(x))], 2)
    module.gain = 2
    with pytest.raises(ValueError, match=r"gain of layer 0 .* was None and is 2"):
        pipe.apply(({},), x)

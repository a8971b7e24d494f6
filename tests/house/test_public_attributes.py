"""What users see on the objects that they hold, and no part of how these work."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe

PIPE = jpipe.pipeline([nn.Dense(3), jnp.cos], 2)
KEY = jax.random.key(0)
X = jnp.ones((4, 3))
TX = optax.sgd(0.1)


def mse(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


GRADIENT = PIPE.value_and_grad(mse)
STEP = PIPE.train_step(mse, TX)
_METHODS = "check compile plan profile"
# object -> its attributes
ATTRIBUTES = {
    "Pipeline": (
        lambda: PIPE,
        "apply check compile devices init init_train_state jit modules "
        "num_microbatches num_stages optimizer place plan schedule train_step "
        "value_and_grad",
    ),
    "TrainState": (
        lambda: STEP(PIPE.init_train_state(KEY, X, TX), X, X)[0],
        "model_state opt_state params replace rng step variables",
    ),
    "TrainStep": (lambda: STEP, _METHODS),
    "ValueAndGrad": (lambda: GRADIENT, _METHODS),
    "FunctionGradient": (
        lambda: jpipe.value_and_grad(mse, 2),
        f"{_METHODS} jit optimizer place",
    ),
    "Plan": (
        lambda: PIPE.plan,
        "balance compiled_actions cuts data forecast from_json layer_names "
        "param_shapes peak_bytes remat schedule skips stages to_json",
    ),
    "Profile": (
        lambda: jpipe.profile([jnp.sin], X, measure=False),
        "action_seconds costs fingerprint from_json input_bytes larger layers link "
        "microbatch_size origin sizes skips ties to_json",
    ),
    "Report": (
        lambda: GRADIENT.compile(PIPE.init(KEY, X), X, X),
        "flops peak_bytes programs seconds",
    ),
    "CheckReport": (
        lambda: GRADIENT.check(PIPE.init(KEY, X), X, X),
        "is_same layers loss microbatch_sizes raise_if_different",
    ),
    "Layer": (lambda: jpipe.Layer(None, None), "apply init name"),
    "Stacked": (
        lambda: jpipe.Stacked([X, X], 0),
        "arrays axis block_until_ready devices dtype is_deleted memory_space nbytes "
        "ndim pieces shape size weak_type",
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_object_shows_what_its_page_describes_and_no_more(name):
    make, attributes = ATTRIBUTES[name]
    instance = make()
    assert type(instance) is getattr(jpipe, name)
    shown = {attribute for attribute in dir(instance) if attribute[0] != "_"}
    assert shown == {*attributes.split()}


def test_each_class_of_the_package_is_listed():
    classes = {name for name in jpipe.__all__ if inspect.isclass(getattr(jpipe, name))}
    assert classes == {*ATTRIBUTES}

"""Errors of variables: of another model, of another place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .model import KEY, TARGETS, X, mse, says


def test_variables_of_a_model_that_does_not_share():
    shared = nn.Dense(3)
    pipe = jpipe.pipeline([shared, nn.relu, shared, nn.relu], 2)
    apart = jpipe.pipeline([nn.Dense(3), nn.relu, nn.Dense(3), nn.relu], 2)
    with pytest.raises(ValueError, match=says("tied: variables[2]['params']")):
        pipe.apply(apart.init(KEY, X), X)


def test_variables_of_another_model_are_compared_leaf_by_leaf(pipe):
    other = jpipe.pipeline(
        [nn.Dense(6), nn.LayerNorm(use_scale=False), nn.Dense(2, use_bias=False)],
        2,
        balance=[2, 1],
    )
    strange = other.init(KEY, X)
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        pipe.apply(strange, X)
    assert str(refusal.value).splitlines()[1:] == [
        "  * missing: variables[2]['params']['bias'] (2,)",
        "  * surplus: variables[1]['params']['bias'] (6,)",
        "  * variables[0]['params']['bias'] has shape (6,), the model needs (5,)",
        "  * variables[0]['params']['kernel'] has shape (3, 6), the model needs (3, 5)",
        "  * variables[2]['params']['kernel'] has shape (6, 2), the model needs (5, 2)",
    ]
    with pytest.raises(ValueError, match="not those of this model"):
        pipe.value_and_grad(mse)(strange, X, TARGETS)


def test_batch_of_another_width_than_the_variables(pipe, variables):
    x = np.ones((4, 7), np.float32)
    match = says(
        "for x of float32[4,7]; one of the two is wrong",
        "variables[0]['params']['kernel'] has shape (3, 5)",
        "(7, 5)",
    )
    with pytest.raises(ValueError, match=match):
        pipe.apply(variables, x)
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(variables, x, TARGETS)
    with pytest.raises(ValueError, match=match):
        pipe.init_train_state(KEY, x, optax.sgd(0.1), variables=variables)


def test_variables_of_the_wrong_length(pipe, variables):
    match = says("2 entries", "3 layers", "one entry per layer", "Pipeline.init")
    for use in (lambda v: pipe.apply(v, X), pipe.place):
        with pytest.raises(ValueError, match=match):
            use(variables[:2])


def test_variables_that_are_no_tuple_of_mappings(pipe, variables):
    with pytest.raises(ValueError, match=says("dict", "3 layers", "Pipeline.init")):
        pipe.apply(variables[0], X)
    with pytest.raises(ValueError, match=says("variables[0] is", "[2] is a list")):
        pipe.apply((3, {}, []), X)


def test_variables_with_a_leaf_that_is_no_array(pipe, variables):
    strange = {"params": {"kernel": "text", "bias": 0.5}}
    with pytest.raises(
        (TypeError, ValueError),
        match=says(
            "variables[2]['params']['bias']", "variables[2]['params']['kernel']"
        ),
    ):
        pipe.apply((*variables[:2], strange), X)


def test_variables_on_other_devices_are_refused_until_they_are_placed(pipe, variables):
    elsewhere = jax.device_put(variables, jax.devices()[7])
    match = says(
        "pipe.place(variables)",
        "stage 0 (layers 0 to 1) runs on",
        f"its variables are on {jax.devices()[7]}",
        "stage 1 (layers 2 to 2) runs on",
    )
    with pytest.raises(ValueError, match=match):
        pipe.apply(elsewhere, X)
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(elsewhere, X, TARGETS)
    expected = pipe.apply(variables, X)
    np.testing.assert_array_equal(pipe.apply(pipe.place(elsewhere), X), expected)


def test_variables_on_the_host_are_refused_until_they_are_placed(pipe, variables):
    on_host = jax.tree.map(np.asarray, variables)
    with pytest.raises(ValueError, match=says("pipe.place(variables)", "stage 0")):
        pipe.apply(on_host, X)
    expected = pipe.apply(variables, X)
    np.testing.assert_array_equal(pipe.apply(pipe.place(on_host), X), expected)


def test_values_of_nnx_in_other_containers():
    class Two(nnx.Module):
        def __init__(self):
            self.parts = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in (0, 1)])

        def __call__(self, x):
            return self.parts[1](self.parts[0](x))

    module, x = Two(), jnp.ones((4, 3))
    pipe = jpipe.pipeline([module], 2)
    state = nnx.state(module, nnx.Param)
    pure = nnx.to_pure_dict(state)
    as_list = {"parts": [pure["parts"][i] for i in (0, 1)]}
    with pytest.raises(ValueError, match=says("['parts'] is a list, the model needs")):
        pipe.apply([{"params": as_list}], x)
    with pytest.raises(ValueError, match=says("give nnx.to_pure_dict(state)")):
        pipe.apply([{"params": state}], x)
    assert pipe.apply([{"params": pure}], x).shape == x.shape

"""What errors and warnings of a pipeline of one model say."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)
RNG = np.random.default_rng(2)
X, TARGETS = (RNG.normal(size=(8, n)).astype(np.float32) for n in (6, 3))


class Normed(nn.Module):
    """Two layers, and a norm with running statistics."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x))


class Sum(nn.Module):
    """A model of several inputs."""

    @nn.compact
    def __call__(self, first, second, *, mask=None):
        x = first["x"] + second
        return nn.Dense(3)(nn.Dense(8)(x if mask is None else x * mask))


# What does not fit, and what is said of it.
INPUTS = {
    "too few": (
        lambda: jpipe.inputs({"x": X}, X[:4], mask=X),
        r"batch size:\n  \* input 0\['x'\]: 8, .*\n  \* input 1: 4, .*\n  \* mask: 8,",
    ),
    "a scalar": (
        lambda: jpipe.inputs({"x": X}, X, mask=np.ones(())),
        r"\n  \* mask of shape \(\) has no axis 0",
    ),
    "text": (
        lambda: jpipe.inputs({"x": np.array(["a"])}, X),
        r"\n  \* input 0\['x'\] is a ndarray of dtype <U1",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_named_as_in_the_call(name):
    make, says = INPUTS[name]
    with pytest.raises((TypeError, ValueError), match=says):
        jpipe.pipeline(Sum(), 2, num_stages=2).init(KEY, make())


@pytest.mark.parametrize("is_whole", ["params", "state"])
def test_gaps_of_gradients_are_explained(is_whole):
    """Parameters, or the state, are of all leaves, the gradients of a few."""
    pipe = jpipe.pipeline(Normed(), 2, num_stages=2)
    variables = pipe.init(KEY, X)
    params, chosen = variables["params"], {"trainable": "*Dense_1*", "has_state": True}
    find = pipe.value_and_grad(ref.mse, **chosen)
    _, grads = find(variables, X, TARGETS)
    adam = pipe.optimizer(optax.adamw(1e-2))
    with pytest.raises(ValueError, match="gradients are None") as caught:
        if is_whole == "params":
            adam.update(grads, adam.init(params), params)
        else:
            adam.update(grads, adam.init(params))
    says = str(caught.value)
    assert says.startswith("4 gradients are None")
    assert "grads['BatchNorm_0']['bias'] is the first" in says
    # What the error tells to type is what runs.
    make = re.search(r"free = (jax\.tree\.map\(.*\)), opt_state", says)
    names = {"jax": jax, "grads": grads, "params": params}
    free = eval(make[1], names)
    found, _ = adam.update(grads, adam.init(free), free)
    plain, host = optax.adamw(1e-2), ref.on_host((grads, free))
    expected, _ = plain.update(host[0], plain.init(host[1]), host[1])
    ref.assert_close(found, expected, ref.FLOAT32)

"""What is returned are arrays of their own, as of `jax.jit`: none dies with another."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe

from .. import reference as ref
from ..mesh.stages import mesh


class Through(nn.Module):
    """Returns its input, a parameter and a constant as they are, each twice."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (4,))
        c = self.variable("constants", "c", jnp.arange, 4.0)
        found = {"x": x, "w": w, "c": c.value, "made": x * w + c.value}
        return {"one": found, "two": dict(found)}


def total(y, t):
    return jnp.sum(y["one"]["made"] * t)


def with_aux(y, t):
    return total(y, t), {"outputs": y, "targets": t}


PIPELINES = {
    "on two devices": lambda layers: jpipe.pipeline(layers, 1),
    "on a mesh": lambda layers: jpipe.pipeline(
        layers, 1, mesh=mesh(2, 1, 2), balance=[1, 1]
    ),
}


def given(pipe):
    """Variables, input and targets, as they are and on the host."""
    x, t = jax.device_put((jnp.arange(4.0), jnp.ones(4)), jax.devices()[0])
    variables = pipe.init(jax.random.key(0), x)
    return (variables, x, t), ref.on_host((variables, x, t))


def delete(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def check(found, expected, args):
    """Asserts that results outlive the arguments and each other."""
    delete(args)
    ref.assert_equal(found, expected)
    leaves = jax.tree.leaves(found)
    assert len(set(map(id, leaves))) == len(leaves)
    for i, leaf in enumerate(leaves):
        leaf.delete()
        assert not any(other.is_deleted() for other in leaves[i + 1 :])


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_results_of_gradients_and_of_apply_are_arrays_of_their_own(make):
    layer = Through()
    pipe = make([lambda x: x, layer])
    args, (variables, x, t) = given(pipe)
    value_and_grad = pipe.value_and_grad(
        with_aux, reduction="sum", has_aux=True, aux_axes=0, has_state=True
    )
    y = layer.apply(variables[1], x)
    aux = {"outputs": y, "targets": t}
    state = {}, {"constants": variables[1]["constants"]}
    grads = {}, {"w": x}
    found = (value_and_grad(*args), pipe.apply(*args[:2]))
    check(found, (((y["one"]["made"].sum(), aux, state), grads), y), args)

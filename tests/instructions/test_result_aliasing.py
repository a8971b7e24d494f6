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


PIPELINES = {
    "on two devices": lambda layers: jpipe.pipeline(layers, 1),
    "on a mesh": lambda layers: jpipe.pipeline(
        layers, 1, mesh=mesh(2, 1, 2), balance=[1, 1]
    ),
}


def loss_fn(y, t):
    return jnp.sum(y["one"]["made"] * t), {"outputs": y, "targets": t}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_results_of_gradients_and_of_apply_are_arrays_of_their_own(make):
    layer = Through()
    pipe = make([lambda x: x, layer])
    x, t = jax.device_put((jnp.arange(4.0), jnp.ones(4)), jax.devices()[0])
    args = pipe.init(jax.random.key(0), x), x, t
    variables, x, t = ref.on_host(args)
    y = layer.apply(variables[1], x)
    state = {}, {"constants": variables[1]["constants"]}
    aux = {"outputs": y, "targets": t}
    expected = ((y["one"]["made"].sum(), aux, state), ({}, {"w": x})), y

    find = pipe.value_and_grad(
        loss_fn, reduction="sum", has_aux=True, aux_axes=0, has_state=True
    )
    found = find(*args), pipe.apply(*args[:2])
    # They outlive the arguments, and each other.
    for leaf in jax.tree.leaves(args):
        leaf.delete()
    ref.assert_equal(found, expected)
    leaves = jax.tree.leaves(found)
    assert len(set(map(id, leaves))) == len(leaves)
    for i, leaf in enumerate(leaves):
        leaf.delete()
        assert not any(other.is_deleted() for other in leaves[i + 1 :])

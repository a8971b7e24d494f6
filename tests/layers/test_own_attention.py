"""Attention with a backward of its own, as every fast one has: of each example."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend import core

from jpipe._jaxprs import _jaxpr, _precise

from .. import reference as ref
from .asked import gradient_by

LENGTH, HEADS, SIZE = 6, 2, 8
WIDTH = LENGTH * 4


def _scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5


def _forward(q, k, v):
    scores = _scores(q, k)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    y = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - total), v)
    return y, (q, k, v, y, total)


def _backward(kept, ct):
    """Computes the weights again, which were not kept."""
    q, k, v, y, total = kept
    weights = jnp.exp(_scores(q, k) - total)
    of_weights = jnp.einsum("bqhd,bkhd->bhqk", ct, v)
    row = jnp.einsum("bqhd,bqhd->bhq", ct, y)[..., None]
    of_scores = weights * (of_weights - row) * SIZE**-0.5
    return (
        jnp.einsum("bhqk,bkhd->bqhd", of_scores, k),
        jnp.einsum("bhqk,bqhd->bkhd", of_scores, q),
        jnp.einsum("bhqk,bqhd->bkhd", weights, ct),
    )


def _of_all(kept, ct):
    q, k, v = _backward(kept, ct)
    return q, k - k.mean(0), v


def attention(backward):
    @jax.custom_vjp
    def attend(q, k, v):
        return _forward(q, k, v)[0]

    attend.defvjp(_forward, backward)
    return attend


class Attention(nn.Module):
    """All of its gradients are there, but that of the bias of its keys, which is zero.

    What one computes for it is rounding errors.
    """

    dtype: jnp.dtype
    backward: object = _backward

    @nn.compact
    def __call__(self, x):
        rows = nn.LayerNorm()(x.reshape(len(x), LENGTH, -1))
        q, k, v = (
            nn.DenseGeneral((HEADS, SIZE), dtype=self.dtype, name=name)(rows)
            for name in "qkv"
        )
        y = attention(self.backward)(q, k, v)
        return x + nn.DenseGeneral(4, axis=(-2, -1))(y).reshape(x.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_nothing_is_said_of_rounding_errors(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, grads = gradient_by(Attention(dtype), width=WIDTH)
    _, whole = gradient_by(Attention(dtype), 1, WIDTH)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole))
    ref.assert_close(grads, whole, 8 * float(jnp.finfo(dtype).eps), largest)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_that_mixes_examples_is_told(dtype):
    with pytest.warns(UserWarning, match=r"layer 1 \(Attention\) has a backward"):
        gradient_by(Attention(dtype, _of_all), width=WIDTH)


def test_products_are_measured_in_all_bits():
    """On accelerators, which choose how many, so that parts differ from the whole."""

    def function(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=2)
        x = jax.lax.cond(x[0, 0] > 0, lambda c: c @ c, lambda c: c, x)
        x = jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ c + 1, x)
        x = jax.jit(jax.checkpoint(lambda c: jnp.matmul(c, c, precision="high")))(x)
        return jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")

    def products(closed):
        for eqn in closed.jaxpr.eqns:
            if "precision" in eqn.params:
                yield eqn.params["precision"]
            for inner in _jaxpr.inside(eqn):
                yield from products(inner)

    x = jnp.eye(3) / 4
    with jax.default_matmul_precision(None):
        closed = jax.make_jaxpr(function)(x)
    precise = _precise.precise(closed, lambda eqn: None)
    assert len([*products(closed)]) == len([*products(precise)]) == 5
    assert {*products(precise)} == {(jax.lax.Precision.HIGHEST,) * 2}
    made = core.jaxpr_as_fun(precise)(x)
    np.testing.assert_allclose(made, [function(x)], rtol=1e-6)

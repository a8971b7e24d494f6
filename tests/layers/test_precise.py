"""Layers are measured in float32 at least, whatever they compute in and with."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import jpipe

from .. import reference as ref

BATCH, PARTS, WIDTH = 8, 2, 4
TOGETHER = r"gives other results for examples together than for parts of them\n"
P = jax.sharding.PartitionSpec


class BesideAParameter(nn.Module):
    """What is beside the examples may be the same for all."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        return jnp.stack([*jnp.sin(x)]), jnp.exp(scale)


def multiplied(made, t):
    rows, scale = made
    return jnp.mean((rows * scale - t) ** 2)


def in_few_bits(row):
    """A loop that begins with a literal."""

    def step(carried):
        count, total = carried
        return count + 1, total + row.mean().astype(jnp.bfloat16)

    return lax.while_loop(lambda c: c[0] < 3, step, (0, jnp.bfloat16(0)))[1]


def on_a_mesh(row):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("a",), axis_types=kinds)
    total = jax.shard_map(
        lambda row: lax.psum(jnp.sin(row), "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
    )
    return total(row)


def scanned(row):
    def step(carried, x):
        return (carried + x).astype(jnp.bfloat16), carried

    return lax.scan(step, jnp.bfloat16(0), row.astype(jnp.bfloat16))[1].astype(
        row.dtype
    )


def by_bits(row):
    bits = lax.bitcast_convert_type(row.astype(jnp.bfloat16), jnp.uint16)
    return lax.bitcast_convert_type(bits & 0xFFF0, jnp.bfloat16).astype(row.dtype)


def drawn_in_a_loop(row):
    key = jax.random.key(0)
    return lax.scan(lambda c, x: (c, x * jax.random.normal(key, ())), 0, row)[1]


OF_ROWS = [in_few_bits, on_a_mesh, scanned, by_bits]


def gradient(layer, loss_fn=ref.mse):
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    pipe = jpipe.sequential([layer], PARTS)
    return pipe.value_and_grad(loss_fn)(pipe.init(jax.random.key(1), x), x, x)


@pytest.mark.parametrize("of_row", OF_ROWS)
def test_rows_one_by_one_are_left_alone(of_row):
    # A warning is an error.
    gradient(lambda x: jnp.stack([row * of_row(row).astype(x.dtype) for row in x]))


@pytest.mark.parametrize("of_row", [*OF_ROWS, drawn_in_a_loop])
def test_rows_that_meet_are_told(of_row):
    def layer(x):
        made = jnp.stack([row * of_row(row).astype(x.dtype) for row in x])
        return x + made.mean()

    with pytest.warns(UserWarning, match=TOGETHER):
        gradient(layer)


def test_a_parameter_beside_the_examples_is_left_alone():
    gradient(BesideAParameter(), multiplied)

"""A parameter made of a Python number has no dtype of its own until it is updated."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jpipe


class Weak(nn.Module):
    """A parameter made of a number: of the narrowest dtype that it meets."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", lambda _: jnp.full(3, 0.5, self.dtype))


class WeakNnx(nnx.Module):
    def __init__(self, dtype=None):
        self.scale = nnx.Param(0.5 if dtype is None else jnp.asarray(0.5, dtype))

    def __call__(self, x):
        return x * self.scale


@pytest.mark.parametrize("kind", [Weak, WeakNnx])
class TestANumberWithoutADtype:
    """JAX computes in another dtype from its first update on."""

    def test_is_refused_where_it_matters(self, kind):
        pipe = jpipe.pipeline([kind(), jnp.sin], 2)
        key, x = jax.random.key(0), jnp.ones((4, 3), jnp.bfloat16)
        message = (
            rf"layer 0 \({kind.__name__}\) makes variables\[0\]\['params'\]\['scale'\] "
            r"of a Python number, .* in bfloat16 until .* in float32 from then on"
        )
        with pytest.raises(ValueError, match=message):
            pipe.init(key, x)
        variables = pipe.init(key, x.astype(jnp.float32))
        with pytest.raises(ValueError, match=message):
            pipe.apply(variables, x)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_with_a_dtype_it_keeps_it(self, kind, dtype):
        pipe = jpipe.pipeline([kind(dtype), jnp.sin], 2)
        x = jnp.ones((4, 3), jnp.bfloat16)
        variables = pipe.init(jax.random.key(0), x)
        assert pipe.apply(variables, x).dtype == dtype

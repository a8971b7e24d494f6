"""Random streams of nnx modules: they follow from the step, not from the cut."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe

from .. import reference as ref
from .nnx_modules import KEY, Noisy


def test_dropout_depends_on_key_micro_batch_layer_and_stream_only():
    """That the cut does not matter is in the rows of `tests.matrix`."""
    x, key = jnp.ones((8, 16)), jax.random.key(9)

    def masks(*layers, rngs=key):
        pipe = jpipe.pipeline(layers, 4)
        return np.asarray(pipe.apply(({},) * len(layers), x, rngs=rngs, train=True))

    first = masks(Noisy(nnx.Rngs(0)))
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first[:, 0] != first[:, 1]).any()
    assert (first[:2] != first[2:4]).any()
    assert (first != masks(jnp.abs, Noisy(nnx.Rngs(0)))).any()
    assert (first != masks(Noisy(nnx.Rngs(0)), rngs=jax.random.key(10))).any()
    # The seed of the module is for its initialization.
    np.testing.assert_array_equal(first, masks(Noisy(nnx.Rngs(5))))
    # One key given for dropout serves the stream that nnx.Rngs(0) makes.
    again = masks(Noisy(nnx.Rngs(0)), rngs={"dropout": key})
    np.testing.assert_array_equal(first, again)


def test_recurrent_layer_needs_no_key():
    """From zeros, for which none is needed."""
    x = jax.random.normal(KEY, (4, 3, 5))
    layer = nnx.RNN(nnx.LSTMCell(5, 5, rngs=nnx.Rngs(0)))
    pipe = jpipe.sequential([layer], 2)
    variables = pipe.init(KEY, x)
    loss, _ = pipe.value_and_grad(ref.mse)(variables, x, x)
    expected = layer(x)
    ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT32)
    ref.assert_close(loss, ref.mse(expected, x), ref.FLOAT32)


def test_call_that_names_rngs_receives_them():
    seen = []

    class Asks(nnx.Module):
        def __call__(self, x, use_running_average, *, rngs=None, deterministic):
            seen.append((use_running_average, deterministic, rngs is None))
            return x + jax.random.normal(rngs.noise(), x.shape) if rngs else x

    class Both(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, rngs):
            with_call_rngs = nnx.Dropout(0.5)(x, rngs=rngs)
            return jnp.stack([self.dropout(x), with_call_rngs], axis=1)

    x = jnp.ones((2, 40))
    pipe = jpipe.pipeline([Asks()], 1)
    np.testing.assert_array_equal(pipe.apply(({},), x), x)
    noise = pipe.apply(({},), x, rngs={"noise": KEY}, train=True)
    assert (noise != x).all()
    other = pipe.apply(({},), x, rngs=jax.random.key(1), train=True)
    assert (noise != other).all()
    assert (True, True, True) in seen
    assert (False, False, False) in seen
    # A stream of the module and one of the same name that it is given differ.
    pipe = jpipe.pipeline([Both()], 1)
    y = pipe.apply(({},), x, rngs={"dropout": KEY}, train=True)
    assert (y[:, 0] != y[:, 1]).any()


def test_streams_that_two_layers_keep_need_no_key_in_evaluation():
    class Keeps(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.rngs = nnx.Linear(4, 4, rngs=rngs), rngs

        def __call__(self, x):
            return self.linear(x)

    rngs, x = nnx.Rngs(0), jax.random.normal(KEY, (4, 4))
    layers = [Keeps(rngs), Keeps(rngs)]
    pipe = jpipe.pipeline(layers, 2)
    y = pipe.apply(pipe.init(None, x), x)
    ref.assert_close(y, layers[1](layers[0](x)), ref.FLOAT32)

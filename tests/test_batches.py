"""Batches of any size and tree, and unusual leaves: the numbers of one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jpipe

from . import reference as ref


class TestBatches:
    """Batches that do not divide, of another size, of any structure."""

    def test_later_batch_of_another_size(self, double):
        layers = ref.mlp(jnp.float64)
        pipe = jpipe.pipeline(layers, 4, balance=[3, 3])
        for batch in (10, 4, 10):
            x, targets = ref.regression(batch, jnp.float64, seed=batch)
            ref.compare(pipe, layers, x, targets, ref.FLOAT64)

    def test_a_model_without_parameters(self):
        x = jnp.arange(6.0)
        pipe = jpipe.pipeline([jnp.sin, jnp.cos], 3)
        variables = pipe.init(jax.random.key(0), x)
        loss, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
        assert grads == ({}, {})
        np.testing.assert_allclose(loss, ref.mse(jnp.cos(jnp.sin(x)), x), rtol=1e-6)

    def test_axes_as_vmap_has_them(self, double):
        f64 = jnp.float64

        class Attend(nn.Module):
            @nn.compact
            def __call__(self, inputs):
                query, memory = inputs  # time first; every micro-batch the same memory
                scores = jnp.einsum("tbd,kd->tbk", query, memory)
                return ref.dense(4, f64)(nn.softmax(scores) @ memory)

        layers = [Attend(), jnp.tanh, ref.dense(4, f64)]
        query = jax.random.normal(jax.random.key(1), (3, 7, 5), f64)
        memory = jax.random.normal(jax.random.key(2), (6, 5), f64)
        targets = jax.random.normal(jax.random.key(3), (3, 7, 4), f64)
        pipe = jpipe.pipeline(layers, 3, in_axes=(1, None), target_axes=1, out_axes=1)
        x = (query, memory)
        variables, _ = ref.compare(pipe, layers, x, targets, ref.FLOAT64)
        expected = ref.compose(layers, ref.params_of(variables), x)
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT64)
        # What every micro-batch was given whole still belongs to the caller.
        assert not memory.is_deleted()


def test_keys_may_pass_through_the_stages():
    layers = [
        lambda p: (jnp.sin(p[0]), p[1]),
        nn.Sequential([lambda p: p[0], ref.dense(4)]),
        jnp.tanh,
    ]
    x, targets = ref.regression(4)
    keys = jax.random.split(jax.random.key(1), 4)
    pipe = jpipe.pipeline(layers, 2)
    ref.compare(pipe, layers, (x, keys), targets, ref.FLOAT32)


def test_a_leaf_without_an_axis_is_one_array_in_all_micro_batches():
    pipe = jpipe.pipeline(
        [lambda x: x["rows"] @ x["matrix"], jnp.sin],
        num_microbatches=3,
        in_axes={"rows": 0, "matrix": None},
    )
    x = {"rows": jnp.ones((6, 4)), "matrix": jnp.ones((4, 5))}
    program = pipe._cache.inference(({}, {}), x, None, False).program
    shapes = [spec.shape for spec in program.specs]
    (split,) = (i for i in program.instructions if i.label == "split")
    _first_row, *rows = (*split.reads, *split.donates)
    assert [shapes[slot] for slot in rows] == [(6, 4)]
    reads = [
        {slot for slot in (*i.reads, *i.donates) if shapes[slot] == (4, 5)}
        for i in program.instructions
        if str(i.label) in ("0F0", "0F1", "0F2") and i.source is None
    ]
    assert len(reads) == 3
    assert len(set.union(*reads)) == 1
    pipe = jpipe.sequential(
        [lambda x: x["rows"] @ x["matrix"]], 3, in_axes={"rows": 0, "matrix": None}
    )
    np.testing.assert_array_equal(pipe.apply(({},), x), np.full((6, 5), 4.0))


class Quantized(nn.Module):
    """What a model returns beside its examples: a codebook, a temperature."""

    @nn.compact
    def __call__(self, x):
        temperature = jnp.exp(self.param("temperature", nn.initializers.ones, ()))
        book = nn.Embed(5, 3)
        nearest = jnp.argmax(book.attend(x) / temperature, axis=-1)
        # A parameter as it stands, and what follows from one.
        return {"z": x + book(nearest), "model": (book.embedding, temperature)}


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("mesh", [False, True], ids=["devices", "data shards"])
def test_outputs_without_an_axis_are_given_once(size, mesh):
    layers, options = [nn.Dense(3), Quantized()], {}
    if mesh:
        devices, size = jax.devices()[:4], 4
        options["mesh"] = jax.make_mesh((2, 2), ("stage", "data"), devices=devices)
    out_axes = {"z": 0, "model": None}
    pipe = jpipe.pipeline(layers, 2, out_axes=out_axes, **options)
    x = jax.random.normal(jax.random.key(1), (size, 6))
    variables = pipe.init(jax.random.key(0), x)
    one = jpipe.sequential(layers, out_axes=out_axes)  # which joins nothing
    on_host = jax.device_get(variables)
    expected = layers[1].apply(on_host[1], layers[0].apply(on_host[0], x))
    for actual in (pipe.apply(variables, x), one.apply(one.place(on_host), x)):
        chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-6)
    # Which of the outputs are joined is no matter of a loss.
    ref.compare(pipe, layers, x, x[:, :3], ref.FLOAT32, lambda y, t: ref.mse(y["z"], t))


def test_no_output_has_an_axis():
    pipe = jpipe.pipeline([lambda x: jnp.arange(3.0)], 2, out_axes=None)
    np.testing.assert_array_equal(pipe.apply(({},), jnp.ones(4)), [0, 1, 2])

"""Batches of any size and tree, and unusual leaves: the numbers of one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe

from . import reference as ref


class TestBatches:
    """Batches that do not divide, of another size, of any structure."""

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("remat", ["full", "none", "except_last"])
    def test_uneven_batch_has_exact_weights(self, double, schedule, remat):
        layers = ref.mlp(jnp.float64)
        pipe = jpipe.pipeline(layers, 4, balance=[3, 3], schedule=schedule, remat=remat)
        x, targets = ref.regression(10, jnp.float64)
        ref.compare(pipe, layers, x, targets, ref.FLOAT64)

    def test_later_batch_of_another_size(self, double):
        layers = ref.mlp(jnp.float64)
        pipe = jpipe.pipeline(layers, 4, balance=[3, 3])
        for batch in (10, 4, 13, 10):
            x, targets = ref.regression(batch, jnp.float64, seed=batch)
            ref.compare(pipe, layers, x, targets, ref.FLOAT64)

    def test_more_stages_than_microbatches_and_one_of_everything(self, double):
        layers = ref.mlp(jnp.float64)
        x, targets = ref.regression(1, jnp.float64)
        ref.compare(jpipe.pipeline(layers, 1), layers, x, targets, ref.FLOAT64)
        single = [ref.dense(4, jnp.float64)]
        ref.compare(jpipe.pipeline(single, 1), single, x, targets, ref.FLOAT64)

    def test_a_model_without_parameters(self):
        x = jnp.arange(6.0)
        pipe = jpipe.pipeline([jnp.sin, jnp.cos], 3)
        variables = pipe.init(jax.random.key(0), x)
        loss, grads = pipe.value_and_grad(ref.mse)(variables, x, x)
        assert grads == ({}, {})
        np.testing.assert_allclose(loss, ref.mse(jnp.cos(jnp.sin(x)), x), rtol=1e-6)

    def test_any_pytree_at_every_boundary(self, double):
        """Dictionaries, tuples, integers and booleans between stages and in targets."""
        f64 = jnp.float64

        class Embed(nn.Module):
            @nn.compact
            def __call__(self, batch):
                h = nn.Embed(11, 6, param_dtype=f64, dtype=f64)(batch["tokens"])
                return {"h": h, "mask": batch["mask"], "ids": batch["tokens"]}

        class Mix(nn.Module):
            @nn.compact
            def __call__(self, carry):
                h = ref.dense(6, f64)(carry["h"])
                h = jnp.where(carry["mask"][..., None], jnp.tanh(h), 0.0)
                return (h, carry["ids"]), carry["mask"]

        class Head(nn.Module):
            @nn.compact
            def __call__(self, carry):
                (h, ids), mask = carry
                return {"logits": ref.dense(11, f64)(h) + ids[..., None], "mask": mask}

        layers = [Embed(), Mix(), Head()]
        rng = np.random.default_rng(0)
        x = {
            "tokens": rng.integers(0, 11, (6, 5)).astype(np.int32),
            "mask": rng.random((6, 5)) < 0.7,
        }
        targets = (rng.integers(0, 11, (6, 5)).astype(np.int32), rng.random((6, 5)))

        def loss_fn(outputs, targets):
            labels, weight = targets
            losses = optax.softmax_cross_entropy_with_integer_labels(
                outputs["logits"], labels
            )
            return jnp.mean(losses * weight * outputs["mask"])

        for remat, schedule in [("full", "1f1b"), ("none", "gpipe")]:
            pipe = jpipe.pipeline(layers, 3, remat=remat, schedule=schedule)
            ref.compare(pipe, layers, x, targets, ref.FLOAT64, loss_fn)

    @pytest.mark.parametrize("remat", ["full", "none"])
    def test_in_axes_as_vmap_has_it(self, double, remat):
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
        pipe = jpipe.pipeline(
            layers, 3, in_axes=(1, None), target_axes=1, out_axes=1, remat=remat
        )
        x = (query, memory)
        variables, _ = ref.compare(pipe, layers, x, targets, ref.FLOAT64)
        expected = ref.compose(layers, ref.params_of(variables), x)
        ref.assert_close(pipe.apply(variables, x), expected, ref.FLOAT64)
        # What every micro-batch was given whole still belongs to the caller.
        assert not memory.is_deleted()


class TestUnusualLeaves:
    """Frozen, unused and integer leaves; stages without parameters."""

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            width = x.shape[-1]
            used = self.param("used", nn.initializers.normal(1.0), (width, 3), x.dtype)
            frozen = self.param("frozen", nn.initializers.ones, (width,), x.dtype)
            self.param("unused", nn.initializers.ones, (2, 2), x.dtype)
            shift = self.param("shift", lambda key: jnp.arange(3))
            return (x * jax.lax.stop_gradient(frozen)) @ used + shift

    @pytest.mark.parametrize("remat", ["full", "none"])
    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
    def test_gradients(self, double, remat, schedule):
        f64 = jnp.float64
        layers = [jnp.sin, self.Odd(), jnp.tanh, self.Odd(), ref.dense(4, f64)]
        pipe = jpipe.pipeline(layers, 2, remat=remat, schedule=schedule)
        x, targets = ref.regression(6, f64)
        _, grads = ref.compare(pipe, layers, x, targets, ref.FLOAT64)
        assert not np.any(np.asarray(grads[1]["frozen"]))
        assert not np.any(np.asarray(grads[1]["unused"]))
        assert grads[1]["shift"].dtype == jax.dtypes.float0

    def test_training_leaves_integers_alone(self):
        layers = [self.Odd(), jnp.tanh, ref.dense(4)]
        pipe = jpipe.pipeline(layers, 2)
        x, targets = ref.regression(6)
        tx = optax.adamw(0.1, weight_decay=0.5)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, _ = step(state, x, targets)
        np.testing.assert_array_equal(state.params[0]["shift"], np.arange(3))


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

"""Layers that make something of several examples are told, and no others."""

import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe import _cache

from .. import reference as ref
from .mixing import APART, MIXED, TOKENS, WIDTH, normalized

KEY = jax.random.key(0)
BATCH, PARTS = 12, 3
SAID = "each micro-batch by itself"


def batch():
    return jax.random.normal(KEY, (BATCH, TOKENS, WIDTH))


def by_parts(layer):
    x, layer = batch(), jax.jit(layer)
    return layer(x), jnp.concatenate([layer(part) for part in jnp.split(x, PARTS)])


def trained(layers, x=None, targets=None, rngs=None, **options):
    """Loss and gradients on micro-batches; layers may warn."""
    x = batch() if x is None else x
    pipe = jpipe.sequential(layers, PARTS)
    variables = pipe.init(KEY, x)
    find = pipe.value_and_grad(ref.mse, **options)
    return find(variables, x, x if targets is None else targets, rngs=rngs)


class CheckedError(Exception):
    """All was checked, and nothing compiled yet."""


@pytest.fixture
def checks_alone(monkeypatch):
    """What would be compiled is not: of many layers one asks what is said of them."""
    monkeypatch.setattr(_cache, "Gradient", mock.Mock(side_effect=CheckedError))


def mse_of(layer):
    """With a layer before it, so that the one in question is not the first."""
    return [nn.Dense(WIDTH), layer]


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.usefixtures("checks_alone")
def test_a_layer_that_mixes_examples_is_told(name):
    whole, parts = by_parts(MIXED[name])
    assert not np.allclose(whole, parts, atol=1e-3)
    x = batch()
    targets = jnp.zeros(whole.shape)
    with (
        pytest.warns(UserWarning, match=SAID) as caught,
        pytest.raises(CheckedError),
    ):
        trained(mse_of(MIXED[name]), x, targets)
    (warning,) = caught
    assert "layer 1 (" in str(warning.message)
    assert "layer 0 (" not in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("name", APART)
@pytest.mark.usefixtures("checks_alone")
def test_a_layer_that_keeps_examples_apart_is_not(name):
    whole, parts = by_parts(APART[name])
    ref.assert_close(whole, parts, 1e-5)
    # A warning is an error.
    with pytest.raises(CheckedError):
        trained(mse_of(APART[name]), targets=jnp.zeros(whole.shape))


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
        return nn.remat(nn.BatchNorm)(use_running_average=not train)(x)


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.dense(x))


def test_what_flax_calls_a_batch_norm_is_known():
    trained([LinenNorm(), nn.BatchNorm(), NnxNorm(nnx.Rngs(0))])


class LinenNoise(nn.Module):
    """Noise by a stream: for all, for each by its place, and what needs a loop."""

    @nn.compact
    def __call__(self, x):
        key = self.make_rng("noise")
        places = jnp.arange(len(x))
        of_each = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))
        counts = jax.random.poisson(key, 2.0, x.shape)
        return (
            x
            + jax.random.normal(key, x.shape)
            + counts
            + of_each(places)[:, None, None]
        )


class NnxNoise(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) + jax.random.normal(self.rngs.noise(), x.shape)


def test_what_streams_draw_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained([LinenNoise(), NnxNoise(nnx.Rngs(0, noise=1))], rngs=KEY)


class HeldKey(nnx.Module):
    def __init__(self):
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, x):
        return x + jax.random.normal(self.key.get_value(), x.shape)


def with_given_key(inputs):
    x, key = inputs
    return x + jax.random.normal(key, x.shape)


def test_what_any_other_key_draws_is_told():
    draws = r"layer 0 \(.*\) draws random numbers by a key that is not of this step"
    with pytest.warns(UserWarning, match=draws):
        trained([HeldKey()])
    pipe = jpipe.sequential([with_given_key], PARTS, in_axes=(0, None))
    x = batch(), KEY
    find = pipe.value_and_grad(ref.mse)
    with pytest.warns(UserWarning, match=draws):
        find(pipe.init(KEY, x), x, batch())


@pytest.mark.parametrize(
    "another",
    [
        lambda x: jnp.stack([jnp.sin(row) for row in x]),
        lambda x: jax.lax.map(jnp.sin, x, batch_size=3),
        lambda x: jnp.sin(x) if len(x) > 16 else 2 * jnp.sin(x) / 2,
    ],
    ids=["a loop in Python", "chunks with a rest", "by the size"],
)
def test_what_comes_after_a_layer_that_is_another_with_more_examples_is_told(another):
    with pytest.warns(UserWarning, match=SAID) as caught:
        trained([nn.Dense(WIDTH), another, normalized])
    (warning,) = caught
    assert "layer 2 (" in str(warning.message)
    assert "layer 1 (" not in str(warning.message)


def with_balance(x):
    """A loss of its own, as a router of experts has, beside the output."""
    share = jax.nn.softmax(x).mean((0, 1))
    return {"y": x, "aux": WIDTH * jnp.sum(share * jnp.log(share))}


def with_total(x):
    return {"y": x, "total": jnp.sum(x**2), "count": jnp.asarray(1.0 * len(x))}


def both(outputs, targets):
    return ref.mse(outputs["y"], targets) + 0.1 * outputs["aux"]


def test_a_loss_that_a_layer_makes_of_all_examples_is_told():
    x = batch()
    pipe = jpipe.sequential([nn.Dense(WIDTH), with_balance], PARTS)
    variables = pipe.init(KEY, x)
    with pytest.warns(UserWarning, match=r"layer 1 \(with_balance\) "):
        pipe.value_and_grad(both)(variables, x, x)


def test_what_layers_sum_up_is_refused_as_a_loss_that_is_a_mean():
    x = batch()
    pipe = jpipe.sequential([nn.Dense(WIDTH), with_total], PARTS)
    variables = pipe.init(KEY, x)
    with pytest.raises(ValueError, match="loss_fn returns a sum over the examples"):
        pipe.value_and_grad(lambda y, t: y["total"])(variables, x, x)
    pipe.value_and_grad(lambda y, t: y["total"], reduction="sum")(variables, x, x)
    loss, _ = pipe.value_and_grad(
        lambda y, t: (y["total"], y["count"]), reduction="weighted"
    )(variables, x, x)
    (dense,) = (layer["params"] for layer in variables if layer)
    whole = jnp.sum((x @ dense["kernel"] + dense["bias"]) ** 2) / BATCH
    ref.assert_close(loss, whole, 1e-5)


def test_nothing_is_told_of_one_micro_batch_or_of_what_is_silenced():
    x = batch()
    pipe = jpipe.sequential(mse_of(normalized), 1)
    pipe.value_and_grad(ref.mse)(pipe.init(KEY, x), x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", SAID)
        trained(mse_of(normalized))


def test_evaluation_is_told_too_but_where_training_was_not():
    x = batch()
    pipe = jpipe.sequential(mse_of(normalized), PARTS)
    variables = pipe.init(KEY, x)
    with pytest.warns(UserWarning, match=SAID) as caught:
        pipe.apply(variables, x)
    assert caught[0].filename == __file__
    calls = []

    def sine(x):
        calls.append(x.shape)
        return jnp.sin(x)

    pipe = jpipe.sequential(mse_of(sine), PARTS)
    pipe.value_and_grad(ref.mse)(pipe.init(KEY, x), x, x)
    shapes = set(calls)
    calls.clear()
    pipe.apply(variables, x)
    assert calls
    assert set(calls) < shapes  # and with no other number of examples


def test_examples_in_the_places_of_others_are_told_and_meet_no_targets():
    def turned(x):
        return x[::-1]

    x = batch()
    pipe = jpipe.sequential(mse_of(turned), PARTS)
    variables = pipe.init(KEY, x)
    with pytest.warns(UserWarning, match=rf"{SAID}.*\n.*1 \(turned\) puts examples"):
        pipe.apply(variables, x)
    with pytest.raises(ValueError, match="compares examples with one another"):
        pipe.value_and_grad(ref.mse)(variables, x, x)
    # In another order, and back before anything is returned, nothing is amiss.
    trained([turned, nn.Dense(WIDTH), turned])


def test_two_views_of_each_example_may_come_one_after_the_other():
    """The loss takes them apart again; who is given them does not know."""

    def views(x):
        return jnp.concatenate([x, -x])

    def apart(y, t):
        one, other = jnp.split(y, 2)
        return jnp.mean((one - t) ** 2) + jnp.mean(jnp.abs(other + t))

    x = batch()
    pipe = jpipe.sequential([views, nn.Dense(WIDTH)], PARTS)
    variables = pipe.init(KEY, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = pipe.value_and_grad(apart)(variables, x, x)
    whole = jpipe.sequential([views, nn.Dense(WIDTH)], 1)
    ref.assert_close(loss, apart(whole.apply(variables, x), x), 1e-5)
    said = pytest.warns(UserWarning, match=r"layer 1 \(Dense\) puts examples in the pl")
    with said, pytest.raises(ValueError, match="cannot be joined on out_axes=0"):
        pipe.apply(variables, x)


def test_each_layer_that_mixes_is_listed_once():
    with pytest.warns(UserWarning, match=SAID) as caught:
        trained([normalized, nn.Dense(WIDTH), normalized, jnp.sin])
    (warning,) = caught
    named = [line for line in str(warning.message).splitlines() if "* layer" in line]
    assert [line.split()[2] for line in named] == ["0", "2"]

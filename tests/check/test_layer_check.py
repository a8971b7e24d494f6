"""What `Pipeline.check` says of layers, one kind after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from ..compiling import log_compiled

KEY = jax.random.key(0)
BATCH, WIDTH = 12, 4


def batch(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (BATCH, 3, WIDTH), dtype)


def checked(layers, x=None, *, make=jpipe.sequential, options=None, **given):
    x = batch() if x is None else x
    pipe = make(layers, 3, **(options or {}))
    return pipe.check(pipe.init(KEY, x), x, **given)


def checked_loss(layers, loss_fn, reduction="mean", **given):
    pipe = jpipe.sequential(layers, 3)
    find = pipe.value_and_grad(loss_fn, reduction=reduction)
    return find.check(pipe.init(KEY, batch()), batch(), batch(), **given)


def notes(report, layer=0):
    return "; ".join(report.layers[layer].notes)


class Normed(nn.Module):
    """Its statistics are far from zero."""

    after: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = 3 * nn.Dense(6)(x) + 100
        x = nn.BatchNorm(not train)(x)
        return x - x.mean(0) if self.after else x


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(5 * self.linear(x) + 50))


def test_batch_norms_are_compared_per_micro_batch():
    layers = [Normed(), nn.BatchNorm(), NnxNormed(nnx.Rngs(0)), Normed()]
    layers[1] = jpipe.layer(
        nn.BatchNorm(), lambda module, x, train: module(x, not train)[..., :WIDTH]
    )
    report = checked(layers, rngs=KEY)
    assert report, report
    for number, layer in enumerate(report.layers):
        assert layer.compared == ("outputs", "state", "gradients")
        assert "batch norms normalize each micro-batch by itself" in notes(
            report, number
        )
    assert not [
        one for one in checked(layers, rngs=KEY, train=False).layers if one.notes
    ]


def test_frozen_batch_norm_is_compared_as_any_layer():
    norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=nnx.Rngs(0))
    report = checked([nn.BatchNorm(use_running_average=True), norm])
    assert report
    assert [layer.notes for layer in report.layers] == [(), ()]


def test_mean_beside_a_batch_norm_is_reported():
    report = checked([nn.Dense(WIDTH), Normed(after=True)])
    with pytest.raises(
        ValueError, match=r"^layer 1 \(Normed\): outputs differ, most in"
    ):
        report.raise_if_different()


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH)(x))
        if train:
            x = x + jax.random.normal(self.make_rng("dropout"), x.shape)
        options = {"dropout_rate": 0.5, "deterministic": not train}
        return nn.MultiHeadDotProductAttention(2, **options)(x)


def test_random_layers_are_compared_without_random_numbers():
    layers = [
        Noisy(),
        lambda x, rngs: jax.random.permutation(rngs["dropout"], x),
        jnp.sin,
    ]
    for rngs in (KEY, {"dropout": jax.random.PRNGKey(3)}):
        report = checked(layers, rngs=rngs)
        assert report, report
        assert [notes(report, i) for i in range(3)] == [
            "compared without dropout and other random numbers"
        ] * 2 + [""]


def test_ties_and_skips_are_compared():
    tied = nn.Dense(WIDTH)

    def down(x):
        jpipe.stash("x", {"all": x, "mean": x.mean()})
        return jnp.sin(x)

    def up(x):
        stashed = jpipe.pop("x")
        return x + stashed["all"]

    def wrong(x):
        return x - jpipe.pop("y").mean(0)

    def keep(x):
        jpipe.stash("y", x)
        return x

    layers = [tied, down, keep, tied, up, wrong, jpipe.layer(tied, lambda m, x: m(x))]
    for make in (jpipe.sequential, jpipe.pipeline):
        report = checked(layers, make=make)
        assert [i for i, one in enumerate(report.layers) if not one.is_same] == [5]
        told = [str(one) for one in report.layers[5].differences]
        assert told[0].startswith("outputs differ, most in example ")
        assert told[1].startswith(
            "gradients by input['stashed']['y'] differ, most in example "
        )
        for i in (0, 3, 6):
            assert report.layers[i].compared == ("outputs", "gradients")


class Holding(nn.Module):
    """A layer that keeps something of what it is given."""

    start: tuple
    update: object
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        held = self.variable("held", "value", jnp.zeros, self.start, self.dtype)
        if train and not self.is_initializing():
            held.value = self.update(held.value, x)
        return x


SUMMED = {
    "queue": Holding((4, 3, WIDTH), lambda old, x: jnp.concatenate([x, old])[:4]),
    "sum": Holding((WIDTH,), lambda old, x: old + x.sum((0, 1))),
    "count": Holding((), lambda old, x: old + len(x), jnp.int32),
}
KEPT = {
    "mean": Holding((WIDTH,), lambda old, x: 0.9 * old + 0.1 * x.mean((0, 1))),
    "steps": Holding((), lambda old, x: old + 1, jnp.int32),
}


@pytest.mark.parametrize("name", SUMMED)
def test_state_that_is_no_mean_is_reported(name):
    (layer,) = checked([SUMMED[name]]).layers
    (difference,) = layer.differences
    assert str(difference).startswith("state differ: ")


@pytest.mark.parametrize("name", KEPT)
def test_state_that_is_a_mean_passes(name):
    report = checked([KEPT[name]])
    assert report, report
    assert "state" in report.layers[0].compared


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(
    lambda x: (x, None),
    lambda _, ct: (ct / jnp.maximum(1, jnp.linalg.norm(ct)),),
)


def test_custom_backward_is_compared():
    (layer,) = checked([clipped]).layers
    (difference,) = layer.differences
    assert str(difference).startswith("gradients by input differ, most in example ")
    report = checked_loss([jnp.sin], lambda y, t: clipped(y).sum(), "sum")
    (difference,) = report.loss.differences
    assert str(difference).startswith("gradients differ, most in example ")


def test_layer_without_gradient_is_compared_by_its_values():
    def doubled(x):
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() < -1, lambda x: 2 * x, x)

    report = checked([doubled])
    assert report.layers[0].compared == ("outputs",)
    assert "without gradients: ValueError: Reverse-mode diff" in notes(report)


def test_values_that_are_not_finite_equal_themselves():
    assert checked([lambda x: jnp.where(x > 1, jnp.nan, x)])
    for other in (jnp.inf, jnp.nan):
        report = checked([lambda x, y=other: jnp.where((x > 1) & (len(x) == 12), y, x)])
        assert report.layers[0].differences[0].size == np.inf


def test_one_element_that_differs_is_reported():
    """Relative to the numbers of its example, which are smaller than all others."""
    x = batch().at[7].multiply(0.01)

    def changed(x):
        return x.at[7, 1, 2].add(jnp.where(len(x) == BATCH, 1e-5, 0.0))

    (difference,) = checked([changed], x).layers[0].differences
    assert difference.example == 7
    np.testing.assert_allclose(difference.at_once, x[7, 1, 2] + 1e-5, rtol=1e-6)
    np.testing.assert_allclose(difference.in_microbatches, x[7, 1, 2], rtol=1e-6)


def test_layers_behind_a_difference_receive_the_outputs_of_the_whole_batch():
    seen = []

    def look(x):
        jax.debug.callback(lambda x: seen.append(np.array(x)), x)
        return x

    report = checked([lambda x: x - x.mean(0), look, lambda x: x / x.std(0), jnp.sin])
    assert [layer.is_same for layer in report.layers] == [False, True, False, True]
    jax.effects_barrier()
    x = batch()
    by_size = {len(one): one for one in seen}
    assert sorted(by_size) == [4, 8, 12]
    np.testing.assert_allclose(by_size[4], (x - x.mean(0))[:4], rtol=1e-5, atol=1e-6)


def test_examples_are_taken_from_the_axes_given():
    def mixed(x):
        of_none = {"mean": x["time"].mean(), "sum": x["time"].sum()}
        return {"y": jnp.tanh(x["time"]) + x["table"], **of_none}

    axes = {"time": 1, "table": None}
    x = {"time": batch().swapaxes(0, 1), "table": jnp.ones(WIDTH)}
    options = {"in_axes": axes, "out_axes": 1}
    assert checked([mixed, lambda x: x["y"]], x, options=options)
    layers = [mixed, lambda x: x["y"] - x["y"].mean(1, keepdims=True)]
    report = checked(layers, x, options=options)
    assert [layer.is_same for layer in report.layers] == [True, False]
    whole = np.tanh(x["time"]) + 1
    at = report.layers[1].differences[0]
    expected = whole - whole.mean(1, keepdims=True)
    assert np.isclose(expected[:, at.example], at.at_once, rtol=1e-4).any()


def test_outputs_are_compared_as_apply_joins_them():
    """By default what is no example's may be a mean or a sum, as a loss takes it."""

    def head(x):
        y = x[:, 0]
        # As many numbers as a micro-batch has examples, by chance.
        return {"y": y, "size": (y**2).sum(), "load": jax.nn.softmax(y).mean(0)}

    axes = {"y": 0, "size": jpipe.SUM, "load": jpipe.MEAN}
    assert checked([jnp.sin, head], options={"out_axes": axes})
    assert checked([jnp.sin, lambda x: head(x)["size"]])
    for name, axis in [("size", None), ("size", jpipe.MEAN), ("load", 0)]:
        options = {"out_axes": {**axes, name: axis}}
        (difference,) = checked([jnp.sin, head], options=options).layers[1].differences
        assert difference.array_name == f"outputs['{name}']"


def test_equal_layers_are_compiled_once():
    def compiled_for(num_layers):
        x = batch()
        pipe = jpipe.sequential([nn.Dense(WIDTH) for _ in range(num_layers)], 3)
        variables = pipe.init(KEY, x)
        with log_compiled() as compiled:
            assert pipe.check(variables, x)
        return compiled

    assert compiled_for(3) == compiled_for(1) != []


def test_half_precision_is_compared_with_its_rounding():
    assert checked([*ref.mlp(jnp.bfloat16)[:4]], batch(jnp.bfloat16))
    assert not checked([lambda x: x - x.mean(0)], batch(jnp.bfloat16))


def test_examples_of_several_rows_are_compared():
    """As of a fold of times into examples."""
    layers = [
        nn.Dense(WIDTH),
        lambda x: x.reshape(-1, WIDTH),
        nn.Dense(WIDTH),
        lambda x: x.reshape(-1, 3, WIDTH),
    ]
    report = checked_loss(layers, ref.mse)
    assert report, report
    assert all("outputs" in layer.compared for layer in report.layers)
    report = checked_loss(layers[:3], lambda y, t: ref.mse(y, t.reshape(-1, WIDTH)))
    assert report.loss.compared == ("outputs", "gradients")
    assert report, report


def of_all(x):
    return x, x.mean(0)


def kept_of_all(x):
    jpipe.stash("mean", x.mean(0))
    return x


@pytest.mark.parametrize(
    "layers",
    [
        [of_all, lambda given: given[0] - given[1]],
        [kept_of_all, lambda x: x - jpipe.pop("mean")],
    ],
    ids=["output", "stashed"],
)
def test_next_layer_reads_sums_over_the_micro_batch_not_the_batch(layers):
    report = checked(layers)
    assert [layer.is_same for layer in report.layers] == [True, False]


def test_loss_reads_sums_over_the_micro_batch_not_the_batch():
    def loss_fn(outputs, targets):
        y, total = outputs
        return ref.mse(y, targets) + total

    assert checked_loss([lambda x: (x, jnp.sin(x).mean())], loss_fn)
    report = checked_loss([lambda x: (x, jnp.sin(x).sum())], loss_fn)
    assert report.layers[0].is_same
    assert not report.loss.is_same


@pytest.mark.parametrize("few", [0, 1])
def test_other_structure_in_micro_batches_is_reported(few):
    layers = [lambda x: (x,) * (2 if (len(x) < BATCH) == few else 1), lambda x: x[0]]
    with pytest.raises(ValueError, match=r"layer 0 .*: outputs are .* at once"):
        checked(layers).raise_if_different()


def test_loss_that_runs_in_micro_batches_alone_is_not_compared():
    report = checked_loss([lambda x: x[:4]], ref.mse, microbatch_sizes=(4, 8))
    assert not report.layers[0].is_same
    assert "not compared: " in report.loss.notes[0]

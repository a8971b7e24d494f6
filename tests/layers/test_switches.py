"""Switches: who receives them, what stays as the user set it, what a check notes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY, X = jax.random.key(0), jnp.ones((4, 4))
RNGS = {"dropout": jax.random.key(1)}


def apply(listed, train):
    pipe = jpipe.sequential([listed], 2)
    return np.asarray(pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=train))


def notes(pipe, x=X, train=True):
    """What a check notes of the only layer."""
    report = pipe.check(pipe.init(KEY, x), x, rngs=RNGS, train=train)
    return "; ".join(report.layers[0].notes)


def drops(listed, train):
    """True if a layer that multiplies by one drops anything."""
    return bool((apply(listed, train) == 0).any())


# ------------------------------------------------------------- names that are known


class Named(nn.Module):
    @nn.compact
    def __call__(self, x, training=False):
        return nn.Dropout(0.5)(x, deterministic=not training)


class NamedNnx(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, is_training=False):
        return self.dropout(x, deterministic=not is_training)


def function(x, is_eval=True, rngs=None):
    return x if is_eval else x * jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)


@pytest.mark.parametrize(
    "listed",
    [
        Named(),
        NamedNnx(),
        function,
        nn.Sequential([Named(), nn.relu]),
        jpipe.Layer(lambda key, x: {}, lambda variables, x, **_: x, name="any"),
    ],
    ids=lambda listed: type(listed).__name__,
)
def test_layer_receives_its_switch(listed):
    assert drops(listed, True) is not isinstance(listed, jpipe.Layer)
    assert not drops(listed, False)
    assert "off in training" not in notes(jpipe.sequential([listed], 2))


def test_a_parameter_named_as_a_switch_with_a_number_as_default_is_no_switch():
    def scaled(x, training=2.0, **_):
        assert not _
        return x * training

    np.testing.assert_array_equal(apply(scaled, True), 2)


def test_lora_in_a_sequential_trains():
    """It takes any arguments, and no switch."""
    base = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    lora = nnx.LoRA(4, 2, 4, base_module=base, rngs=nnx.Rngs(1))
    pipe = jpipe.pipeline(
        [nnx.Sequential(lora, nnx.relu), nnx.Linear(4, 4, rngs=nnx.Rngs(2))], 2
    )
    variables = pipe.init(KEY, X)
    _, grads = pipe.value_and_grad(ref.mse)(variables, X, jnp.zeros((4, 4)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# ------------------------------------------- off by a default, and as the user set it


class Enabled(nn.Module):
    """Drops nothing in training unless somebody says so, by another name."""

    @nn.compact
    def __call__(self, x, enable_dropout=False):
        return nn.Dropout(0.5)(x, deterministic=not enable_dropout)


class Outer(nn.Module):
    """Receives the switch, and does not pass it on."""

    @nn.compact
    def __call__(self, x, train):
        return Inner()(x)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, name="drop")(x, deterministic=not train)


class EnabledNnx(NamedNnx):
    def __call__(self, x, enable_dropout=False):
        return self.dropout(x, deterministic=not enable_dropout)


class Keywords(nn.Module):
    """Looks for its switch among all that it is given by name."""

    @nn.compact
    def __call__(self, x, **kwargs):
        return Inner()(x, **kwargs)


class KeywordsNnx(NamedNnx):
    def __call__(self, x, **kwargs):  # pyright: ignore
        return super().__call__(x, **kwargs)


# What is listed, the part that the note names, and what to list in its place.
SILENT = [
    (
        Enabled(),
        "dropout Dropout_0",
        lambda module, x, train: module(x, enable_dropout=train),
    ),
    (
        EnabledNnx(),
        "dropout Dropout",
        lambda module, x, train: module(x, enable_dropout=train),
    ),
    (Outer(), "dropout Inner_0/drop", None),
    (
        jpipe.layer(Inner(), lambda m, x: m(x)),
        "dropout drop",
        lambda module, x, train: module(x, train=train),
    ),
    (
        Keywords(),
        "dropout Inner_0/drop",
        lambda module, x, train: module(x, train=train),
    ),
    (
        KeywordsNnx(),
        "dropout Dropout",
        lambda module, x, train: module(x, is_training=train),
    ),
]


@pytest.mark.parametrize(("listed", "part", "switched"), SILENT)
@pytest.mark.parametrize("is_model", [False, True])
def test_check_names_a_part_that_is_off_in_training(listed, part, switched, is_model):
    """Blocks as of T5X, whose switch is called ``enable_dropout``."""

    def built(layer):
        if is_model:
            return jpipe.pipeline(layer, 2, num_stages=1)
        return jpipe.pipeline([layer], 2)

    def dropped(pipe):
        y = pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=True)
        return bool((np.asarray(y) == 0).any())

    pipe = built(listed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step looks for nothing
        assert not dropped(pipe)
    for _ in range(2):  # whatever was traced before
        assert f"off in training: {part}; let each call" in notes(pipe)
    assert "off in training" not in notes(pipe, train=False)
    if switched:  # what it says works
        module = getattr(listed, "module", listed)
        pipe = built(jpipe.layer(module, switched))
        assert "off in training" not in notes(pipe)
        assert dropped(pipe)


def test_check_notes_a_part_inside_of_a_compiled_block():
    class Compiled(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x, enable_dropout=False):
            return nn.Dropout(0.5)(x, deterministic=not enable_dropout)

    for _ in range(2):  # JAX finds what it has traced for an equal block
        assert "off in training: dropout Dropout_0;" in notes(
            jpipe.sequential([Compiled()], 2)
        )


def test_the_table_of_a_check_prints_notes_beside_their_layer():
    pipe = jpipe.sequential([jnp.sin, Enabled()], 2)
    report = pipe.check(pipe.init(KEY, X), X, rngs=RNGS)
    assert report
    *_, first, second = str(report).splitlines()
    assert "off in training" not in first
    assert "off in training: dropout Dropout_0" in second


class Chosen(nn.Module):
    """Its maker may choose."""

    training: bool | None = None

    @nn.compact
    def __call__(self, x, training=None):
        training = nn.merge_param("training", self.training, training)
        return nn.Dropout(0.5)(x, deterministic=not training)


class Optional(nn.Module):
    """Receives the switch, and leaves an option that is none."""

    @nn.compact
    def __call__(self, x, train, causal=False):
        return nn.Dropout(0.5, deterministic=True)(x)


class AttributeAndDefault(NamedNnx):
    """Has its mode as an attribute, and as an argument with a default."""

    def __init__(self):
        super().__init__()
        self.deterministic = False

    def __call__(self, x, deterministic=True):  # pyright: ignore
        return self.dropout(x, deterministic=deterministic)


def evaluated(module):
    module.eval()
    return module


@pytest.mark.parametrize(
    "listed",
    [
        nn.Dropout(0.5, deterministic=True),
        Optional(),
        evaluated(AttributeAndDefault()),
        Chosen(training=False),
        nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)),
    ],
    ids=lambda listed: type(listed).__name__,
)
def test_switches_set_by_the_user_stay_and_are_not_noted(listed):
    assert not drops(listed, True)
    assert "off in training" not in notes(jpipe.sequential([listed], 2))


class Always(NamedNnx):
    """Drops in evaluation too, though it is frozen."""

    def __call__(self, x):
        return self.dropout(x, deterministic=False)


def test_constant_switch_overrules_a_frozen_attribute():
    layer = Always()
    layer.eval()
    assert drops(layer, False)
    assert drops(layer, True)

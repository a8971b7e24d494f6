"""Switches: who receives them, what stays as the user set it, what a check notes."""

import re
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


class ByHand(nn.Module):
    """A dropout of its own, which no class of Flax shows."""

    @nn.compact
    def __call__(self, x, **kwargs):
        if not kwargs.get("train"):
            return x
        return x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)


def by_hand(x, **kwargs):
    return function(x, not kwargs.get("train"), kwargs.get("rngs"))


LEFT = "off in training.*"
PASSING = "lambda module, x, train: module"
# What is listed, what the note says, and what to type by that.
SILENT = [
    (
        Enabled(),
        f"{LEFT}dropout Dropout_0: Enabled.__call__ left enable_dropout=False.*"
        f"list jpipe.layer\\(module, {PASSING}\\(x, enable_dropout=train",
        lambda module, x, train: module(x, enable_dropout=train),
    ),
    (
        EnabledNnx(),
        f"{LEFT}dropout Dropout: EnabledNnx left enable_dropout=False.*"
        f"list jpipe.layer\\(module, {PASSING}\\(x, enable_dropout=train",
        lambda module, x, train: module(x, enable_dropout=train),
    ),
    (
        Outer(),
        f"{LEFT}dropout Inner_0/drop: Inner.__call__ left train=False; "
        f"pass train=train on to Inner.__call__",
        None,
    ),
    (
        jpipe.layer(Inner(), lambda m, x: m(x)),
        f"{LEFT}Inner.__call__ left train=False; pass train=train on to",
        None,
    ),
    (
        Keywords(),
        f"{LEFT}Inner.__call__ left train=False, Keywords.__call__ takes ..kwargs.*"
        f"list jpipe.layer\\(module, {PASSING}\\(x, train=train",
        lambda module, x, train: module(x, train=train),
    ),
    (
        KeywordsNnx(),
        f"{LEFT}dropout Dropout: KeywordsNnx takes ..kwargs.*"
        f"list jpipe.layer\\(module, {PASSING}\\(x, train=train",
        lambda module, x, train: module(x, is_training=train),
    ),
    (
        ByHand(),
        f"ByHand.__call__ takes ..kwargs, which is empty.*"
        f"list jpipe.layer\\(module, {PASSING}\\(x, train=train",
        lambda module, x, train: module(x, train=train),
    ),
    (by_hand, r"by_hand takes \*\*kwargs, .*name train before \*\*kwargs", None),
]


@pytest.mark.parametrize(("listed", "match", "switched"), SILENT)
@pytest.mark.parametrize("is_model", [False, True])
def test_check_notes_a_part_that_is_off_by_a_default(listed, match, switched, is_model):
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
        assert re.search(match, notes(pipe))
    assert "default" not in notes(pipe, train=False)
    if switched:  # what it says works
        pipe = built(jpipe.layer(listed, switched))
        assert not re.search(match, notes(pipe))
        assert dropped(pipe)


def test_check_notes_a_part_inside_of_a_compiled_block():
    class Compiled(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x, enable_dropout=False):
            return nn.Dropout(0.5)(x, deterministic=not enable_dropout)

    for _ in range(2):  # JAX finds what it has traced for an equal block
        assert "left enable_dropout=False" in notes(jpipe.sequential([Compiled()], 2))


def test_the_table_of_a_check_prints_notes_beside_their_layer():
    pipe = jpipe.sequential([jnp.sin, Enabled()], 2)
    report = pipe.check(pipe.init(KEY, X), X, rngs=RNGS)
    assert report
    *_, first, second = str(report).splitlines()
    assert "off in training" not in first
    assert "off in training, as a parameter was left at its default: dropout" in second


def test_line_to_type_names_the_inputs_of_a_model():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask, is_train=False):
            return nn.Dropout(0.5)(x * mask, deterministic=not is_train)

    line = "lambda module, x, mask, train: module(x, mask=mask, is_train=train)"
    x = jpipe.inputs(X, mask=X)
    pipe = jpipe.pipeline(Masked(), 2, num_stages=1)
    assert f"layer(module, {line})" in notes(pipe, x)
    pipe = jpipe.pipeline(jpipe.layer(Masked(), eval(line)), 2, num_stages=1)
    y = pipe.apply(pipe.init(KEY, x), x, rngs=RNGS, train=True)
    assert (np.asarray(y) == 0).any()


class Chosen(nn.Module):
    """Its maker may choose."""

    training: bool | None = None

    @nn.compact
    def __call__(self, x, training=None):
        training = nn.merge_param("training", self.training, training)
        return nn.Dropout(0.5)(x, deterministic=not training)


class Fixed(nn.Module):
    """Says it itself where it calls."""

    @nn.compact
    def __call__(self, x, more=False):
        return Inner()(x, train=False)


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
        Fixed(),
        nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0)),
        jpipe.layer(Named(), lambda m, x: m(x, training=False)),
    ],
    ids=lambda listed: type(listed).__name__,
)
def test_switches_set_by_the_user_stay_and_are_not_noted(listed):
    assert not drops(listed, True)
    noted = notes(jpipe.sequential([listed], 2))
    assert "left" not in noted
    assert "takes" not in noted


class Always(NamedNnx):
    """Drops in evaluation too, though it is frozen."""

    def __call__(self, x):
        return self.dropout(x, deterministic=False)


def test_constant_switch_overrules_a_frozen_attribute():
    layer = Always()
    layer.eval()
    assert drops(layer, False)
    assert drops(layer, True)

"""Dropouts and batch norms that nobody told whether they are trained."""

import enum
import re

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


def name(value):
    return "" if isinstance(value, str | bool) else type(value).__name__


def apply(listed, train):
    pipe = jpipe.sequential([listed], 2)
    return pipe.apply(pipe.init(KEY, X), X, rngs=RNGS, train=train)


def drops(listed, train):
    """Whether a layer that multiplies by one drops anything."""
    return bool((np.asarray(apply(listed, train)) == 0).any())


def asked(listed, train):
    """What the user is asked about a layer, a line for each thing."""
    with pytest.raises(ValueError, match="it is unclear what of this layer") as error:
        apply(listed, train)
    assert any(note.startswith("raised by layer 0") for note in error.value.__notes__)
    first, *lines = str(error.value).split("\n")
    assert first.endswith(f"in {'training' if train else 'evaluation'}:")
    return [line.removeprefix("  * ") for line in lines]


class Enabled(nn.Module):
    """Is evaluated in training, if nobody says more."""

    @nn.compact
    def __call__(self, x, enable_dropout=False):
        return nn.Dropout(0.5)(x, deterministic=not enable_dropout)


class Guarded(nn.Module):
    """Has no dropout at all, if nobody says more."""

    @nn.compact
    def __call__(self, x, scale=None, enable_dropout=False):
        return nn.Dropout(0.5, deterministic=False)(x) if enable_dropout else x


class Outer(nn.Module):
    """Is told, and holds what is not."""

    @nn.compact
    def __call__(self, x, train, more=False):
        return Inner()(x)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return x if deterministic else nn.Dropout(0.5, deterministic=False)(x)


class Inference(nn.Module):
    """Is trained in evaluation, if nobody says more."""

    @nn.compact
    def __call__(self, x, inference=False):
        return nn.Dropout(0.5)(x, deterministic=inference)


class Mode(nn.Module):
    """Is told by a word."""

    @nn.compact
    def __call__(self, x, mode="eval"):
        return nn.Dropout(0.5)(x, deterministic=mode != "train")


class Numbered(nn.Module):
    @nn.compact
    def __call__(self, x, phase=0):
        return nn.Dropout(0.5)(x, deterministic=phase != 1)


class Phase(enum.Enum):
    TRAIN = 1
    TEST = 2


class InPhase(nn.Module):
    """Is told by a member of an enumeration."""

    @nn.compact
    def __call__(self, x, phase=Phase.TEST):
        return nn.Dropout(0.5)(x, deterministic=phase is not Phase.TRAIN)


class EnabledNnx(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, enable_dropout=False):
        return self.dropout(x, deterministic=not enable_dropout)


class GuardedNnx(EnabledNnx):
    def __call__(self, x, enable_dropout=False):
        return self.dropout(x) if enable_dropout else x


class InferenceNnx(EnabledNnx):
    def __call__(self, x, inference=False):
        return self.dropout(x, deterministic=inference)


TYPED = (
    "list jpipe.layer(module, lambda module, x, train: module(x, enable_dropout=train))"
)


@pytest.mark.parametrize(
    ("listed", "train", "typed"),
    [
        (Enabled(), True, TYPED),
        (Guarded(), True, TYPED),
        (Outer(), True, "where Outer calls it, write deterministic=not train;"),
        (nn.remat(Enabled)(), True, TYPED),
        (nn.jit(Enabled)(), True, TYPED),
        (EnabledNnx(), True, TYPED),
        (GuardedNnx(), True, TYPED),
        (Inference(), False, "module(x, inference=not train))"),
        (InferenceNnx(), False, "module(x, inference=not train))"),
        (Mode(), True, "module(x, mode=... if train else 'eval'))"),
        (Numbered(), True, "module(x, phase=... if train else 0))"),
        (InPhase(), True, "module(x, phase=... if train else <Phase.TEST: 2>))"),
    ],
    ids=name,
)
def test_what_nobody_fills_is_asked_for(listed, train, typed):
    (line,) = asked(listed, train)
    assert "ropout" in line
    assert typed in line
    if train:  # the first thing that is done with a layer is to evaluate it
        assert not drops(listed, False)


@pytest.mark.parametrize("module", [Enabled(), Guarded(), EnabledNnx(), GuardedNnx()])
def test_what_it_says_to_type_is_an_answer(module):
    (line,) = asked(module, True)
    told, frozen = re.findall(r"jpipe\.layer\(.*?\)\)", line)
    for typed, trained in ((told, True), (frozen, False)):
        listed = eval(typed, {"jpipe": jpipe, "module": module})
        assert drops(listed, True) is trained
        assert not drops(listed, False)


def test_a_question_in_full():
    assert asked(Enabled(), True) == [
        "dropout Dropout_0 does what evaluation does, as nobody fills "
        "enable_dropout=False of Enabled.__call__; list jpipe.layer(module, lambda "
        "module, x, train: module(x, enable_dropout=train)); to freeze it, "
        "jpipe.layer(module, lambda module, x: module(x, enable_dropout=False))"
    ]


class Block(nn.Module):
    """Asks by a name that is known, and may be left alone."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train)(x)
        return nn.Dropout(0.5)(x, deterministic=not train)


class Forgets(nn.Module):
    """Is told and tells one of its blocks."""

    @nn.compact
    def __call__(self, x, train, more=False):
        return Block()(Block()(x, train)) + Enabled()(x, train)


class PassesOn(nn.Module):
    @nn.compact
    def __call__(self, *args, **keywords):
        return Block()(*args, **keywords)


def test_all_of_a_layer_is_asked_at_once():
    lines = asked(Forgets(), True)
    assert lines == [
        "batch norm Block_0/BatchNorm_0 and dropout Block_0/Dropout_0 does what "
        "evaluation does, as nobody fills train=False of Block (Block_0).__call__; "
        "where Forgets calls it, write train=train; to freeze it, train=False"
    ]


def test_one_that_takes_anything():
    listed = jpipe.layer(PassesOn(), lambda module, x: module(x))
    (line,) = asked(listed, True)
    assert "where PassesOn calls it, write train=train" in line


class BlockNnx(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, train=False):
        x = self.norm(x, use_running_average=not train)
        return self.dropout(x, deterministic=not train)


@pytest.mark.parametrize(
    ("listed", "parts"),
    [
        (
            nn.Sequential([nn.Dense(4), Block()]),
            "batch norm layers_1/BatchNorm_0 and dropout layers_1/Dropout_0",
        ),
        (
            nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), BlockNnx()),
            "batch norm layers/1/norm and dropout layers/1/dropout",
        ),
    ],
    ids=name,
)
def test_in_a_sequential(listed, parts):
    (line,) = asked(listed, True)
    assert line.startswith(parts)
    assert "list what the Sequential holds one by one, where this is told train" in line
    assert "jpipe.layer(module, lambda module, x: module(x, train=False))" in line


def test_functions_and_stages_that_call_linen_modules():
    def function(x):
        return Enabled().apply({}, x)

    stage = jpipe.Stage(
        lambda key, x: Block().init(key, x),
        lambda variables, x: Block().apply(variables, x),
    )
    for listed, told in ((function, "enable_dropout=train"), (stage, "train=train")):
        (line,) = asked(listed, True)
        assert f"let the function that calls it name train, and write {told}" in line


class Scanned(nn.Module):
    """Applies a block many times in a transformation."""

    block: type

    @nn.compact
    def __call__(self, x, train):
        scan = nn.scan(
            lambda block, x, _: (block(x, *[train] * (type(block) is Block)), None),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        return scan(self.block(), x, None)[0]


def test_through_a_scan():
    assert drops(Scanned(Block), True)
    (line,) = asked(Scanned(Enabled), True)
    assert "enable_dropout=train" in line


class Constant(nn.Module):
    """What it does, it does on purpose; its parameters are for something else."""

    @nn.compact
    def __call__(self, x, mask=None, output_attentions=False, padding="SAME"):
        x = nn.BatchNorm(use_running_average=True)(x)
        x = Block()(x, train=False)
        x = nn.MultiHeadAttention(2, dropout_rate=0.5, deterministic=True)(x)
        x = nn.Dropout(0.5, deterministic=True)(x)
        return (x, x) if output_attentions else x


class Sampled(nn.Module):
    """Drops in evaluation too, on purpose."""

    @nn.compact
    def __call__(self, x, mask=None, return_all=False):
        return nn.Dropout(0.5, deterministic=False)(x)


class Backbone(nn.Module):
    """Has blocks that nobody tells anything."""

    @nn.compact
    def __call__(self, x, train):
        return Block()(x) if not train else Block()(x, train)


class Above(nn.Module):
    """Freezes its backbone with an argument."""

    @nn.compact
    def __call__(self, x, train, freeze=True):
        x = nn.remat(Backbone, static_argnums=(2,))()(x, False)
        return nn.Dropout(0.5)(x, deterministic=not train or freeze)


class Field(nn.Module):
    """Is frozen by an attribute."""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic=None, extra=False):
        frozen = nn.merge_param("deterministic", self.deterministic, deterministic)
        return nn.Dropout(0.5)(x, deterministic=frozen)


class ConstantNnx(BlockNnx):
    def __call__(self, x, mask=None, output_attentions=False):
        x = self.norm(x, use_running_average=True)
        return self.dropout(x, deterministic=True)


# The input has no axis of tokens: examples attend to one another.
@pytest.mark.filterwarnings("ignore:each micro-batch by itself")
@pytest.mark.parametrize(
    "listed",
    [
        Constant(),
        nn.remat(Constant)(),
        Above(),
        Field(deterministic=True),
        nn.Sequential([Field(deterministic=True), nn.relu]),
        ConstantNnx(),
        nnx.Sequential(ConstantNnx(), nnx.relu),
        nn.Sequential([nn.Dropout(0.0, deterministic=True), nn.relu]),
    ],
    ids=name,
)
def test_what_somebody_wrote_down_is_trusted(listed):
    assert not drops(listed, True)
    assert not drops(listed, False)


def test_what_drops_on_purpose_does():
    assert drops(Sampled(), False)
    assert drops(Sampled(), True)


@pytest.mark.parametrize("known", [Block(), nn.jit(Block, static_argnums=(2,))()])
def test_equal_layers_inside_a_jit_of_flax(known):
    pipe = jpipe.sequential([known, nn.jit(Enabled)(), nn.jit(Enabled)()], 2)
    variables = pipe.init(KEY, X)
    pipe.apply(variables, X)
    with pytest.raises(ValueError, match="unclear"):
        pipe.apply(variables, X, rngs=RNGS, train=True)


def test_a_question_leaves_what_was_stashed_and_drawn_as_it_was():
    class Stashes(nn.Module):
        """Is traced again, as a parameter of it may be a switch."""

        @nn.compact
        def __call__(self, x, extra=False):
            jpipe.stash("x", x)
            return nn.Dense(4)(x)

    class Pops(nn.Module):
        @nn.compact
        def __call__(self, x, extra=False):
            return nn.Dropout(0.5, deterministic=False)(x) + jpipe.pop("x")

    layers = [Stashes(), nn.tanh, Pops()]
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(KEY, X)
    rngs = {"dropout": KEY}
    loss, _ = pipe.value_and_grad(ref.mse)(variables, X, X, rngs=rngs)
    assert np.isfinite(loss)


def test_classes_are_what_they_were_and_no_tracer_outlives_a_question(small_heap):
    before = dict(vars(EnabledNnx)), dict(vars(nnx.Sequential))
    with jax.check_tracer_leaks():
        asked(nnx.Sequential(EnabledNnx()), True)
        asked(nn.Sequential([Enabled()]), True)
    assert (dict(vars(EnabledNnx)), dict(vars(nnx.Sequential))) == before

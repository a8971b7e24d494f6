"""Errors inside a layer: which layer it was, where, and on what input."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors
from flax import linen as nn

import jpipe

from .model import KEY, TARGETS, Unlucky, X, fragile, mse


def notes_of(call) -> list[str]:
    """The notes of an exception that kept its type."""
    with pytest.raises(Unlucky, match="no luck") as raised:
        call()
    assert type(raised.value) is Unlucky
    return raised.value.__notes__


def test_exception_in_init_names_the_layer():
    notes = notes_of(lambda: fragile("always").init(KEY, X))
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
    assert note in notes


def test_exception_in_a_function_and_in_a_stage_names_the_layer():
    def broken(x):
        raise Unlucky("no luck in functions")

    def apply(variables, x):
        raise Unlucky("no luck in stages")

    stage = jpipe.Stage(init=lambda key, x: {}, apply=apply, name="Own")
    for layer, name in ((broken, "broken"), (stage, "Own")):
        notes = notes_of(
            lambda layer=layer: jpipe.pipeline([nn.relu, layer], 2).init(KEY, X)
        )
        assert any(f"layer 1 ({name}) of stage 1" in note for note in notes)


def test_exception_in_apply_and_value_and_grad_names_the_layer():
    # Micro-batches of twice as many examples went through.
    pipe = fragile("small")
    variables = pipe.init(KEY, jnp.concatenate([X, X]))
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
    assert note in notes_of(lambda: pipe.apply(variables, X))
    run = pipe.value_and_grad(mse)
    assert note in notes_of(lambda: run(variables, X, TARGETS))


def test_exception_in_training_names_the_layer():
    pipe = fragile("training")
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    note = "raised by layer 3 (Fragile) of stage 2, whose input was float32[2,3]"
    run = pipe.value_and_grad(mse)
    assert note in notes_of(lambda: run(state.variables, X, TARGETS))
    step = pipe.train_step(mse, optax.sgd(0.1))
    assert note in notes_of(lambda: step(state, X, TARGETS))


def test_inputs_of_a_layer_are_described_as_a_tree():
    def broken(x):
        raise Unlucky("no luck with trees")

    pipe = jpipe.pipeline([lambda x: {"a": x, "n": x[:, 0] > 0}, broken], 2)
    notes = notes_of(lambda: pipe.init(KEY, X))
    assert any("whose input was {'a': float32[2,3], 'n': bool[2]}" in n for n in notes)


def pairs(x):
    return x.reshape(-1, 2, *x.shape[1:]).sum(1)


@pytest.mark.parametrize(
    ("size", "parts", "cures"),
    [
        (12, "3", "type num_microbatches=3, or give a batch of 16 examples"),
        (14, "3 or 4", "give a batch of 16 examples"),
    ],
)
def test_a_batch_that_is_cut_through_pairs(size, parts, cures):
    x, targets = jnp.ones((size, 3)), jnp.ones((size, 2))
    layer, loss_fn = nn.Dense(2), lambda y, t: mse(pairs(y), pairs(t))
    in_layers, in_loss = jpipe.pipeline([layer, pairs], 4), jpipe.pipeline([layer], 4)
    variables = in_loss.init(KEY, x)
    calls = [
        lambda: in_layers.apply((*variables, {}), x),
        lambda: in_loss.value_and_grad(loss_fn)(variables, x, targets),
    ]
    if size == 12:  # of another the first micro-batch, of which they are made, fits
        calls.append(lambda: in_layers.init(KEY, x))
    for call in calls:
        with pytest.raises(TypeError, match="cannot reshape") as raised:
            call()
        assert (
            f"micro-batches have {parts} of the {size} examples, and with 4 this error "
            f"does not occur: {cures}"
        ) in raised.value.__notes__
    # What it says works.
    in_loss.value_and_grad(loss_fn)(variables, jnp.ones((16, 3)), jnp.ones((16, 2)))
    if size == 12:
        pipe = jpipe.pipeline([layer], 3)
        pipe.value_and_grad(loss_fn)(variables, x, targets)


def test_whole_batches_that_fail_too_have_no_advice_on_their_size():
    pipe = jpipe.pipeline([lambda x: x.reshape(-1, 7)], 2)
    with pytest.raises(TypeError, match="cannot reshape") as raised:
        pipe.init(KEY, X)
    assert not any("examples" in note for note in raised.value.__notes__)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", jnp.zeros, ())
        if not self.is_initializing():
            count.value += 1
        return x


class MakingMore(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        if not self.is_initializing():
            self.put_variable("others", "sum", x.sum())
        return x


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("losses", "size", jnp.mean(x**2))
        return x


class OnlyTrained(nn.Module):
    first: bool = True

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(3)(x) if self.first else x
        return nn.Dense(2)(x) if train else x


@pytest.mark.parametrize(
    ("layers", "error", "advice"),
    [
        (
            [MakingMore()],
            errors.ModifyScopeVariableError,
            "let its __call__ take train",
        ),
        (
            [OnlyTrained()],
            errors.ScopeParamNotFoundError,
            "let it use the same parameters in training",
        ),
        (
            [OnlyTrained(first=False)],
            errors.ScopeCollectionNotFound,
            "let it use the same parameters in training",
        ),
        (
            [nn.Dense(5)] * 2,
            errors.ScopeParamShapeError,
            "its parameters are those of layer 0 (Dense), as both hold one module",
        ),
    ],
)
def test_errors_of_flax_are_answered_with_what_to_type(layers, error, advice):
    pipe = jpipe.pipeline(layers, 2)

    def trained():
        pipe.apply(pipe.init(KEY, X), X, train=True)

    with pytest.raises(error) as raised:
        trained()
    notes = raised.value.__notes__
    assert any(advice in note for note in notes)
    assert any(note.startswith("raised by layer") for note in notes)


def test_what_writes_trained_or_not_is_trained_and_not_evaluated():
    pipe = jpipe.pipeline([Counting(), nn.Dense(2)], 2)
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    step = pipe.train_step(mse, optax.sgd(0.1))
    for _ in range(2):
        state, _ = step(state, X, TARGETS)
    assert state.model_state[0]["counts"]["calls"] == 2
    with pytest.raises(errors.ModifyScopeVariableError) as raised:
        pipe.apply(state.variables, X)
    notes = raised.value.__notes__
    assert any("let its __call__ take train" in note for note in notes)
    assert any("raised by layer 0 (Counting) of stage 0" in note for note in notes)


@pytest.mark.parametrize("made", [jnp.ones(3), [1.0], None], ids=str)
def test_a_stage_whose_init_returns_no_mapping(made):
    stage = jpipe.Stage(lambda key, x: made, lambda variables, x: x)
    with pytest.raises(TypeError, match=r"init of a jpipe\.Stage returns a mapping"):
        jpipe.pipeline([stage], 2).init(KEY, X)


def test_what_is_sown_is_refused():
    def train():
        pipe = jpipe.pipeline([Sowing()], 2)
        state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
        pipe.train_step(mse, optax.sgd(0.1))(state, X, X)

    with pytest.raises(ValueError, match="from its values, as") as raised:
        train()
    told = [str(raised.value), *raised.value.__notes__]
    assert any("as a part of its output, not by sow" in text for text in told)
    assert any(text.startswith("raised by layer 0 (Sowing)") for text in told)


class ActNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("shift", lambda key: -x.mean(0))


def test_parameters_made_of_data():
    with pytest.raises(ValueError, match=r"params/shift would; .* made = module\.init"):
        jpipe.pipeline([ActNorm()], 2).init(KEY, X)
    module = ActNorm()
    made = module.init(KEY, X)
    stage = jpipe.Stage(lambda key, x: made, module.apply)
    (variables,) = jpipe.pipeline([stage], 2).init(KEY, X)
    chex.assert_trees_all_equal(variables, made)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    w: jax.Array

    def __call__(self, x):
        return self.w * x


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (Tree(jnp.ones(3)), r"Tree is a pytree with arrays, .* jpipe\.Stage"),
        (jax.tree_util.Partial(jnp.multiply, jnp.ones(3)), "a pytree with arrays"),
    ],
)
def test_callable_with_arrays_raises(layer, match):
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline([nn.Dense(3), layer], 2)


def test_what_takes_keywords_and_is_a_librarys_is_a_layer():
    layers = [nn.relu, jnp.sin, jax.jit(jnp.tanh), functools.partial(nn.gelu)]
    assert jpipe.pipeline(layers, 2).num_stages == 4

"""Errors of batches, of axes and of losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn

import jpipe

from .. import reference as ref
from .model import KEY, TARGETS, X, mse, says, two_stages


@pytest.fixture(params=["apply", "value_and_grad", "train_step"])
def call(request, pipe, variables):
    """The three ways to give a batch to a pipeline."""
    if request.param == "apply":
        return lambda x: pipe.apply(variables, x)
    if request.param == "value_and_grad":
        return lambda x: pipe.value_and_grad(mse)(variables, x, TARGETS)
    state = pipe.init_train_state(KEY, X, optax.sgd(0.1))
    return lambda x: pipe.train_step(mse, optax.sgd(0.1))(state, x, TARGETS)


def test_leaf_that_is_no_array(call):
    with pytest.raises(TypeError, match=says("jnp.asarray", "x['a'] is", "x['b'] is")):
        call({"a": 3, "b": "text", "c": X})


def test_a_list_of_numbers_does_not_fill_the_screen():
    pipe = jpipe.sequential([jnp.tanh], 2)
    with pytest.raises(TypeError, match=r"x\[19\] is a float: 1.0\n  \* and 28 more$"):
        pipe.apply(({},), [1.0] * 48)


def test_batch_smaller_than_the_number_of_microbatches(pipe, variables):
    match = says("x has 1 examples", "num_microbatches=2", "num_microbatches=1")
    with pytest.raises(ValueError, match=match):
        pipe.apply(variables, X[:1])
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(variables, X[:1], TARGETS[:1])


def test_batch_without_examples(pipe, variables):
    # There is no number of micro-batches that would help.
    with pytest.raises(ValueError, match="x has 0 examples") as refusal:
        pipe.apply(variables, X[:0])
    assert "num_microbatches=1" not in str(refusal.value)


def test_leaves_of_unequal_batch_size(pipe, variables):
    match = says("x: 4, along axis 0", "targets: 3, along axis 0", "target_axes")
    with pytest.raises(ValueError, match=match):
        pipe.value_and_grad(mse)(variables, X, TARGETS[:3])
    tree = jpipe.pipeline([lambda inputs: inputs["a"]], 2)
    match = says("differ in batch size", "x['a']: 4", "x['b'][0]: 2")
    with pytest.raises(ValueError, match=match):
        tree.apply(({},), {"a": X, "b": [X[:2]]})


@pytest.mark.parametrize(
    ("rngs", "said"),
    [
        (nnx.Rngs(0), ["rngs is an nnx.Rngs", "rngs.dropout()"]),
        (0, ["rngs is 0; needs a random key, such as jax.random.key(0)"]),
        ({"dropout": 1}, ["rngs['dropout'] is 1", "jax.random.key(1)"]),
    ],
)
def test_keys_that_are_none(pipe, variables, rngs, said):
    with pytest.raises(TypeError, match=says(*said)):
        pipe.apply(variables, X, rngs=rngs)
    with pytest.raises(TypeError, match=says(*said)):
        pipe.value_and_grad(mse)(variables, X, TARGETS, rngs=rngs)


@pytest.mark.parametrize("rngs", [None, {"noise": KEY}])
def test_a_stream_without_a_key(rngs):
    pipe = jpipe.pipeline([nn.Dropout(0.5)], 2)
    with pytest.raises(errors.InvalidRngError) as refusal:
        pipe.value_and_grad(mse)(({},), X, X, rngs=rngs)
    assert any("rngs={'dropout': jax" in note for note in refusal.value.__notes__)


class OfDict(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5)(x["a"], deterministic=not train)


class OfDictWithKey(nn.Module):
    def __call__(self, x, train, rngs):
        return jax.random.normal(rngs["dropout"], x["a"].shape) if train else x["a"]


class OfDictInNnx(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(x["a"])


@pytest.mark.parametrize("layer", [OfDict(), OfDictWithKey(), OfDictInNnx()])
def test_a_stream_without_a_key_is_no_matter_of_dicts(layer):
    pipe = jpipe.pipeline([layer], 2)
    with pytest.raises((errors.InvalidRngError, ValueError, TypeError)) as refusal:
        pipe.value_and_grad(mse)(({},), {"a": X}, X)
    told = [str(refusal.value), *refusal.value.__notes__]
    assert any("rngs=" in text for text in told)
    assert not any("taken apart" in text for text in told)


def test_targets_that_are_no_arrays(pipe, variables):
    with pytest.raises(TypeError, match=says("convert with jnp.asarray", "targets is")):
        pipe.value_and_grad(mse)(variables, X, "targets")


@pytest.mark.parametrize(
    ("in_axes", "parts"),
    [
        ("batch", ["in_axes: 'batch' is neither an axis nor None"]),
        (True, ["in_axes: True is neither an axis nor None"]),
        (2, ["x of shape (4, 3) has no axis 2"]),
        (-3, ["x of shape (4, 3) has no axis -3"]),
        ((0, 0), ["in_axes=(0, 0)", "prefix", "x"]),
        (None, ["no leaf has a batch axis", "in_axes"]),
    ],
    ids=str,
)
def test_bad_in_axes(in_axes, parts):
    pipe = jpipe.pipeline([nn.relu], 2, in_axes=in_axes)
    with pytest.raises(ValueError, match=says(*parts)):
        pipe.apply(({},), X)


def test_bad_target_axes(variables):
    pipe = jpipe.pipeline(two_stages(), 2, balance=[2, 1], target_axes=3)
    with pytest.raises(ValueError, match=says("targets of shape (4, 2) has no axis 3")):
        pipe.value_and_grad(mse)(variables, X, TARGETS)


@pytest.mark.parametrize(
    ("out_axes", "parts"),
    [
        ("batch", ["out_axes: 'batch' is neither an axis nor None"]),
        (0.5, ["out_axes: 0.5 is neither an axis nor None"]),
        (True, ["out_axes: True is neither an axis nor None"]),
        ((0, None), ["out_axes=(0, None) is not a prefix of outputs"]),
        (2, ["out_axes=2", "outputs has shape (2, 3)", "None for what is the same"]),
    ],
    ids=str,
)
def test_bad_out_axes(out_axes, parts):
    pipe = jpipe.pipeline([nn.relu], 2, out_axes=out_axes)
    with pytest.raises(ValueError, match=says(*parts[:1])) as refusal:
        pipe.apply(({},), X)
    assert all(part in str(refusal.value) for part in parts)


@pytest.mark.parametrize(
    ("loss_fn", "options", "parts"),
    [
        pytest.param(
            lambda y, t: y - t,
            {},
            ["must return a scalar loss", "float32[2,2]"],
            id="array",
        ),
        pytest.param(
            lambda y, t: jnp.sum(y > t),
            {},
            ["scalar loss of a floating dtype", "int32[]"],
            id="integer",
        ),
        pytest.param(
            lambda y, t: 0.5,
            {},
            ["must return a scalar loss, computed", "the Python number 0.5"],
            id="a Python number",
        ),
        pytest.param(
            lambda y, t: None, {}, ["must return a scalar loss", "None"], id="nothing"
        ),
        pytest.param(
            lambda y, t: (mse(y, t), y),
            {},
            ["must return a scalar loss", "(float32[], float32[2,2])"],
            id="pair without has_aux",
        ),
        pytest.param(
            mse,
            {"has_aux": True},
            ["has_aux=True", "must return (loss, aux)", "float32[]"],
            id="has_aux without pair",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), y, t),
            {"has_aux": True},
            ["has_aux=True", "must return (loss, aux)", "float32[2,2]"],
            id="has_aux with three",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), jnp.float32(2), y),
            {"has_aux": True, "reduction": "weighted"},
            ["must return ((total, weight), aux)", "float32[], float32[2,2])"],
            id="weighted and has_aux with three",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), y),
            {"has_aux": True, "reduction": "weighted"},
            ["must return ((total, weight), aux)", "(float32[], float32[2,2])"],
            id="weighted and has_aux with two",
        ),
        pytest.param(
            lambda y, t: ((mse(y, t), jnp.float32(2)), y),
            {"has_aux": True},
            ["must return (loss, aux)", "((float32[], float32[]), float32[2,2])"],
            id="has_aux with what weighted returns",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), jnp.float32(2), y),
            {},
            ["must return a scalar loss", "for ((total, weight), aux) both"],
            id="three without options",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), {"at": "end"}),
            {"has_aux": True},
            ["aux['at'] is 'end', a str; needs arrays or numbers"],
            id="aux with a text",
        ),
        pytest.param(
            mse,
            {"reduction": "weighted"},
            ["reduction='weighted'", "(total, weight)", "float32[]"],
            id="weighted without pair",
        ),
        pytest.param(
            lambda y, t: (mse(y, t), jnp.ones(2)),
            {"reduction": "weighted"},
            ["the weight must be a scalar", "float32[2]"],
            id="weights",
        ),
        pytest.param(
            lambda y, t: (y, jnp.float32(2)),
            {"reduction": "weighted"},
            ["the total must be a scalar", "float32[2,2]"],
            id="totals",
        ),
    ],
)
def test_loss_function_that_returns_something_else(
    pipe, variables, loss_fn, options, parts
):
    with pytest.raises(TypeError, match=says(*parts)):
        pipe.value_and_grad(loss_fn, **options)(variables, X, TARGETS)


def test_loss_object_that_cannot_be_hashed(pipe, variables):
    # As any dataclass that is not frozen. `jax.value_and_grad` takes it too.
    @dataclasses.dataclass
    class Scaled:
        scale: float

        def __call__(self, outputs, targets):
            return self.scale * mse(outputs, targets)

    loss, _ = pipe.value_and_grad(Scaled(2.0))(variables, X, TARGETS)
    assert loss == 2 * pipe.value_and_grad(mse)(variables, X, TARGETS)[0]


def test_aux_that_cannot_be_stacked(pipe, variables):
    # Three examples in two micro-batches: aux per example is of two shapes.
    value_and_grad = pipe.value_and_grad(lambda y, t: (mse(y, t), y), has_aux=True)
    with pytest.raises(ValueError, match=says("(2, 1)", "aux: (2, 2) and (1, 2)")):
        value_and_grad(variables, X[:3], TARGETS[:3])


def test_outputs_and_targets_that_do_not_fit(pipe, variables):
    with pytest.raises(TypeError, match="incompatible shapes") as refusal:
        pipe.value_and_grad(mse)(variables, X, np.ones((4, 7), np.float32))
    (note,) = (text for text in refusal.value.__notes__ if "loss_fn" in text)
    assert note.startswith(
        "raised by loss_fn on outputs float32[2,2] and targets float32[2,7], those "
        "of a micro-batch; what it closes over is not cut"
    )


@pytest.mark.parametrize("method", ["value_and_grad", "train_step"])
def test_reduction_and_loss_function_that_are_neither(pipe, method):
    def make(loss_fn, **options):
        rest = (optax.sgd(0.1),) if method == "train_step" else ()
        return getattr(pipe, method)(loss_fn, *rest, **options)

    match = says("unknown reduction 'max'", "'mean', 'sum', 'weighted'")
    with pytest.raises(ValueError, match=match):
        make(mse, reduction="max")
    with pytest.raises(TypeError, match=says("loss_fn=0.5", "(outputs, targets)")):
        make(0.5)


def test_inside_a_trace_the_message_says_where_to_call():
    pipe = jpipe.pipeline([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    says = pytest.raises(TypeError, match=r"outside of jax\.jit")
    with says:
        jax.jit(pipe.value_and_grad(ref.mse))(variables, x, targets)
    with says:
        jax.eval_shape(pipe.apply, variables, x)
    with says:
        jax.eval_shape(lambda key: pipe.init(key, x), jax.random.key(0))
    tx = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    with says:
        jax.jit(pipe.train_step(ref.mse, tx))(state, x, targets)


def test_tracers_are_refused_the_second_time_too():
    pipe = jpipe.pipeline([jnp.sin, jnp.cos], 2)
    x, _ = ref.regression(4)

    def total(x):
        return pipe.apply(({}, {}), x).sum()

    for _ in range(2):
        with pytest.raises(TypeError, match="a pipeline compiles its own stages"):
            jax.grad(total)(x)
        total(x)

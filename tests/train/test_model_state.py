"""Collections beside the parameters: what a step makes of them."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct

import jpipe
from jpipe._layers._batch_norm import STATISTIC_NAME_PREFIX
from jpipe._partition._cut_points import CutPoints

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

SGD = optax.sgd(0.1)


class Writes(nn.Module):
    """Writes what a function makes of its input and of what was there."""

    function: Any
    first: Any = 0.0

    @nn.compact
    def __call__(self, x, train):
        make = lambda: jax.tree.map(jnp.asarray, self.first)  # noqa: E731
        held = self.variable("state", "held", make)
        if train:
            held.value = self.function(x, held.value)
        return nn.Dense(4)(x)


def written(function, first=0.0, num_microbatches=2, steps=1):
    """What some steps have made of a state; the inputs of two parts begin with 0, 1."""
    x = jnp.arange(8.0)[:, None] * jnp.ones(4)
    pipe = jpipe.pipeline([Writes(function, first), ref.dense(4)], num_microbatches)
    state = pipe.init_train_state(jax.random.key(0), x, SGD)
    # What the loss returns beside it stands before what layers write.
    loss_and_aux = lambda y, t: (0.01 * ref.mse(y, t), (y.sum(), t.sum()))  # noqa: E731
    step = pipe.train_step(loss_and_aux, SGD, has_aux=True)
    for _ in range(steps):
        state, _ = step(state, x, x)
    return state.model_state[0]["state"]["held"]


def of_parts(first, second):
    return lambda x, _: jnp.where(x.min() == 0, first, second)


@struct.dataclass
class Counted:
    """An array, and a count that JAX takes for a part of the structure."""

    mean: jax.Array
    count: int = struct.field(pytree_node=False, default=0)


@pytest.mark.parametrize(
    ("function", "first", "expected"),
    [
        (of_parts(np.inf, 1.0), 0.0, np.inf),
        (of_parts(3e38, -3e38), 0.0, 0.0),  # whose sum overflows
        (of_parts(3, 5), 1, 5),
        (lambda x, held: held.replace(mean=held.mean + 1), Counted(0.0), Counted(1.0)),
        # One variable takes the value of another.
        (lambda x, h: {"b": h["a"], "a": h["a"] + 1}, {"a": 7.0, "b": 1.0}, None),
    ],
    ids=["inf", "large", "integer", "structure", "one of another"],
)
def test_floats_are_averaged_and_integers_are_of_the_last(function, first, expected):
    expected = {"b": 7.0, "a": 8.0} if expected is None else expected
    found = written(function, first)
    assert jax.tree.leaves(found) == jax.tree.leaves(expected)


class Last(nn.Module):
    """Writes the first number that it is given."""

    @nn.compact
    def __call__(self, x, train):
        held = self.variable("state", "held", lambda: jnp.int32(0))
        if train:
            held.value = x[0, 0].astype(jnp.int32)
        return nn.Dense(4)(x)


@pytest.mark.parametrize("remat", ["full", "none", "except_last"])
def test_integers_are_of_the_last_whichever_forwards_wait_for_backwards(remat):
    x = jnp.arange(8.0)[:, None] * jnp.ones(4)
    pipe = jpipe.pipeline([jnp.abs, Last()], 4, schedule="gpipe", remat=remat)
    find = pipe.value_and_grad(ref.mse, has_state=True)
    (_, new), _ = find(pipe.init(jax.random.key(0), x), x, x)
    assert new[1]["state"]["held"] == 6


@pytest.mark.parametrize(
    ("function", "first", "says"),
    [
        # Its arrays would be kept in the structure of before.
        (
            lambda x, held: Counted(held.mean, held.count + 1),
            Counted(0.0),
            r"or their shapes: state/held",
        ),
        (
            lambda _, key: jax.random.split(key)[0],
            jax.random.key(3),
            "all micro-batches would draw the same",
        ),
        (lambda x, _: x.mean(), 0, r"held of float32, which is int32"),
    ],
    ids=["static", "key", "integer"],
)
def test_state_without_a_mean_is_refused(function, first, says):
    with pytest.raises(ValueError, match=says):
        written(function, first)


def test_the_mean_of_equal_values_is_that_value():
    """To the bit: of parts of different sizes, after many steps."""
    values = jnp.linspace(0.1, 5.7, 57)
    # What is given back as it came is not written: this is, and is the same.
    found = written(lambda x, held: jnp.abs(held), values, 7, 9)
    np.testing.assert_array_equal(found, values)
    assert written(lambda x, held: held + 1, 0.0, 7, 9) == 9


@pytest.mark.parametrize("is_list", [True, False])
def test_a_collection_that_flax_overwrites_with_gradients_is_refused(is_list):
    x, targets = ref.regression(8)
    layer = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    options = {} if is_list else {"num_stages": 1}
    pipe = jpipe.pipeline([layer] if is_list else layer, 2, **options)
    state = pipe.init_train_state(jax.random.key(0), x, SGD)
    with pytest.raises(ValueError, match="hold the collection _overwrite_with"):
        pipe.train_step(ref.mse, SGD)(state, x, targets)


@pytest.fixture(scope="module")
def normed():
    x, targets = ref.regression(10)
    norms = [nn.BatchNorm(), nnx.BatchNorm(5, rngs=nnx.Rngs(0))]
    pipe = jpipe.pipeline([norms[0], jnp.tanh, norms[1], ref.dense(4)], 3)
    return pipe, pipe.init(jax.random.key(0), x), x, targets


def test_state_that_training_leaves_unchanged_is_warned_of_once(normed):
    """By a gradient and by `apply`, at the line of the call; not in evaluation."""
    pipe, variables, x, targets = normed
    find = pipe.value_and_grad(ref.mse)
    find(variables, x, targets, train=False)
    pipe.apply(variables, x)
    for name, call in (
        ("value_and_grad", lambda: find(variables, x, targets)),
        ("apply", lambda: pipe.apply(variables, x, train=True)),
    ):
        says = (
            rf"{name} leaves variables\[0\]\['batch_stats'\], .*\[2\].*has_state=True"
        )
        with pytest.warns(UserWarning, match=says) as caught:
            call()
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(2)(x)


def test_statistics_are_merged_where_a_stage_ends_between_mean_and_variance(
    monkeypatch,
):
    """The earlier stage leaves the mean, the later one the variance.

    The cut is set by private names: where a model is cut depends on its sizes.
    """
    find_stage_starts = CutPoints.find_stage_starts

    def cut_behind_mean(cuts, traced):
        for index, eqn in enumerate(traced.closed.jaxpr.eqns):
            if str(eqn.params.get("name", "")).startswith(STATISTIC_NAME_PREFIX):
                return [index + 1]
        return find_stage_starts(cuts, traced)

    monkeypatch.setattr(CutPoints, "find_stage_starts", cut_behind_mean)
    x = jax.random.normal(jax.random.key(0), (9, 3))
    model = Normed()
    variables = model.init(jax.random.key(0), x)
    _, expected = model.apply(variables, x, train=True, mutable="batch_stats")
    pipe = jpipe.pipeline(model, 2, num_stages=2)
    state = pipe.init_train_state(jax.random.key(0), x, SGD, variables=variables)
    state, _ = pipe.train_step(lambda y, t: (y**2).mean(), SGD)(state, x, None)
    ref.assert_close(state.model_state, expected, ref.FLOAT32)


class KeepsDims(nn.Module):
    """Statistics that are made of shape (d,), and written as (1, 1, d)."""

    @nn.compact
    def __call__(self, x, train=False):
        held = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
        mean = x.mean((0, 1), keepdims=True) if train else held.value
        if train and not self.is_initializing():
            held.value = 0.9 * held.value + 0.1 * mean
        return nn.Dense(2)(x - jax.lax.stop_gradient(held.value))


class NnxKeepsDims(nnx.Module):
    def __init__(self, rngs):
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.dense = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, train=False):
        held = self.mean[...]
        if train:
            mean = x.mean((0, 1), keepdims=True)
            self.mean.set_value(0.9 * held + 0.1 * mean)
        return self.dense(x - jax.lax.stop_gradient(held))


def of_no_shape(tree):
    """Leaves without their shapes."""
    return [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("make", [KeepsDims, lambda: NnxKeepsDims(nnx.Rngs(0))])
@pytest.mark.parametrize("is_list", [True, False])
def test_statistics_keep_their_shape_where_they_are_written_with_leading_ones(
    is_list, make
):
    """From a state that `init` makes, and from one that plain Flax has written."""
    x = jax.random.normal(jax.random.key(0), (8, 3, 4))
    number = {} if is_list else {"num_stages": 1}
    pipe = jpipe.pipeline([make()] if is_list else make(), 4, **number)
    step = pipe.train_step(lambda y, t: (y**2).mean(), SGD)
    variables = jax.device_get(pipe.init(jax.random.key(0), x))
    results = []
    for shape in [(4,), (1, 1, 4)]:
        entry = variables[0] if is_list else variables
        mean = entry["batch_stats"]["mean"].reshape(shape)
        entry = {**entry, "batch_stats": {"mean": mean}}
        state = pipe.init_train_state(
            jax.random.key(0), x, SGD, variables=(entry,) if is_list else entry
        )
        for _ in range(2):
            state, metrics = step(state, x, None)
        (mean,) = jax.tree.leaves(state.model_state)
        assert mean.shape == shape
        expected_mean = 0.19 * np.mean(x, (0, 1))
        np.testing.assert_allclose(np.ravel(mean), expected_mean, rtol=1e-5, atol=1e-7)
        assert pipe.apply(state.variables, x).shape == (8, 3, 2)
        results.append(of_no_shape((state.params, metrics)))
    ref.assert_close(*results, ref.FLOAT32)


def test_statistics_of_another_shape_are_refused():
    """Of as many numbers, which are broadcast in another way."""
    with pytest.raises(ValueError, match=r"was \(1, 4\) and became \(4, 1\)"):
        written(lambda x, held: held.T + 1, np.zeros((1, 4)))

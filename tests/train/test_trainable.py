"""``trainable=``: what is not selected has no gradient, no state, no cost, no change.

That gradients and steps are those of plain JAX with the rest constant, under every
schedule and remat, is in the rows of `tests.matrix`; here is what may be given, what
is refused, and what a frozen layer costs.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization

import jpipe

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

KEY = jax.random.key(0)
TX, SGD = optax.adam(1e-2), optax.sgd(0.1)
X, _ = ref.regression(8)


class Adapted(nnx.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(5, 5, rngs=rngs)
        self.lora = nnx.LoRA(5, 2, 5, rngs=rngs)
        self.lora.lora_b[...] = jnp.ones((2, 5)) / 5
        # A Variable may hold a tree.
        self.scale = nnx.LoRAParam({"all": jnp.ones(()), "each": jnp.ones(5)})

    def __call__(self, x):
        scale = self.scale.get_value()
        return self.base(x) + scale["all"] * scale["each"] * self.lora(x)


def make():
    """A linen layer between two of nnx."""
    rngs = nnx.Rngs(0)
    layers = [Adapted(rngs), jnp.tanh, ref.dense(5), Adapted(rngs)]
    return layers, jpipe.pipeline(layers, 2, balance=[1, 2, 1])


@pytest.fixture(scope="module")
def model():
    layers, pipe = make()
    return layers, pipe, pipe.init(KEY, X)


@pytest.fixture(scope="module")
def pipe():
    """Another, as too many builds in a row warn."""
    return make()[1]


def state_of(pipe, tx, trainable):
    return pipe.init_train_state(KEY, X, tx, trainable=trainable)


def of_lora(path, leaf):
    return np.bool_(isinstance(leaf, nnx.LoRAParam) and leaf.shape != ())


LORA = {f"{i}/lora/lora_{p}" for i in (0, 3) for p in "ab"}
SCALES = {f"{i}/scale/{p}" for i in (0, 3) for p in ("all", "each")}
# As nnx would hold them, the parameters of linen are Params.
BASES = {f"{i}/base/{p}" for i in (0, 3) for p in ("kernel", "bias")}
BASES |= {"2/bias", "2/kernel"}
SELECTIONS = [
    (nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)), BASES),
    (of_lora, LORA | {"0/scale/each", "3/scale/each"}),
    (["2/bias", nnx.LoRAParam, "3/scale/all"], LORA | SCALES | {"2/bias"}),
]


@pytest.mark.parametrize(("trainable", "selected"), SELECTIONS)
def test_gradients_are_those_of_what_is_selected(model, trainable, selected):
    _, pipe, variables = model
    loss, all_grads = pipe.value_and_grad(ref.mse)(variables, X, X)
    actual = pipe.value_and_grad(ref.mse, trainable=trainable)(variables, X, X)
    flat, tree = jax.tree_util.tree_flatten_with_path(all_grads)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    assert selected <= set(names)
    pairs = zip(names, flat, strict=True)
    expected = [leaf if name in selected else None for name, (_, leaf) in pairs]
    ref.assert_close(actual, (loss, tree.unflatten(expected)), ref.FLOAT32)


def answers_nothing(path, leaf):
    return None


WRONG = [
    (3, TypeError, "trainable=3 is an int; trainable= takes paths such as '*/lora_*'"),
    (answers_nothing, TypeError, "answers None for (0, 'base', 'bias')"),
    (["2", "0/lora_a", "9/*"], ValueError, "'0/lora_a': the nearest are '0/lora/lora_"),
    (nnx.BatchStat, ValueError, "Variable types: LoRAParam, Param\na path starts with"),
    (
        lambda path, leaf: False,
        ValueError,
        "<lambda>: there are 14, such as (0, 'base'",
    ),
]


@pytest.mark.parametrize(("trainable", "kind", "says"), WRONG)
def test_a_selection_of_nothing_is_refused_with_the_paths_there_are(
    model, trainable, kind, says
):
    """A state and a gradient say the same of it."""
    _, pipe, variables = model
    with pytest.raises(kind) as error:
        state_of(pipe, TX, trainable)
    assert says in str(error.value)
    with pytest.raises(kind) as again:
        pipe.value_and_grad(ref.mse, trainable=trainable)(variables, X, X)
    assert str(again.value) == str(error.value)


def test_frozen_parameters_stay_the_same_arrays_and_statistics_go_on():
    """The arrays of a state that is donated; a state with gaps can be saved, too."""
    layers = [ref.dense(5), nn.BatchNorm(), nn.BatchNorm(use_running_average=True)]
    pipe, tx = jpipe.pipeline(layers, 2), optax.chain(optax.clip(0.5), TX)
    ends = []
    for trainable in (None, "0/bias"):
        state = state_of(pipe, tx, trainable)
        before, kernel = ref.on_host(state.model_state), state.params[0]["kernel"]
        step = pipe.train_step(ref.mse, tx, trainable=trainable)
        state, _ = step(state, X, X)
        means = [s[1]["batch_stats"]["mean"] for s in (before, state.model_state)]
        assert np.any(means[0] != means[1])
        ref.assert_equal(state.model_state[2], before[2])
        ends.append(ref.on_host(state.model_state))
    ref.assert_equal(*ends)
    assert state.params[0]["kernel"] is kernel
    like, saved = state_of(pipe, tx, trainable), serialization.to_bytes(state)
    restored = pipe.place(serialization.from_bytes(like, saved))
    ref.assert_equal(restored, state)
    ref.assert_equal(step(restored, X, X), step(state, X, X))


def measured(trainable, **options):
    """What a step of six equal stages runs, and what it costs."""
    layers = [ref.dense(5) for _ in range(6)]
    pipe = jpipe.pipeline(layers, 4, devices=jax.devices()[:6], **options)
    state = state_of(pipe, SGD, trainable)
    step = pipe.train_step(ref.mse, SGD, trainable=trainable)
    timeline = step.profile(state, X, X)
    rows = re.findall(r"rank (\d) \|(.*)\|", str(step))
    ran = {rank + op for rank, row in rows for op in re.findall("[BIW]", row)}
    return pipe, ran, timeline.costs


def test_halves_of_a_backward_without_work_are_left_out():
    """And no inputs are residuals: the gradient of a bias reads none."""
    _, ran, costs = measured(["2/bias", "4/bias"], schedule="zb_h1", remat="none")
    assert ran == {"2W", "3I", "4I", "4W", "5I"}
    assert not np.any(costs.residual_bytes[1:5])


class TestAStateMadeToTrainOtherParameters:
    def test_is_refused_with_what_is_missing_and_surplus(self, pipe):
        state = state_of(pipe, TX, "0/lora")
        before = ref.on_host(state)
        step = pipe.train_step(ref.mse, TX, trainable=["0/lora/lora_a", "2/bias"])
        with pytest.raises(ValueError, match="made to train other parameters") as error:
            step(state, X, X)
        for says in (
            "the same trainable= to Pipeline.init_train_state",
            "surplus: opt_state[0].mu[0]['lora']['lora_b']",
            "missing: opt_state[0].mu[2]['bias']",
        ):
            assert says in str(error.value)
        ref.assert_equal(state, before)

"""Batch norms of any class, called in any way: once, twice, frozen, never told."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn
from flax.core import FrozenDict

import jpipe

from .. import reference as ref
from .normed import Normed, committed


def test_a_batch_norm_that_is_called_twice_is_refused():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            norm = nn.BatchNorm(not train, name="norm")
            return norm(x) + norm(2 * x)

    pipe = jpipe.pipeline([Twice(), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="batch norm norm is called twice in one"):
        pipe.value_and_grad(ref.mse)(variables, x, targets)


class TwiceNnx(nnx.Module):
    """Normalizes two inputs with one batch norm."""

    def __init__(self, frozen=False):
        self.norm = nnx.BatchNorm(5, use_running_average=frozen, rngs=nnx.Rngs(0))
        self.norm.mean[...] = self.norm.mean[...] + 0.3

    def __call__(self, x):
        return self.norm(x) + self.norm(2 * x)


def test_one_of_nnx_that_is_called_twice_is_refused():
    pipe = jpipe.pipeline([TwiceNnx(), ref.dense(4)], 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    for _ in range(2):
        with pytest.raises(ValueError, match="batch norm norm is called twice in one"):
            pipe.value_and_grad(ref.mse)(variables, x, targets)
    # Evaluation writes no statistics.
    expected = TwiceNnx(frozen=True)(x) @ variables[1]["params"]["kernel"]
    np.testing.assert_allclose(pipe.apply(variables, x), expected, rtol=1e-5)


def test_a_frozen_batch_norm_may_be_called_twice():
    class Frozen(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.BatchNorm(use_running_average=True, name="norm")
            return norm(x) + norm(2 * x)

    layers = [Frozen(), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2)
    x, targets = ref.regression(4)
    variables = pipe.init(jax.random.key(0), x)
    value = pipe.value_and_grad(ref.mse)(variables, x, targets)
    variables = jax.device_get(variables)

    def loss(params):
        h = layers[0].apply({**variables[0], "params": params[0]}, x)
        return ref.mse(layers[1].apply({"params": params[1]}, h), targets)

    params = [entry["params"] for entry in variables]
    expected, grads = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(value[0], expected, rtol=1e-6)
    ref.assert_close(list(value[1]), grads, ref.FLOAT32)


def test_a_frozen_one_of_nnx_may_be_called_twice():
    class Frozen(TwiceNnx):
        def __call__(self, x):
            return self.norm(x, True) + self.norm(2 * x, use_running_average=True)

    layers = [Frozen(), nnx.Linear(5, 4, rngs=nnx.Rngs(1))]
    x, targets = ref.regression(6)
    expected = nnx.value_and_grad(lambda own: ref.mse(own[1](own[0](x)), targets))
    expected = jax.tree.leaves(expected(nnx.List(layers)))
    pipe = jpipe.pipeline(layers, 2)
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    before = jax.device_get(state.model_state)
    value = pipe.value_and_grad(ref.mse)(state.variables, x, targets)
    ref.assert_close(jax.tree.leaves(value), expected, ref.FLOAT32)
    state, _ = pipe.train_step(ref.mse, optax.sgd(0.1))(state, x, targets)
    ref.assert_equal(jax.device_get(state.model_state), before)


def test_batch_norms_inside_a_jit_of_flax_are_met_each_time():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            return nn.BatchNorm(not train, momentum=0.9, name="norm")(x) + 5.0

    x = jax.random.normal(jax.random.key(1), (8, 3))
    tx = optax.sgd(0.0)

    def statistics(block, stages):
        pipe = jpipe.pipeline([block(), block()], 2, balance=stages)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        state, _ = pipe.train_step(ref.mse, tx)(state, x, x)
        return jax.device_get(state.model_state)

    jitted = nn.jit(Block, static_argnums=(2,))
    expected = statistics(Block, [2])
    for stages in ([2], [1, 1]):
        ref.assert_close(statistics(jitted, stages), expected, ref.FLOAT32)
    # Nor does what was traced here come out where the momentum is the user's.
    variables = jitted().init(jax.random.key(0), x, False)
    _, changed = jitted().apply(variables, x[:4], True, mutable=["batch_stats"])
    np.testing.assert_allclose(
        changed["batch_stats"]["norm"]["mean"], 0.1 * x[:4].mean(axis=0), rtol=1e-5
    )


class Always(nn.Module):
    """Normalizes by the batch, trained or not."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


@pytest.mark.parametrize("stages", [1, 2])
def test_one_that_always_takes_the_batch_is_trained_and_not_evaluated(stages):
    x = jax.random.normal(jax.random.key(1), (8, 3)) + 2
    layers, tx = [Always(), nn.Dense(3)], optax.sgd(0.1)
    pipe = jpipe.pipeline(layers, 1, balance=[1] * 2 if stages == 2 else [2])
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    own, params = (ref.on_host(tree) for tree in (state.model_state, state.params))
    state, metrics = pipe.train_step(ref.mse, tx)(state, x, x)

    def loss(params):
        given = {"params": params[0], **own[0]}
        y, changed = Always().apply(given, x, mutable=["batch_stats"])
        y = nn.Dense(3).apply({"params": params[1]}, y)
        return ref.mse(y, x), changed

    (expected, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
    ref.assert_close(metrics["loss"], expected, ref.FLOAT32)
    ref.assert_close(state.model_state[0], changed, ref.FLOAT32)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    ref.assert_close(state.params, after, ref.FLOAT32)
    for evaluate in (
        lambda: pipe.apply(state.variables, x),
        lambda: pipe.value_and_grad(ref.mse)(state.variables, x, x, train=False),
    ):
        with pytest.raises(errors.ModifyScopeVariableError) as refusal:
            evaluate()
        assert "use_running_average=not train" in "".join(refusal.value.__notes__)


def test_where_it_is_not_trained_a_layer_sees_that_nothing_can_be_changed():
    class Asks(nn.Module):
        """Asks Flax instead of taking a switch."""

        @nn.compact
        def __call__(self, x):
            trained = self.is_mutable_collection("batch_stats")
            frozen = not trained or self.is_initializing()
            return nn.BatchNorm(use_running_average=frozen)(x)

    x = jax.random.normal(jax.random.key(1), (8, 3)) + 2
    pipe = jpipe.pipeline([Asks()], 2)
    variables = pipe.init(jax.random.key(0), x)
    expected = Asks().apply(variables[0], x)
    np.testing.assert_allclose(pipe.apply(variables, x), expected, rtol=1e-6)


class Named(nnx.BatchNorm):
    """Takes another switch, and registers those that derive from it."""

    derived: ClassVar = []

    def __init_subclass__(cls, *, why, **options):
        super().__init_subclass__(**options)
        Named.derived.append(cls)

    def __call__(self, x, train=False):
        assert type(self) is Named
        return super().__call__(x, use_running_average=not train)


@pytest.mark.parametrize(
    ("kind", "wrap"),
    # By itself; in a block, as it is and in transformations.
    [
        (nnx.BatchNorm, None),
        (Named, None),
        (nnx.BatchNorm, lambda f: f),
        (nnx.BatchNorm, nnx.jit),
        (Named, nnx.remat),
    ],
)
def test_a_class_of_the_users_own_stays_what_it_is(kind, wrap, small_heap):
    """Nor does a tracer outlive its trace."""

    class Block(nnx.Module):
        def __init__(self):
            self.norm = kind(5, momentum=0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, train):
            frozen = {} if kind is Named else {"use_running_average": not train}
            switch = {"train": train} if kind is Named else frozen
            return wrap(lambda norm, x: norm(x, **switch))(self.norm, x)

    x, targets = ref.regression(8)
    layer = Block() if wrap else kind(5, momentum=0.5, rngs=nnx.Rngs(0))
    with jax.check_tracer_leaks():
        state = committed(jpipe.pipeline([layer, ref.dense(4)], 2), x, targets)
    (mean, var) = jax.tree.leaves(state.model_state[0])
    np.testing.assert_allclose(mean, 0.5 * x.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(var, 0.5 + 0.5 * x.var(0), rtol=1e-5)
    assert Named.derived == []


def test_no_tracer_outlives_its_trace(small_heap):
    """Of one of nnx: as it stays what it is, above."""
    x, targets = ref.regression(8)
    with jax.check_tracer_leaks():
        committed(jpipe.pipeline([Normed(), ref.dense(4)], 2), x, targets)


def test_statistics_in_a_frozen_dictionary():
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline([Normed(), ref.dense(4)], 2)
    variables = pipe.init(jax.random.key(0), x)
    frozen = tuple(FrozenDict(entry) for entry in variables)
    expected = pipe.value_and_grad(ref.mse)(variables, x, targets)
    loss, grads = pipe.value_and_grad(ref.mse)(frozen, x, targets)
    ref.assert_equal(
        jax.device_get((loss, jax.tree.leaves(grads))),
        jax.device_get((expected[0], jax.tree.leaves(expected[1]))),
    )


class Derived(nn.BatchNorm):
    """A class of the user's own, which calls that of Flax."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        y = super().__call__(x, use_running_average=use_running_average, mask=mask)
        return nn.relu(y)


class Masked(nn.Module):
    """A norm of a class that is given, perhaps with a mask."""

    kind: type = nn.BatchNorm
    mask: bool = False
    frozen: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        mask = jnp.ones((len(x), 1), bool) if self.mask else None
        norm = self.kind(momentum=0.9, name="norm")
        return norm(x, use_running_average=self.frozen or not train, mask=mask)


def after_a_step(layer):
    x, targets = ref.regression(6)
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([layer, ref.dense(4)], 2)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state, _ = pipe.train_step(ref.mse, tx)(state, x, targets)
    return state.model_state[0]["batch_stats"]["norm"]["mean"], x


def test_a_class_that_calls_that_of_flax_keeps_its_momentum():
    mean, x = after_a_step(Masked(Derived))
    ref.assert_close(mean, 0.1 * x.mean(0), ref.FLOAT32)


def test_a_mask_is_refused_where_statistics_are_merged():
    with pytest.raises(ValueError, match="batch norm norm is given a mask: statistics"):
        after_a_step(Masked(mask=True))
    mean, _ = after_a_step(Masked(mask=True, frozen=True))
    assert not mean.any()


class MasksItself(nn.BatchNorm):
    """A class of the user's own, which gives that of Flax a mask."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        mask = jnp.ones((len(x), 1), bool)
        return super().__call__(x, use_running_average, mask=mask)


class MasksItselfNnx(nnx.BatchNorm):
    def __call__(self, x, use_running_average=None, *, mask=None):
        mask = jnp.ones((len(x), 1), bool)
        return super().__call__(x, use_running_average, mask=mask)


class MaskedNnx(nnx.Module):
    """A norm that is given a mask, perhaps in a transformation."""

    def __init__(self, kind=nnx.BatchNorm, wrap=lambda f: f, mask=True, frozen=None):
        self.norm = kind(5, rngs=nnx.Rngs(0), use_running_average=frozen)
        self.wrap, self.mask = wrap, mask

    def __call__(self, x):
        mask = jnp.ones((len(x), 1), bool) if self.mask else None
        return self.wrap(lambda norm, x: norm(x, mask=mask))(self.norm, x)


@pytest.mark.parametrize(
    "layer",
    [
        Masked(MasksItself),
        MaskedNnx(),
        MaskedNnx(wrap=nnx.remat),
        MaskedNnx(wrap=nnx.jit),
        MaskedNnx(MasksItselfNnx, mask=False),
    ],
    ids=["class", "nnx", "nnx.remat", "nnx.jit", "class of nnx"],
)
def test_masks_are_refused_wherever_they_are_given(layer):
    with pytest.raises(ValueError, match="batch norm norm is given a mask: statistics"):
        after_a_step(layer)


def test_a_mask_for_a_frozen_norm_of_nnx_is_none_for_its_statistics():
    mean, _ = after_a_step(MaskedNnx(frozen=True))
    assert not mean.any()

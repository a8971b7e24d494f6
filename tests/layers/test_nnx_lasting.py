"""What a call of an nnx module changes in training and would lose is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref
from .nnx_modules import KEY, says

WIDTH = 3


def linear(seed=0):
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed), param_dtype=float)


class Around(nnx.Module):
    """Calls another module."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Remat(Around):
    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


class Jit(Around):
    def __call__(self, x):
        return nnx.jit(lambda inner, x: inner(x))(self.inner, x)


class Cond(Around):
    def __call__(self, x):
        def call(inner, x):
            return inner(x)

        return nnx.cond(x.sum() > 1e3, call, call, self.inner, x)


class Scan(nnx.Module):
    """Layers whose parameters are stacked."""

    def __init__(self, axis):
        self.axis = axis
        axes = nnx.StateAxes({nnx.Param: axis, ...: None})
        make = nnx.vmap(
            lambda rngs: nnx.Linear(
                WIDTH, WIDTH, use_bias=False, rngs=rngs, param_dtype=float
            ),
            out_axes=axes,
        )
        self.layers = make(nnx.Rngs(0).split(2))

    def __call__(self, x):
        axes = nnx.StateAxes({nnx.Param: self.axis, ...: None})
        step = nnx.scan(
            lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry
        )
        return step(self.layers, x)


WRAPPERS = [Around, Remat, Jit, Cond]


def step_of(layer, microbatches=2):
    x = jax.random.normal(KEY, (4, WIDTH))
    tx = optax.sgd(0.1)
    pipe = jpipe.pipeline([layer], microbatches)
    state = pipe.init_train_state(KEY, x, tx)
    return pipe.train_step(ref.mse, tx)(state, x, jnp.ones_like(x))


def refuses(layer, *parts):
    start = f"a call of this {type(layer).__name__} changes in training"
    with pytest.raises(ValueError, match=says(start, *parts)):
        step_of(layer)


# ------------------------------------------------------------------------ parameters


class MaxNorm(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.full((WIDTH, WIDTH), 2.0))

    def __call__(self, x):
        self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...])
        return x @ self.w[...]


class Swaps(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        y = x * self.a[...]
        self.a, self.b = self.b, self.a
        return y


class Replaces(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        self.a = nnx.Param(2 * self.a[...])
        return x * self.a[...]


class Updates(nnx.Module):
    """Writes by what no hook of the Variable sees."""

    def __init__(self):
        self.w = nnx.Param(jnp.full((WIDTH, WIDTH), 2.0))

    def __call__(self, x):
        state = nnx.state(self, nnx.Param)
        nnx.update(self, jax.tree.map(lambda w: w / jnp.linalg.norm(w), state))
        return x @ self.w[...]


@pytest.mark.parametrize("module", [MaxNorm, Updates])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_call_that_writes_a_parameter(wrap, module):
    layer = wrap(module())
    match = says(
        "changed by the optimizer alone",
        "nnx.BatchStat",
        f"layer 0 ({wrap.__name__}) writes params/inner/w",
    )
    with pytest.raises(ValueError, match=match):
        step_of(layer)


@pytest.mark.parametrize(
    ("layer", "paths"),
    [
        (Swaps, ["params/a", "params/b"]),
        (lambda: Remat(Swaps()), ["params/inner/a", "params/inner/b"]),
        (Replaces, ["params/a"]),
        (
            lambda: nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)),
            ["params/layer_instance/kernel"],
        ),
    ],
)
def test_other_ways_to_change_a_parameter(layer, paths):
    layer = layer()
    if isinstance(layer, nnx.WeightNorm):
        layer = jpipe.layer(layer, lambda module, x: module(x))
    match = says("without writing it back", *(f" writes {path}" for path in paths))
    with pytest.raises(ValueError, match=match):
        step_of(layer)


def test_evaluation_computes_what_is_written():
    x = jnp.ones((4, WIDTH))
    pipe = jpipe.pipeline([MaxNorm()], 2)
    np.testing.assert_allclose(pipe.apply(pipe.init(KEY, x), x), MaxNorm()(x))


class Cloned(Around):
    """Writes the parameters of a copy, which is what it computes with."""

    def __call__(self, x):
        own = nnx.clone(self.inner)
        own.kernel[...] = own.kernel[...] / jnp.linalg.norm(own.kernel[...])
        return own(x)


class Held(nnx.Module):
    """Attributes of all kinds, which transformations take apart and rebuild."""

    def __init__(self):
        self.pair = nnx.data((nnx.Param(jnp.ones(WIDTH)), jnp.ones(WIDTH)))
        self.table = nnx.data({"a": jnp.ones(WIDTH), "b": 3})
        self.layers = nnx.List([linear(0), linear(1)])
        self.named = nnx.Dict({"a": linear(2)})
        self.sizes, self.options = (1, "a", None), nnx.static({"a": 1})
        self.kept = nnx.data((jnp.zeros(WIDTH), jnp.zeros(WIDTH)))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.dropout.eval()
        for layer in (*self.layers, self.named["a"]):
            x = self.dropout(layer(x))
        self.hidden = nnx.Intermediate(x)
        self.kept = (self.kept[0] + 1, self.kept[1])
        return x * self.pair[0][...] * self.pair[1] * self.table["a"]


@pytest.mark.parametrize(
    "make",
    [
        *(lambda wrap=wrap: wrap(linear()) for wrap in WRAPPERS),
        *(lambda wrap=wrap: wrap(Held()) for wrap in (Around, Remat, Jit)),
        *(lambda axis=axis: Scan(axis) for axis in (0, 1)),
        lambda: Remat(Scan(0)),
        lambda: Cloned(linear()),
    ],
)
def test_what_transformations_put_back_is_not_changed(double, make):
    layer = make()
    x, targets = jax.random.normal(KEY, (4, WIDTH)), jnp.ones((4, WIDTH))
    _, metrics = step_of(layer, 1)
    own = nnx.clone(layer)
    np.testing.assert_allclose(metrics["loss"], ref.mse(own(x), targets), rtol=1e-10)


# ---------------------------------------------------------------- attributes and keys


class Jitted(nnx.Module):
    """Is traced once for all that are equal."""

    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    @nnx.jit
    def __call__(self, x):
        return self.dropout(x)


def test_equal_modules_inside_a_jit_of_flax():
    x = jnp.ones((4, WIDTH))
    pipe = jpipe.pipeline([Around(Jitted()), Jitted(), Jitted()], 2)
    one = jpipe.sequential([Around(Jitted()), Jitted(), Jitted()], 2)
    for each in (pipe, one):
        y = each.apply(each.init(KEY, x), x, rngs=KEY, train=True)
        assert set(np.unique(y)) == {0, 8}


class ActNorm(nnx.Module):
    def __init__(self):
        self.shift = nnx.BatchStat(jnp.zeros(WIDTH))
        self.initialized = False

    def __call__(self, x):
        if not self.initialized:
            self.shift[...] = -x.mean(0)
            self.initialized = True
        return x + self.shift[...]


class Counts(nnx.Module):
    def __init__(self):
        self.n, self.last, self.seen = 1, None, nnx.static({"a": 0})

    def __call__(self, x):
        self.n += 1
        self.seen["a"] += 1
        self.last, self.new = x.mean(), "b"
        return x / self.n


class Once(nnx.Module):
    def __init__(self):
        self.warm = nnx.Variable(jnp.ones(WIDTH))

    def __call__(self, x):
        y = x * self.warm[...]
        del self.warm
        return y


@pytest.mark.parametrize("wrap", WRAPPERS[:2])
def test_a_call_that_changes_attributes(wrap):
    refuses(
        wrap(ActNorm()),
        "changes the attribute inner.initialized, which was False and is True;",
        "an nnx.Variable that __init__ makes",
    )


def test_all_attributes_that_a_call_changes():
    refuses(
        Counts(),
        "the attribute last, which was None and is an array, ",
        "the attribute n, which was 1 and is 2, ",
        "the attribute seen.a, which was 0 and is 1, ",
        "the attribute new, which was missing and is 'b';",
    )


class Ages(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(WIDTH), age=1)

    def __call__(self, x):
        y = x * self.w / self.w.age
        self.w.set_metadata(age=self.w.age + 1)
        return y


@pytest.mark.parametrize("wrap", WRAPPERS[:2])
def test_a_call_that_changes_metadata(wrap):
    refuses(wrap(Ages()), "changes the metadata inner.w.age, which was 1 and is 2;")


def test_a_call_that_deletes_a_variable():
    refuses(Once(), "deletes the Variable warm; keep it")


class Keyed(nnx.Module):
    def __init__(self, kind):
        self.key = kind(jax.random.key(3))

    def __call__(self, x):
        key, own = jax.random.split(self.key.get_value())
        self.key.set_value(key)
        return x + jax.random.normal(own, (1, WIDTH))


@pytest.mark.parametrize("wrap", WRAPPERS[:2])
def test_a_call_that_splits_a_key(wrap):
    match = says(
        "all micro-batches would draw the same",
        "rngs() of an nnx.Rngs(0), or of rngs.fork()",
        "writes variable/inner/key",
    )
    with pytest.raises(ValueError, match=match):
        step_of(wrap(Keyed(nnx.Variable)))


class KeyedLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        key = self.variable("noise", "key", jax.random.key, 3)
        after, own = jax.random.split(key.value)
        if train:
            key.value = after
        return nn.Dense(WIDTH)(x) + jax.random.normal(own, (1, WIDTH))


def test_a_linen_module_that_splits_a_key():
    match = says("would draw the same", "self.make_rng", "writes noise/key")
    with pytest.raises(ValueError, match=match):
        step_of(KeyedLinen())


def test_a_key_that_stays():
    class Constant(Keyed):
        def __call__(self, x):
            return x + jax.random.normal(self.key[...], (1, WIDTH))

    _, metrics = step_of(Remat(Constant(nnx.Variable)))
    assert jnp.isfinite(metrics["loss"])


def test_a_key_outside_of_a_random_stream():
    module = Around(Keyed(lambda key: nnx.RngKey(key, tag="noise")))
    match = says("layer 0: Around: inner.key (RngKey) is held outside", "nnx.Rngs(0)")
    with pytest.raises(TypeError, match=match):
        jpipe.pipeline([module], 2)

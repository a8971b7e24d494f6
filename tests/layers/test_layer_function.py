"""`jpipe.layer` with a function of a module and its input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

KEY = jax.random.key(0)


class Block(nn.Module):
    """Takes a mask beside its input, and gives what it looked at beside its output."""

    @nn.compact
    def __call__(self, hidden, attention_mask, deterministic=True):
        weights = ref.dense(4, hidden.dtype)(hidden) * attention_mask
        return nn.Dropout(0.5)(hidden + weights, deterministic), weights


def masked(block, x):
    return {**x, "h": block(x["h"], attention_mask=x["mask"], deterministic=True)[0]}


def data():
    key_x, key_m, key_t = jax.random.split(KEY, 3)
    h = jax.random.normal(key_x, (6, 4), jnp.float64)
    mask = jax.random.bernoulli(key_m, 0.5, (6, 4))
    return {"h": h, "mask": mask}, jax.random.normal(key_t, (6, 4), jnp.float64)


def loss_fn(y, targets):
    return ref.mse(y["h"], targets)


def test_a_linen_module_may_be_called_with_a_mask_beside_its_input(double):
    x, targets = data()
    blocks = [Block(), Block()]
    listed = [jpipe.layer(block, masked) for block in blocks]
    pipe = jpipe.pipeline(listed, 3)
    variables = pipe.init(KEY, x)
    # The variables of the module, as Flax makes them.
    block_variables = Block().init(jax.random.fold_in(KEY, 0), x["h"], x["mask"])
    assert jax.tree.structure(block_variables) == jax.tree.structure(variables[0])
    actual = pipe.value_and_grad(loss_fn)(variables, x, targets)

    def whole(params):
        y = x["h"]
        for block, block_params in zip(blocks, params, strict=True):
            y, _ = block.apply({"params": block_params}, y, x["mask"])
        return ref.mse(y, targets)

    expected = jax.jit(jax.value_and_grad(whole))(ref.params_of(variables))
    ref.assert_close(actual, expected, ref.FLOAT64)
    assert pipe.apply(variables, x)["mask"].dtype == bool


def told(module, x, /, *, deterministic, rngs):
    """Drops by itself, with the keys that it is given."""
    if deterministic:
        return x
    key = rngs["dropout"] if isinstance(rngs, dict) else rngs.dropout()
    return x * jax.random.bernoulli(key, 0.5, x.shape)


@pytest.mark.parametrize("module", [nn.Dense(4), nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
def test_function_receives_the_switches_that_it_names(module):
    """The function takes them by name or by position."""
    x = jnp.ones((4, 4))
    seen = []

    def by_position(module, x, train, use_running_average):
        seen.append((train, use_running_average))
        return x

    listed = [jpipe.layer(module, told), jpipe.layer(module, by_position)]
    pipe = jpipe.sequential(listed, 2)
    variables = pipe.init(KEY, x)
    for train in (False, True):
        seen.clear()
        rngs = {"dropout": KEY}
        y = np.asarray(pipe.apply(variables, x, rngs=rngs, train=train))
        assert set(seen) == {(train, not train)}
        assert set(np.unique(y)) == ({0, 1} if train else {1})


def test_check_notes_a_switch_that_the_function_does_not_pass_on(double):
    x, _ = data()
    listed = jpipe.layer(Block(), lambda block, x: block(x["h"], x["mask"])[0])
    pipe = jpipe.sequential([listed], 2)
    variables = pipe.init(KEY, x)
    (note,) = pipe.check(variables, x).layers[0].notes
    assert "off in training: dropout Dropout_0;" in note


@pytest.mark.parametrize(
    ("module", "method", "error", "says"),
    [
        (nn.Dense(4), 3, ValueError, "lambda module, x: module"),
        (nn.Dense(4), "attend", ValueError, "Dense has no method 'attend'"),
        (jnp.tanh, "__call__", TypeError, "needs a flax module"),
        (nn.Dense, "__call__", TypeError, r"this is a type; write Dense\(\.\.\.\)"),
    ],
)
def test_an_unknown_method_of_a_module_is_refused(module, method, error, says):
    with pytest.raises(error, match=says):
        jpipe.layer(module, method)


class TwoNnx(nnx.Module):
    def __call__(self, hidden, mask):
        return hidden * mask


ONE, TUPLE, DICT = (
    jnp.ones((4, 3)),
    (jnp.ones((4, 3)),) * 2,
    dict.fromkeys(("x", "mask"), jnp.ones((4, 3))),
)
LISTED = "one pytree; where a module takes several, list jpipe.layer(module, lambda"


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Block(), DICT),
        (TwoNnx(), DICT),
        (TwoNnx(), TUPLE),
        (TwoNnx(), ONE),
        (nn.Dense(3), DICT),
        (nn.Dense(3), TUPLE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_input_that_does_not_fit_is_answered_with_what_to_type(module, x):
    # Of which type the error is, the module decides.
    with pytest.raises((TypeError, AttributeError, ValueError, Warning)) as error:
        jpipe.sequential([module], 2).init(KEY, x)
    assert [note for note in error.value.__notes__ if LISTED in note]


class Merged(nn.Module):
    """A dense layer whose kernel is a sum with a product of two parameters."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.1)
        kernel = self.param("kernel", normal, (64, 64), x.dtype)
        down = self.param("down", normal, (64, 4), x.dtype)
        up = self.param("up", normal, (4, 64), x.dtype)
        return jnp.tanh(x @ (kernel + down @ up))


def test_values_of_parameters_alone_are_computed_once_per_step(double):
    layers = [ref.dense(64, jnp.float64), Merged(), Merged(), ref.dense(4, jnp.float64)]
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(layers, 4)
    variables = pipe.init(jax.random.key(0), x)
    find = pipe.value_and_grad(ref.mse)
    names = [p.name for p in find.compile(variables, x, targets).programs]
    assert [names.count(name) for name in ("prologue", "prologue_vjp")] == [2, 2]

    def loss(params):
        h = x
        for layer, layer_params in zip(layers, params, strict=True):
            h = layer.apply({"params": layer_params}, h)
        return ref.mse(h, targets)

    expected = jax.jit(jax.value_and_grad(loss))(ref.params_of(ref.on_host(variables)))
    loss_and_grads = find(variables, x, targets)
    ref.assert_close(loss_and_grads, expected, ref.FLOAT64)


class Product(nn.Module):
    """A dense layer whose kernel is a product of two parameters."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.3)
        down = self.param("down", normal, (64, 4), x.dtype)
        return jnp.tanh(x @ (down @ self.param("up", normal, (4, 64), x.dtype)))


def test_shared_layer_whose_kernel_is_made_once_is_checked(double):
    shared = Product()
    layers = [ref.dense(64, jnp.float64), shared, shared, ref.dense(4, jnp.float64)]
    x, targets = ref.regression(8, jnp.float64)
    pipe = jpipe.pipeline(layers, 2)
    assert pipe.value_and_grad(ref.mse).check(pipe.init(KEY, x), x, targets)

"""Variables of nnx that several layers hold: one value, whatever holds it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jpipe

from .. import reference as ref

CLOSE = 1e-5
TOKENS = jnp.arange(24).reshape(4, 6) % 11
TARGETS = jax.random.normal(jax.random.key(0), (4, 6, 11))


class Embeddings(nnx.Module):
    """A module that holds another one, which is called elsewhere too."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(11, 4, rngs=rngs)
        self.positions = nnx.Embed(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.tokens(x) + self.positions(jnp.arange(x.shape[-1]))


class Head(nnx.Module):
    """It holds a Variable of another module, and one of its own."""

    def __init__(self, table):
        self.table = table
        self.bias = nnx.Param(jnp.ones(11))

    def __call__(self, h):
        return h @ self.table[...].T + self.bias[...]


class Model(nnx.Module):
    """A model with a constant, cut in functions of it."""

    def __init__(self, rngs):
        self.embed = Embeddings(rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.mask = nnx.Variable(jnp.array([1.0, 0.0, 1.0, 1.0]))

    def into(self, x):
        return self.embed(x) * self.mask[...]

    def block(self, h):
        return h + self.blocks[0](h * self.mask[...])

    def out(self, h):
        return self.embed.tokens.attend(self.blocks[1](h))


def wanted_of(modules, apply):
    """The loss and the gradients of plain nnx, by the Variables themselves."""
    whole = nnx.List(modules)
    graphdef, params, state = nnx.split(whole, nnx.Param, ...)

    def loss(params):
        return ref.mse(apply(*nnx.merge(graphdef, params, state)), TARGETS)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, nnx.to_pure_dict(grads)


def attended():
    embed, linear = Embeddings(nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
    layers = [embed, linear, jpipe.layer(embed.tokens, "attend")]

    def apply(embed, linear):
        return embed.tokens.attend(linear(embed(TOKENS)))

    return layers, wanted_of([embed, linear], apply), lambda g: {0: g[0], 1: g[1]}


def held():
    """The head has the table first by name, and the one below owns it."""
    embed = Embeddings(nnx.Rngs(0))
    head = Head(embed.tokens.embedding)

    def apply(embed, head):
        return head(embed(TOKENS))

    def entries(g):
        return {0: g[0], 1: {"bias": g[1]["bias"]}}

    return [embed, head], wanted_of([embed, head], apply), entries


def whole():
    model = Model(nnx.Rngs(0))
    layers = [jpipe.layer(model, name) for name in ("into", "block", "out")]

    def apply(model):
        return model.out(model.block(model.into(TOKENS)))

    return layers, wanted_of([model], apply), lambda g: {0: g[0]}


@pytest.mark.parametrize("make", [attended, held, whole])
def test_gradients_of_all_uses_are_summed(make):
    layers, (loss, grads), entries = make()
    pipe = jpipe.pipeline(layers, 2)
    variables = pipe.init(None, TOKENS)
    actual_loss, actual_grads = pipe.value_and_grad(ref.mse)(variables, TOKENS, TARGETS)
    entries = entries(grads)
    expected_grads = tuple(entries.get(i, {}) for i in range(len(layers)))
    ref.assert_close((actual_loss, actual_grads), (loss, expected_grads), CLOSE)
    sgd = optax.sgd(0.1)
    state = pipe.init_train_state(jax.random.key(0), TOKENS, sgd)
    state, _ = pipe.train_step(ref.mse, sgd)(state, TOKENS, TARGETS)
    moved = jax.tree.map(
        lambda p, g: p - 0.1 * g, ref.params_of(variables), ref.on_host(expected_grads)
    )
    ref.assert_close(ref.on_host(state.params), moved, CLOSE)
    modules = pipe.modules(jax.device_put(state.variables, jax.devices()[0]))
    y = TOKENS
    for layer, module in zip(layers, modules, strict=True):
        is_method = not isinstance(layer, nnx.Module)
        y = (getattr(module, layer.method) if is_method else module)(y)
    ref.assert_close(pipe.apply(state.variables, TOKENS), y, CLOSE)


def test_state_that_several_layers_change_is_that_of_the_last():
    class Seen(nnx.Module):
        def __init__(self):
            self.mean = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            x = x + self.mean[...]
            self.mean[...] = x.mean()
            return x

    seen = Seen()
    layers = [seen, jnp.tanh, jpipe.layer(seen, lambda module, x: module(x))]
    pipe = jpipe.pipeline(layers, 2)
    x = jax.random.normal(jax.random.key(0), (4, 2))
    find = pipe.value_and_grad(ref.mse, has_state=True)
    (loss, state), _ = find(pipe.init(None, x), x, x)
    y = jnp.concatenate([jnp.tanh(part) + part.mean() for part in jnp.split(x, 2)])
    after = jnp.mean(jnp.stack([part.mean() for part in jnp.split(y, 2)]))
    ref.assert_close(
        (loss, state[0]["batch_stats"]["mean"]), (ref.mse(y, x), after), 1e-5
    )


def test_random_streams_may_be_shared():
    rngs = nnx.Rngs(0)
    layers = [nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)]
    x = jnp.ones((4, 32))
    pipe = jpipe.pipeline(layers, 2)
    y = pipe.apply(({}, {}), x, train=True, rngs=jax.random.key(0))
    assert 0.1 < float((y != 0).mean()) < 0.4  # each draws by itself

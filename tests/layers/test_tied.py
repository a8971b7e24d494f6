"""Tied parameters: one value, one gradient, one update, wherever the layers land."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

WIDTH, VOCABULARY = 6, 11


def model(dtype=jnp.float32):
    """An embedding whose table is the head too, and a dense layer used three times."""
    embed = nn.Embed(VOCABULARY, WIDTH, dtype=dtype, param_dtype=dtype)
    again = ref.dense(WIDTH, dtype)
    head = jpipe.layer(embed, method="attend")
    return [embed, again, jnp.tanh, again, ref.Residual(WIDTH, dtype), again, head]


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def batch(size=9):
    tokens = jax.random.randint(jax.random.key(1), (size, 5), 0, VOCABULARY)
    return tokens[:, :-1], tokens[:, 1:]


def test_training_continues_in_another_balance_and_overwrites_only_its_own():
    x, targets = batch()
    tx = optax.adam(1e-2)
    pipes = [jpipe.pipeline(model(), 3, balance=b) for b in ([1, 2, 2, 2], [7], [3, 4])]
    state = pipes[0].init_train_state(jax.random.key(0), x, tx)
    losses = []
    for pipe in pipes:
        state = pipe.place(state)
        step = pipe.train_step(cross_entropy, tx)
        for _ in range(2):
            state, metrics = step(state, x, targets)
            losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)


def test_variables_that_are_not_in_place_are_refused():
    pipe = jpipe.pipeline(model(), 3, balance=[1, 2, 2, 2])
    x, targets = batch()
    variables = pipe.init(jax.random.key(0), x)
    moved = jax.device_put(variables, jax.devices()[0])
    with pytest.raises(ValueError, match=r"stage 1 .* its variables are on cpu:0"):
        pipe.value_and_grad(cross_entropy)(moved, x, targets)
    surplus = [*variables]
    surplus[6] = variables[0]
    with pytest.raises(ValueError, match="the variables are not those") as no:
        pipe.apply(surplus, x)
    tied = "variables[6]['params']['embedding'] is variables[0]['params']['embedding']"
    assert str(no.value).split("\n")[1:] == [
        f"  * tied: {tied}; give {{}} in its place"
    ]


def test_a_module_with_statistics_cannot_be_shared():
    norm = nn.BatchNorm()
    pipe = jpipe.pipeline([norm, norm], 2)
    with pytest.raises(ValueError, match="of it not only parameters"):
        pipe.init(jax.random.key(0), jnp.ones((4, 3)))


def test_layer_refuses_what_has_no_such_method():
    with pytest.raises(ValueError, match="Dense has no method 'attend'"):
        jpipe.layer(nn.Dense(3), method="attend")
    with pytest.raises(TypeError, match="needs a flax module"):
        jpipe.layer(jnp.tanh)


def test_another_method_alone_is_a_layer():
    embed = nn.Embed(VOCABULARY, WIDTH)
    pipe = jpipe.pipeline([jpipe.layer(embed, method="attend")], 2)
    x = jnp.ones((4, WIDTH))
    variables = pipe.init(jax.random.key(0), x)
    table = variables[0]["params"]["embedding"]
    ref.assert_close(pipe.apply(variables, x), x @ table.T, ref.FLOAT32)


def test_the_plan_counts_what_is_tied_within_a_stage_once():
    embed = nn.Embed(VOCABULARY, WIDTH)
    layers = [embed, nn.Dense(WIDTH), jpipe.layer(embed, method="attend")]
    pipe = jpipe.sequential(layers, 2)
    tokens = jnp.ones((4, 3), jnp.int32)
    variables = pipe.init(jax.random.key(0), tokens)
    (stage,) = pipe.plan.stages
    assert stage.num_params == sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert stage.param_bytes == 4 * stage.num_params


def test_another_method_of_a_tied_nnx_module():
    class Table(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (7, 3)))

        def __call__(self, tokens):
            return self.table[...][tokens]

        def attend(self, x):
            return x @ self.table[...].T

    table = Table()
    pipe = jpipe.pipeline([table, jnp.tanh, jpipe.layer(table, method="attend")], 2)
    tokens = jnp.arange(6)
    variables = pipe.init(jax.random.key(0), tokens)
    assert variables[2] == {}

    def loss(logits, targets):
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    value = pipe.value_and_grad(loss)(variables, tokens, tokens)

    def whole(params):
        own = params[0]["table"]
        return loss(jnp.tanh(own[tokens]) @ own.T, tokens)

    expected = jax.value_and_grad(whole)(ref.params_of(variables))
    ref.assert_close(value, expected, ref.FLOAT32)

"""Variables that the user gives, of layers that would not make such by themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

CLOSE = 1e-5
KEY = jax.random.key(0)
X, TARGETS = ref.regression(8)
TOKENS = jax.random.normal(KEY, (4, 6, 8))


class Standardized(nn.Module):
    """A layer that is initialized from the values of its input."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("data", "mean", lambda: x.mean(0))
        scale = self.param("scale", lambda _: 1 / (x.std(0) + 1e-3))
        return (x - mean.value) * scale


def kernel_of(module, x):
    """A function that reads what an initialization does not have yet."""
    return x @ module.variables["params"]["kernel"]


def layer_by_layer(layers, x):
    """The variables that Flax makes of each layer, on the values of its input."""
    variables = []
    for layer in layers:
        variables.append(layer.init(KEY, x))
        x = layer.apply(variables[-1], x)
    return variables


def plain(apply, variables, x, targets):
    """The loss of what a function of parameters gives, and its gradients."""

    def loss(params):
        with_params = [
            {**v, "params": p} for v, p in zip(variables, params, strict=True)
        ]
        return ref.mse(apply(with_params, x), targets)

    return jax.jit(jax.value_and_grad(loss))([v["params"] for v in variables])


def test_parameters_made_of_data_are_taken_as_they_are():
    layers = [Standardized(), nn.Dense(4), Standardized()]
    variables = layer_by_layer(layers, X)
    pipe = jpipe.pipeline(layers, 2)

    def apply(variables, x):
        for layer, entry in zip(layers, variables, strict=True):
            x = layer.apply(entry, x)
        return x

    with pytest.raises(ValueError, match="follows from the shapes"):
        pipe.init(KEY, X)
    placed = pipe.place(variables)
    ref.assert_close(pipe.apply(placed, X), apply(variables, X), CLOSE)
    loss, grads = pipe.value_and_grad(ref.mse)(placed, X, TARGETS)
    expected = plain(apply, variables, X, TARGETS)
    ref.assert_close((loss, list(grads)), expected, CLOSE)
    # They are copied: a step overwrites what is in the state.
    sgd = optax.sgd(0.1)
    state = pipe.init_train_state(KEY, X, sgd, variables=variables)
    state, metrics = pipe.train_step(ref.mse, sgd)(state, X, TARGETS)
    ref.assert_close(metrics["loss"], expected[0], CLOSE)
    moved = jax.tree.map(
        lambda p, g: p - 0.1 * g, [v["params"] for v in variables], expected[1]
    )
    ref.assert_close(list(state.params), moved, CLOSE)


def test_function_that_reads_variables_directly_is_given_them():
    first, last = nn.Dense(6), nn.Dense(4)
    pipe = jpipe.pipeline([first, jpipe.layer(last, kernel_of)], 2)
    variables = layer_by_layer([first, last], X)

    def apply(variables, x):
        h = first.apply(variables[0], x)
        return h @ variables[1]["params"]["kernel"]

    loss, grads = pipe.value_and_grad(ref.mse)(pipe.place(variables), X, TARGETS)
    ref.assert_close((loss, list(grads)), plain(apply, variables, X, TARGETS), CLOSE)


def test_cache_of_another_length_is_the_users():
    attention = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
    dense = nn.Dense(8)
    variables = [dense.init(KEY, TOKENS), attention.init(KEY, TOKENS)]
    layers = [dense, jpipe.layer(attention, lambda module, x: module(x, x))]
    pipe = jpipe.pipeline(layers, 1)
    run = pipe.value_and_grad(ref.mse, has_state=True)
    token = TOKENS[:, :1]

    def loss(params, cache):
        h = dense.apply({"params": params[0]}, token)
        attention_variables = {"params": params[1], "cache": cache}
        y, changed = attention.apply(attention_variables, h, h, mutable=["cache"])
        return ref.mse(y, token), changed["cache"]

    plain_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for _ in range(2):  # what the first token leaves, the second reads
        params, cache = [v["params"] for v in variables], variables[1]["cache"]
        expected = plain_gradient(params, cache)
        (value, state), grads = run(pipe.place(variables), token, token)
        ref.assert_close(((value, state[1]["cache"]), list(grads)), expected, CLOSE)
        variables = [variables[0], {**variables[1], **state[1]}]
    assert int(variables[1]["cache"]["cache_index"]) == 2


def test_variables_that_layers_cannot_take_are_refused():
    layers = [nn.Dense(4), Standardized()]
    pipe = jpipe.pipeline(layers, 2)
    variables = layer_by_layer(layers, X)
    del variables[1]["params"]
    with pytest.raises(ValueError, match="data/mean of layer 1"):
        pipe.apply(pipe.place(variables), X)
    norm = jpipe.pipeline([nn.Dense(4), nn.BatchNorm(use_running_average=True)], 2)
    variables = norm.init(KEY, X)
    variables[1]["batch_stats"]["mean"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"mean'\] has shape \(3,\).* needs \(4,\)"):
        norm.apply(norm.place(variables), X)


def test_none_stands_for_a_layer_that_is_initialized():
    body, norm, head = nn.Dense(6), nn.BatchNorm(use_running_average=False), nn.Dense(4)
    layers = [body, norm, nn.relu, head]
    pipe = jpipe.pipeline(layers, 2, balance=[1, 1, 2])
    pretrained = body.init(jax.random.key(7), X)
    fresh = ref.on_host(pipe.init(KEY, X))
    sgd = optax.sgd(0.1)
    user_variables = [pretrained, None, {}, None]
    state = pipe.init_train_state(KEY, X, sgd, variables=user_variables)
    expected = (ref.on_host(pretrained), *fresh[1:])
    ref.assert_equal(ref.on_host(state.variables), expected)
    # The same as from all of them.
    whole = pipe.init_train_state(KEY, X, sgd, variables=expected)
    step = pipe.train_step(ref.mse, sgd)
    ref.assert_equal(
        *(ref.on_host(step(s, X, TARGETS)[0].params) for s in (state, whole))
    )
    assert not pretrained["params"]["kernel"].is_deleted()


def test_none_is_initialized_beside_user_parameters_and_tied_ones():
    layers = [nn.Dense(4), Standardized()]
    pipe, sgd = jpipe.pipeline(layers, 2), optax.sgd(0.1)
    of_data = layers[1].init(KEY, TARGETS)
    state = pipe.init_train_state(KEY, X, sgd, variables=[None, of_data])
    initial = jpipe.pipeline([nn.Dense(4), nn.relu], 2).init(KEY, X)[0]
    expected = ref.on_host((initial, of_data))
    ref.assert_equal(ref.on_host(state.variables), expected)
    embed = nn.Embed(5, 4)
    tied = jpipe.pipeline([embed, nn.Dense(4), jpipe.layer(embed, "attend")], 2)
    tokens, embed_variables = np.zeros(4, int), embed.init(KEY, np.zeros(4, int))
    state = tied.init_train_state(
        KEY, tokens, sgd, variables=[embed_variables, None, None]
    )
    assert state.variables[2] == {}
    ref.assert_equal(ref.on_host(state.variables[0]), ref.on_host(embed_variables))
    with pytest.raises(ValueError, match=r"the model has 3 layers; give a tuple"):
        tied.init_train_state(KEY, tokens, sgd, variables=[embed_variables, None])


def test_given_values_of_an_nnx_module_leave_other_draws_unchanged():
    layers = [nnx.Linear(5, 4, rngs=nnx.Rngs(0)), nn.Dense(4), nn.Dense(4)]
    pipe = jpipe.pipeline(layers, 2)
    initial = pipe.init(KEY, X)
    pretrained = jax.tree.map(lambda leaf: leaf + 1, initial[0])
    state = pipe.init_train_state(
        KEY, X, optax.sgd(0.1), variables=[pretrained, None, None]
    )
    ref.assert_equal(
        ref.on_host(state.variables), ref.on_host((pretrained, *initial[1:]))
    )


def test_shared_variables_may_be_in_any_entry():
    dense, linear = nn.Dense(5), nnx.Linear(5, 5, rngs=nnx.Rngs(0))
    for module in (dense, linear):
        pipe = jpipe.pipeline([module, jnp.tanh, module, nn.Dense(4)], 2)
        initial = pipe.init(KEY, X)
        pretrained = jax.tree.map(lambda leaf: leaf + 1, initial[0])
        user_variables = [None, {}, pretrained, None]
        state = pipe.init_train_state(KEY, X, optax.sgd(0.1), variables=user_variables)
        expected = ref.on_host((pretrained, {}, {}, initial[3]))
        ref.assert_equal(ref.on_host(state.variables), expected)


def test_surplus_leaf_of_an_nnx_module_beside_none_is_refused():
    layers = [nnx.Linear(5, 4, rngs=nnx.Rngs(0)), nn.Dense(4)]
    pipe = jpipe.pipeline(layers, 2)
    params = dict(pipe.init(KEY, X)[0]["params"], more=jnp.ones(3))
    with pytest.raises(ValueError, match=r"surplus: variables\[0\]\['params'\]\['mor"):
        pipe.init_train_state(
            KEY, X, optax.sgd(0.1), variables=[{"params": params}, None]
        )


class Reporting(nn.Module):
    """Sows into a collection of its own name, and perturbs."""

    @nn.compact
    def __call__(self, x):
        h = self.perturb("hidden", nn.Dense(6)(x))
        self.sow("metrics", "size", jnp.mean(h**2))
        return nn.Dense(4)(jnp.tanh(h))


@pytest.mark.parametrize("is_model", [False, True])
def test_sown_and_perturbed_collections_are_left_out(is_model):
    module: Any = Reporting()
    pipe = jpipe.pipeline([module], 3)
    if is_model:
        pipe = jpipe.pipeline(module, 3, num_stages=1)
    x = X[:7]  # micro-batches of two sizes
    variables = {"params": module.init(KEY, x)["params"]}

    def loss(params):
        return ref.mse(module.apply({"params": params}, x), TARGETS[:7])

    expected_loss, expected_grads = jax.value_and_grad(loss)(variables["params"])
    user_variables = variables if is_model else (variables,)
    placed = pipe.place(user_variables, x)
    ref.assert_close(pipe.apply(placed, x), module.apply(variables, x), CLOSE)
    loss, grads = pipe.value_and_grad(ref.mse)(placed, x, TARGETS[:7])
    ref.assert_close(loss, expected_loss, CLOSE)
    ref.assert_close(grads if is_model else grads[0], expected_grads, CLOSE)
    tx = optax.sgd(0.1)
    for chosen in (placed, None):
        state = pipe.init_train_state(KEY, x, tx, variables=chosen)
        like = jax.tree.map(jnp.shape, state.variables)
        assert like == jax.tree.map(jnp.shape, user_variables)
        pipe.train_step(ref.mse, tx)(state, x, TARGETS[:7])
    # Whoever asks is given it.
    assert "metrics" in module.init(KEY, x)

    def reported(params, x, targets):
        y, state = module.apply({"params": params}, x, mutable=["metrics"])
        return ref.mse(y, targets), state["metrics"]

    grad_fn = jpipe.value_and_grad(reported, 1, num_stages=1, has_aux=True)
    params = grad_fn.place(variables["params"], x, TARGETS[:7])
    (_, sizes), _ = grad_fn(params, x, TARGETS[:7])
    (size,) = jax.tree.leaves(sizes)
    _, state = module.apply(variables, x, mutable=["metrics"])
    ref.assert_close(size.ravel()[0], state["metrics"]["size"][0], CLOSE)


def test_perturbations_among_user_variables_are_named():
    module: Any = Reporting()
    variables = module.init(KEY, X)
    assert "perturbations" in variables
    pipe = jpipe.pipeline(module, 2, num_stages=1)
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        pipe.apply(variables, X)
    notes = " ".join(caught.value.__notes__)
    assert "give variables without what was sown or perturbed" in notes

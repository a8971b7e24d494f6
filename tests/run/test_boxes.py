"""Variables in boxes, as `flax.linen.with_partitioning` makes them, and out of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

from .. import reference as ref

X, TARGETS = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
KEY = jax.random.key(0)
TX = optax.adam(0.1)
in_a_box = nn.with_partitioning(nn.initializers.lecun_normal(), ("rows", "columns"))


class Counted(nn.Module):
    """A statistic, in a box if that is asked for."""

    boxed: bool

    @nn.compact
    def __call__(self, x, train: bool = False):
        zeros = nn.with_partitioning(jnp.zeros, ("rows",)) if self.boxed else jnp.zeros
        mean = self.variable("batch_stats", "mean", zeros, (x.shape[-1],))
        before = mean.value
        if train:
            mean.value = 0.5 * before + x.mean(0)
        return x - before


def model(boxed: bool) -> jpipe.Pipeline:
    options = {"kernel_init": in_a_box} if boxed else {}
    return jpipe.pipeline([nn.Dense(4, **options), Counted(boxed), nn.Dense(2)], 2)


def everything(pipe: jpipe.Pipeline, variables) -> tuple:
    """What comes out of a pipeline, and what keeps the structure of variables."""
    loss, grads = pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
    state = pipe.init_train_state(KEY, X, TX, variables=variables)
    step = pipe.train_step(ref.mse, TX)
    for _ in range(2):
        state, metrics = step(pipe.place(state), X, TARGETS)
    results = pipe.apply(variables, X), loss, metrics, state.opt_state
    return results, grads, state.variables


@pytest.fixture(scope="module")
def pipes() -> dict[bool, jpipe.Pipeline]:
    return {boxed: model(boxed) for boxed in (False, True)}


@pytest.fixture(scope="module")
def expected(pipes) -> tuple:
    return everything(pipes[False], pipes[False].init(KEY, X))


@pytest.mark.parametrize("model_is_boxed", [False, True])
@pytest.mark.parametrize("given_are_boxed", [False, True])
def test_boxes_change_no_number_and_results_have_those_given(
    pipes, expected, model_is_boxed, given_are_boxed
):
    variables = pipes[given_are_boxed].init(KEY, X)
    kernel = variables[0]["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) == given_are_boxed
    actual = everything(pipes[model_is_boxed], variables)
    assert jax.tree.structure(actual[2]) == jax.tree.structure(variables)
    params = tuple(entry.get("params", {}) for entry in variables)
    assert jax.tree.structure(actual[1]) == jax.tree.structure(params)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


def test_a_box_of_another_shape_is_named_without_the_box(pipes):
    variables = pipes[True].init(KEY, X)
    with pytest.raises(ValueError, match=r"\['kernel'\] has shape \(3, 4\), the mod"):
        pipes[False].apply(variables, np.ones((4, 5), np.float32))


def test_a_box_for_an_nnx_module_is_refused():
    pipe = jpipe.pipeline([nnx.Linear(3, 2, rngs=nnx.Rngs(0))], 2)
    (variables,) = pipe.init(KEY, X)
    kernel = nn.Partitioned(variables["params"]["kernel"], ("rows", "columns"))
    boxed = {"params": {**variables["params"], "kernel": kernel}}
    with pytest.raises(ValueError, match=r"(?s)plain arrays.*linen\.unbox.*kernel"):
        pipe.apply((boxed,), X)


def test_an_nnx_module_that_says_how_it_is_partitioned():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]).reshape(3, 1), ("r", "c"))
    partitioned = nnx.with_partitioning(nn.initializers.ones_init(), ("r", "c"))
    with jax.set_mesh(mesh):
        linear = nnx.Linear(3, 2, kernel_init=partitioned, rngs=nnx.Rngs(0))
        pipe = jpipe.pipeline([linear, jnp.tanh], 2)
        within = everything(pipe, pipe.init(KEY, X))
    without = everything(pipe, pipe.init(KEY, X))
    plain = nnx.Linear(3, 2, kernel_init=nn.initializers.ones_init(), rngs=nnx.Rngs(0))
    pipe = jpipe.pipeline([plain, jnp.tanh], 2)
    expected = everything(pipe, pipe.init(KEY, X))
    for actual in (within, without):
        pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        for a, e in pairs:
            np.testing.assert_array_equal(a, e, strict=True)

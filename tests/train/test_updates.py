"""Updates where the parameters are: what they share, move and ask for."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe

from .. import reference as ref

OPTIMIZERS = {
    # Its first moment starts as the first update: one array in two places.
    "novograd": optax.novograd(1e-2),
    "cocob": optax.contrib.cocob(),
    "copies of the parameters in the state": optax.GradientTransformation(
        lambda params: (params, params),
        lambda grads, state, params=None: (grads, (grads, state[1])),
    ),
    # Both hold branches over the whole tree.
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_result_of_an_optimizer_is_an_array_of_its_own(quick, name):
    tx = OPTIMIZERS[name]
    layers = [ref.dense(12), jnp.tanh, ref.dense(8), ref.dense(4)]
    x, targets = ref.regression(8)
    pipe = jpipe.pipeline(layers, 2, balance=[2, 1, 1])
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    expected = ref.optax_steps(
        layers, ref.params_of(state.variables), x, targets, tx, 3
    )
    step = pipe.train_step(ref.mse, tx)
    for _ in range(3):
        state, _ = step(state, x, targets)
    ref.assert_close(state.params, expected[0], 1e-4)


@pytest.mark.parametrize("name", ["MultiSteps", "apply_if_finite"])
def test_an_optimizer_with_branches_moves_no_parameters(name, moved):
    tx = OPTIMIZERS[name]
    pipe = jpipe.pipeline(ref.mlp(), 2, balance=[2, 2, 2])
    x, targets = ref.regression(8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    state, _ = step(state, x, targets)
    moved.clear()
    step(state, x, targets)
    # The largest that moves is a boundary activation: four examples of width 12.
    assert max(size for size, _ in moved) == 48


def test_a_hyperparameter_that_is_a_python_number_is_named():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    pipe = jpipe.sequential([ref.dense(4)], 2)
    x, targets = ref.regression(4)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    state.opt_state.hyperparams["learning_rate"] = 0.05
    message = r"learning_rate'\]: given a Python float, needs float32\[\]"
    with pytest.raises(ValueError, match=message):
        pipe.train_step(ref.mse, tx)(state, x, targets)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.05)
    pipe.train_step(ref.mse, tx)(state, x, targets)


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [("MultiSteps", True), ("apply_if_finite", True), ("of the norm", False)],
)
def test_what_a_branch_skips_is_not_computed(quick, name, is_whole):
    """Each place has a branch of its own, unless the branch itself looks at all."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    of_the_norm = optax.MultiSteps(clipped, 2).gradient_transformation()
    tx = {**OPTIMIZERS, "of the norm": of_the_norm}[name]
    pipe = jpipe.pipeline([ref.dense(12), ref.dense(8), ref.dense(4)], 2)
    x, targets = ref.regression(8)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(ref.mse, tx)
    step(state, x, targets)
    (compiled,) = step._compiled.values()
    updates = [
        jax.make_jaxpr(program.function.run)(*program.arguments).jaxpr
        for (function, _), program in compiled.program.programs.items()
        if function.name.startswith("optimizer")
    ]
    branches = [
        eqn for jaxpr in updates for eqn in jaxpr.eqns if eqn.primitive.name == "cond"
    ]
    products = [
        eqn
        for jaxpr in updates
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sqrt" and eqn.outvars[0].aval.size > 1
    ]  # of Adam, outside of any branch
    assert bool(branches) == bool(not products) == is_whole

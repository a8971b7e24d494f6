"""What `jax.jit` tells apart beside its arguments, a pipeline tells apart."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe

from .. import reference as ref

OTHER = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    "disable_jit": jax.disable_jit,
}


class Traced:
    """Two layers, the second of which counts how often it is traced."""

    def __init__(self):
        self.count = 0
        self.pipe = jpipe.pipeline([ref.dense(4), self.layer], 2)
        self.x, self.targets = ref.regression(4)
        tx = optax.sgd(1e-2)
        self.state = self.pipe.init_train_state(jax.random.key(0), self.x, tx)
        step = self.pipe.train_step(ref.mse, tx, donate=False)
        gradient = self.pipe.value_and_grad(ref.mse)
        variables = self.state.variables
        self.calls = {
            "apply": lambda: self.pipe.apply(variables, self.x),
            "gradient": lambda: gradient(variables, self.x, self.targets),
            "step": lambda: step(self.state, self.x, self.targets),
        }

    def layer(self, x):
        self.count += 1
        return jnp.tanh(x)

    def during(self, call):
        before = self.count
        self.calls[call]()
        return self.count - before


@pytest.fixture(scope="module")
def traced():
    return Traced()


@pytest.mark.parametrize("call", ["apply", "gradient", "step"])
@pytest.mark.parametrize("name", OTHER)
def test_a_program_is_found_by_the_settings_that_it_was_traced_with(name, call, traced):
    traced.calls[call]()
    with OTHER[name]():
        assert traced.during(call)
        assert not traced.during(call)
    assert not traced.during(call)

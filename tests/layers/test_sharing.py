"""Equal stages: traced once, compiled once for a device, and no bit changes."""

import itertools
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe
from jpipe._layers import _alike
from jpipe.schedules import Action

from .. import reference as ref
from .stages import TARGETS, WIDTH, Block, Dropped, X, around, gradient_of


class Counted(nn.Module):
    """A dense layer that counts how often Flax calls it."""

    calls: ClassVar[list] = []

    @nn.compact
    def __call__(self, x):
        self.calls.append(x.shape)
        return nn.Dense(WIDTH)(x)


class TestWhatIsMadeOnce:
    def test_the_trace(self):
        def calls(number):
            Counted.calls.clear()
            gradient_of(around(*(Counted() for _ in range(number))))
            return len(Counted.calls)

        # A second layer shows that the initializer of both is a function of the key.
        assert calls(5) == calls(2) == calls(1) + 1

    def test_on_one_device_the_compiled_programs(self, caplog):
        layers = around(*(ref.Residual(WIDTH) for _ in range(6)))
        pipe = jpipe.pipeline(layers, 4, balance=[1] * 8, schedule="interleaved")
        variables = pipe.init(jax.random.key(0), X)
        assert [jax.devices().index(d) for d in pipe.devices] == [0, 1, 2, 3] * 2
        with jax.log_compiles(), caplog.at_level("WARNING"):
            pipe.value_and_grad(ref.mse)(variables, X, TARGETS)
        given = re.findall(r"Compiling jit\((stage\w+|zeros)\)", caplog.text)
        # One name on every device: JAX's persistent cache may find it for another.
        names = ["stage0", *["stage1_2_3_4_and_2_more"] * 4]
        parts = ("forward", "backward_add_grads")
        programs = [f"{name}_{part}" for name in names for part in parts]
        last = "stage7_forward_add_results_backward_add_grads"
        assert sorted(given) == sorted([*programs, last, *["zeros"] * 4])


def test_names_of_programs_that_many_stages_share_stay_short():
    """JAX makes file names of them: of its compilation cache, of dumps of XLA."""
    program = gradient_of(around(*(jnp.tanh for _ in range(9)))).program
    (compiled,) = {
        i.run
        for i in program.instructions
        if isinstance(i.label, Action) and i.label.op == "F" and 0 < i.label.stage < 10
    }
    assert compiled.run.__name__ == "stage1_2_3_4_and_5_more_forward"


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_equal_stages_train_as_one_device_does(double, schedule):
    layers = [ref.Residual(WIDTH, jnp.float64) for _ in range(4)]
    x, targets = jax.random.normal(jax.random.key(3), (2, 10, WIDTH), jnp.float64)
    tx = optax.adam(1e-2)
    pipe = jpipe.pipeline(layers, 4, schedule=schedule, balance=[1] * 4)
    ref.compare_steps(pipe, layers, x, targets, tx, ref.FLOAT64)


class Normed(nn.Module):
    """A block whose statistics training changes."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return jnp.tanh(nn.Dense(WIDTH)(x))


class NormedNnx(nnx.Module):
    """The same as an nnx module."""

    def __init__(self, seed):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=nnx.Rngs(seed))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return jnp.tanh(self.linear(self.norm(x)))


@pytest.mark.parametrize(
    ("blocks", "schedule"),
    [
        ([Normed() for _ in range(4)], "1f1b"),
        ([NormedNnx(seed) for seed in range(4)], "interleaved"),
        ([Block(seed) for seed in range(4)], "1f1b"),
        ([Dropped() for _ in range(4)], "interleaved"),
        ([ref.dense(WIDTH)] * 4, "1f1b"),  # tied: one module, four times
    ],
    ids=["batch norm", "nnx batch norm", "nnx", "dropout", "tied"],
)
def test_sharing_changes_no_bit(blocks, schedule, monkeypatch):
    """The same programs run, whether stages share them or each has its own."""
    x = jax.random.normal(jax.random.key(3), (10, WIDTH))
    tx = optax.adam(1e-2)

    def trained():
        pipe = jpipe.pipeline(blocks, 4, schedule=schedule, balance=[1] * 4)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(ref.mse, tx)
        for _ in range(2):
            state, metrics = step(state, x, jnp.cos(x))
        y = pipe.apply(state.variables, x)
        return state.variables, metrics["loss"], y, pipe._cache.training.works

    *shared, works = trained()
    number = itertools.count()
    monkeypatch.setattr(_alike, "behaviour", lambda layer: next(number))
    *alone, others = trained()
    ref.assert_equal(shared, alone)
    assert len({id(others.task(s).closed) for s in range(4)}) == 4
    # The first has an input without gradient, the last has the loss.
    assert len({id(works.task(s).closed) for s in range(4)}) == 3

"""Remat modes: the same numbers, and how many bytes each keeps.

`_remat_mode.MODES` is read because a mode that is added is to be tested too.
"""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jpipe
from jpipe._partition import _remat_mode

from .. import reference as ref
from ..listing import program_of
from ..slow import slow_except

MODES = [mode.name for mode in _remat_mode.MODES]
WIDTH = 8
KEY = jax.random.key(3)


class Recurrent(nn.Module):
    """A loop in a loop, along an array, with a constant from outside."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (WIDTH, WIDTH), float)

        def turn(carry, row):
            inner, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), row, None, 2)
            return jnp.sin(carry) + inner, jnp.exp(-(carry**2))

        last, along = jax.lax.scan(turn, x[:, 0], x.swapaxes(0, 1))
        return along.swapaxes(0, 1) + last[:, None]


@jax.custom_vjp
def clipped(x):
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x > 0), lambda positive, g: (g * positive,))


class Ruled(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = clipped(nn.Dense(WIDTH, param_dtype=float)(x))
        return jax.lax.cond(h.sum() > 0, jnp.sin, jnp.exp, h)


LAYERS = {
    "perceptron": lambda: ref.Residual(WIDTH, float),
    "loops": Recurrent,
    "rules": Ruled,
}


@functools.cache
def found(name, mode, schedule="1f1b"):
    """The plan of a pipeline whose first stage has two such layers, and gradients."""
    with jax.enable_x64(True), ref.unoptimized():
        layers = [LAYERS[name]() for _ in range(2)] + [ref.dense(4, float)]
        x = jax.random.normal(KEY, (6, 5, WIDTH), float)
        pipe = jpipe.pipeline(layers, 3, balance=[2, 1], remat=mode, schedule=schedule)
        find = pipe.value_and_grad(ref.mse)
        value = find(pipe.init(KEY, x), x, jnp.ones((6, 5, 4)), rngs=KEY)
        return find.plan, jax.device_get(value)


@pytest.mark.parametrize("name", slow_except({"loops", "rules"}, LAYERS))
def test_a_minimum_cut_keeps_least_and_gives_the_same_numbers(name):
    plans, values = zip(*(found(name, mode) for mode in MODES), strict=True)
    for value in values[1:]:
        ref.assert_close(value, values[0], ref.FLOAT64)
    held = {m: p.stages[0].residual_bytes for m, p in zip(MODES, plans, strict=True)}
    assert held["full"] <= held["min_cut"] <= held["none"]
    if name == "loops":  # what they carry is kept; a policy runs them again for it
        assert held["min_cut"] < held["none"]
    else:
        assert held["min_cut"] <= held["dots"]


def test_the_residuals_of_a_minimum_cut_are_counted_by_hand():
    """Of a block of two products: its input and the result of the first."""
    stage = found("perceptron", "min_cut")[0].stages[0]
    rows = 2 * 5 * WIDTH * 8  # [microbatch, time, width] in double precision
    assert stage.residuals["min_cut"] == 2 * (rows + 2 * rows)
    assert (
        stage.residual_bytes == 2 * stage.residuals["min_cut"]
    )  # of two micro-batches


def test_equal_stages_keep_what_the_mode_of_each_says():
    x = jnp.ones((6, WIDTH))

    def build(*remat):
        layers = [ref.dense(WIDTH), *(ref.Residual(WIDTH) for _ in remat), ref.dense(4)]
        return jpipe.pipeline(
            layers, 4, balance=[1] * 4, remat=("none", *remat, "none")
        )

    variables = build("none", "none").init(KEY, x)

    def held(*remat):
        pipe = build(*remat)
        # Its program says what is kept, and need not run.
        find = pipe.value_and_grad(ref.mse)
        program_of(find, variables, x, jnp.ones((6, 4)))
        return [stage.residual_bytes for stage in find.plan.stages[1:3]]

    most, least = held("none", "none"), held("full", "full")
    assert all(a > b for a, b in zip(most, least, strict=True))
    assert held("none", "full") == [most[0], least[1]]
    assert held("full", "none") == [least[0], most[1]]


class Noisy(nn.Module):
    """A product, and a mask."""

    @nn.compact
    def __call__(self, x, train):
        h = nn.Dense(WIDTH)(x)
        if not train:
            return h
        mask = jax.random.bernoulli(self.make_rng("dropout"), 0.5, h.shape)
        return jnp.where(mask, 2 * h, 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_masks_are_kept_and_no_backward_draws_them_again(schedule):
    rows, x = 4 * WIDTH, jax.random.normal(KEY, (8, WIDTH))
    found, flops = {}, {}
    for remat in ("min_cut", "none"):
        layers = [Noisy(), Noisy(), ref.dense(4)]
        balance = [len(layers) - 1, 1]
        pipe = jpipe.pipeline(
            layers, 2, balance=balance, remat=remat, schedule=schedule
        )
        find = pipe.value_and_grad(ref.mse)
        given = pipe.init(KEY, x), x, jnp.ones((8, 4))
        found[remat] = find(*given, rngs=KEY)
        report = find.compile(*given, rngs=KEY)
        stage = [p for p in report.programs if p.name.startswith("stage0_")]
        flops[remat] = sum(p.flops for p in stage if "forward" not in p.name)
        if remat == "min_cut":
            # What each of two products is given, and a byte for each entry of a mask.
            assert find.plan.stages[0].residuals[remat] <= 2 * rows * (4 + 1)
    ref.assert_close(found["min_cut"], found["none"], ref.FLOAT32)
    # A draw takes a hundred operations for each element, one of 16 products 2.
    assert flops["min_cut"] <= flops["none"] + 20 * rows


class Scaled(nn.Module):
    """A step of a residual stream that is scaled before its product."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (WIDTH,))
        return x + 0.05 * jnp.tanh(nn.Dense(WIDTH)(x * scale))


def test_the_sums_of_a_long_chain_are_not_computed_again_from_its_start():
    """Or each layer would sum the results of all layers before it."""
    depth, x = 40, jax.random.normal(KEY, (8, WIDTH))
    layers = [*(Scaled() for _ in range(depth)), ref.dense(4)]
    targets = jnp.ones((8, 4))
    grads, flops = {}, {}
    for remat in ("min_cut", "none"):
        pipe = jpipe.pipeline(layers, 4, balance=[depth, 1], remat=remat)
        value_and_grad = pipe.value_and_grad(ref.mse)
        variables = pipe.init(KEY, x)
        report = value_and_grad.compile(variables, x, targets)
        flops[remat] = next(
            program.flops
            for program in report.programs
            if program.name.startswith("stage0_backward")
        )
        grads[remat] = value_and_grad(variables, x, targets)
        if remat == "min_cut":
            row = 2 * WIDTH * 4  # of a micro-batch of two examples
            # The input, the result of each product, and one sum of the stream in 12.
            rows = 1 + depth + depth / 12
            assert value_and_grad.plan.stages[0].residuals[remat] <= rows * row
    ref.assert_close(grads["min_cut"], grads["none"], ref.FLOAT32)
    assert flops["min_cut"] <= 2 * flops["none"]


@jax.custom_vjp
def looked_up(x, table):
    return x * table[1]


def _look_up_back(table, g):
    def add(i, so_far):
        return so_far + g * table[i]

    return jax.lax.fori_loop(1, 2, add, jnp.zeros_like(g)), None


looked_up.defvjp(lambda x, table: (looked_up(x, table), table), _look_up_back)


def test_a_rule_for_gradients_may_read_a_constant_as_an_array():
    """Such as the times of `jax.experimental.ode.odeint`, by a number of a loop."""
    layers = [
        ref.dense(5),
        lambda x: looked_up(x, jnp.array([1.0, 2.0])),
        ref.dense(4),
        lambda x: looked_up(x, jnp.array([1.0, 3.0])),
    ]
    x, targets = ref.regression(6)
    pipe = jpipe.pipeline(layers, 3, balance=[2, 2], schedule="zb_h1")
    ref.compare(pipe, layers, x, targets, 1e-5)


ADDED_MODE = """
from jpipe._partition import _remat_mode

_remat_mode.MODES += (_remat_mode.RematMode("all", is_tried_by_plan=True),)

import jax, jax.numpy as jnp, optax
from flax import linen as nn
import jpipe

def loss(y, targets):
    return jnp.mean((y - targets) ** 2)

layers = [nn.Dense(8), jnp.tanh, nn.Dense(8), jnp.sin, nn.Dense(4)]
x, targets = jnp.ones((4, 8)), jnp.zeros((4, 4))
pipe = jpipe.pipeline(
    layers, 2, balance=[2, 3], devices=jax.devices()[:1] * 2, remat="all"
)
f = pipe.value_and_grad(loss)
f(pipe.init(jax.random.key(0), x), x, targets)
print(f.plan)
options = {"loss_fn": loss, "targets": targets, "measure": False, "num_microbatches": 2}
options |= {"num_devices": 2, "balance": [2, 3]}
plan = jpipe.plan(
    layers, x, optax.sgd(0.1), schedules="zb_h1", remat="all", **options
)
print(*plan.remat)
"""


def test_a_mode_that_is_added_is_printed_and_planned_like_what_it_stores():
    """It has no policy, and stores all, as ``none`` does."""
    result = subprocess.run(
        [sys.executable, "-c", ADDED_MODE], capture_output=True, text=True, check=False
    )
    assert not result.returncode, result.stderr
    lines = result.stdout.splitlines()
    (head,) = (line for line in lines if line.startswith("residuals of a micro-batch"))
    (row,) = (line for line in lines if line.startswith("stage 0     "))
    assert head.split()[4:9] == ["by", "full", "all", "dots", "none"]
    residuals = re.findall(r"[\d.]+ K?B", row)
    assert residuals[1] == residuals[3]
    assert lines[-1] == "all all"


def test_a_mode_with_any_field_of_its_own_recomputes():
    @dataclasses.dataclass(frozen=True)
    class NewMode(_remat_mode.RematMode):
        stores_every_other: bool = False

    assert [m.name for m in _remat_mode.MODES if not m.recomputes] == ["none"]
    assert not _remat_mode.RematMode("all", is_tried_by_plan=True).recomputes
    assert NewMode("new", stores_every_other=True).between_halves.name == "min_cut"

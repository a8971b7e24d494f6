"""jpipe, and the plain training step in JAX, in a process of its own.

Both stages are in one process: two CPU devices, each with one thread of its own for
arithmetic (`--xla_cpu_multi_thread_eigen=false`). Python drives both from a third
thread. `ours_apart` has a process for each stage.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe

from ..experiment import mean_cross_entropy
from ..models.block import Block
from .measure import Training
from .workload import LEARNING_RATE, Case, Layer, Size, Weights

PyTree = Any


def module(layer: Layer, size: Size) -> Any:
    """The Flax module, or function, of a layer."""
    if layer.kind == "dense":
        return nn.Dense(layer.outputs)
    if layer.kind == "embed":
        return nn.Embed(layer.inputs, layer.outputs)
    return {"relu": nn.relu, "block": Block(size.width, size.heads)}.get(
        layer.kind, nn.LayerNorm()
    )


def params(layer: Layer, size: Size) -> PyTree:
    """The weights of a layer under the names that its Flax module gives them."""
    weights = layer.weights()
    if layer.kind == "embed":
        return {"embedding": weights["table"]}
    return _block_params(weights, size) if layer.kind == "block" else weights


def _block_params(weights: Weights, size: Size) -> PyTree:
    def part(name: str) -> Weights:
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): value
            for key, value in weights.items()
            if key.startswith(prefix)
        }

    heads = size.heads, size.width // size.heads

    def into_heads(own: Weights) -> Weights:
        kernel, bias = own["kernel"], own["bias"]
        return {"kernel": kernel.reshape(-1, *heads), "bias": bias.reshape(heads)}

    out = part("out")
    attention: PyTree = {n: into_heads(part(n)) for n in ("query", "key", "value")}
    kernel = out["kernel"].reshape(*heads, -1)
    attention["out"] = {"kernel": kernel, "bias": out["bias"]}
    return {
        "LayerNorm_0": part("norm1"),
        "MultiHeadDotProductAttention_0": attention,
        "LayerNorm_1": part("norm2"),
        "Dense_0": part("up"),
        "Dense_1": part("down"),
    }


def pipeline(case: Case) -> Training:
    """Two stages of jpipe with the weights that all sides have."""
    take, state = train_step(case)
    batch = case.data()

    def step() -> float:
        nonlocal state
        state, metrics = take(state, *batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return Training(total_here(state.params), step)


def train_step(case: Case) -> tuple[jpipe.TrainStep, jpipe.TrainState]:
    """The train step of two stages, and the state before the first step."""
    layers = case.layers()
    x, _ = case.data()
    pipe = jpipe.pipeline(
        [module(layer, case.size) for layer in layers],
        case.microbatches,
        balance=case.balance(),
        schedule=case.schedule,
        remat=case.remat if case.remat in ("none", "full") else "min_cut",
    )
    tx = optax.sgd(LEARNING_RATE)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    loaded = tuple(params(layer, case.size) for layer in layers)
    if jax.tree.map(np.shape, state.params) != jax.tree.map(np.shape, loaded):
        raise ValueError("the modules do not have the weights that were drawn for them")
    state = pipe.place(dataclasses.replace(state, params=loaded))
    return pipe.train_step(mean_cross_entropy, tx), state


def baseline(case: Case) -> Training:
    """The plain step: in one `jax.jit`, a scan over micro-batches."""
    layers, size = case.layers(), case.size
    x, targets = jax.device_put(case.data())
    stages = halves([module(layer, size) for layer in layers], case)
    weights = [jax.device_put(params(layer, size)) for layer in layers]

    def loss(weights: PyTree, x: Any, targets: Any) -> Any:
        for start, run in stages:
            x = run(weights[start:], x)
        return mean_cross_entropy(x, targets)

    def split(leaf: Any) -> Any:
        return leaf.reshape(case.microbatches, -1, *leaf.shape[1:])

    def update(weights: PyTree, x: Any, targets: Any) -> Any:
        def body(sums: PyTree, part: Any) -> Any:
            found = jax.value_and_grad(loss)(weights, *part)
            return jax.tree.map(jnp.add, sums, found), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), weights))
        (value, grads), _ = jax.lax.scan(body, zeros, (split(x), split(targets)))
        rate = LEARNING_RATE / case.microbatches
        new = jax.tree.map(lambda w, g: w - rate * g, weights, grads)
        return new, value / case.microbatches

    take = jax.jit(update, donate_argnums=0)
    count, box = total_here(weights), [weights]

    def step() -> float:
        weights, value = take(box.pop(), x, targets)
        box.append(jax.block_until_ready(weights))
        return float(value)

    return Training(count, step)


def total_here(params: PyTree) -> int:
    """How many numbers this process has."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.size for leaf in leaves if leaf.is_fully_addressable)


def halves(modules: list[Any], case: Case) -> list[tuple[int, Callable[..., Any]]]:
    """Both halves of the model: the number of the first layer, and a function."""

    def half(own: list[Any]) -> Callable[..., Any]:
        def run(weights: PyTree, x: Any) -> Any:
            for layer, w in zip(own, weights, strict=False):
                is_module = isinstance(layer, nn.Module)
                x = layer.apply({"params": w}, x) if is_module else layer(x)
            return x

        return run

    first, _ = case.balance()
    halves = [(0, half(modules[:first])), (first, half(modules[first:]))]
    return [
        (start, jax.checkpoint(run) if number in case.recomputed else run)
        for number, (start, run) in enumerate(halves)
    ]


def warm_up(case: Case) -> None:
    """Starts the runtime and the compiler, which are not part of the model."""
    devices = 1 if case.schedule == "baseline" else 2
    jax.config.update("jax_num_cpu_devices", devices)
    compile_one_number()


def compile_one_number() -> None:
    """Starts the runtime and the compiler with a program of one number."""
    jax.block_until_ready(jax.jit(jax.grad(jnp.square))(1.0))

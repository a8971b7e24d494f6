"""The first step of a pipeline against that of the plain program: what compiling takes.

Run it with ``python -m benchmarks.overhead.compiling equal jpipe``.
``python -m benchmarks.overhead --part compiling`` runs each side in processes of its
own, in turns, since a process compiles nothing twice.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jpipe

from ..models.block import Block
from .dispatch import square

PyTree = Any
Step = Callable[[PyTree, jax.Array], PyTree]
WIDTH, STAGES, MICROBATCHES = 256, 4, 8
# How many heads the blocks of each stage have: a stage is another program for each.
HEADS = {
    "equal": [[4] * 3, [4] * 4, [4] * 4, [4] * 3],
    "unequal": [[1, 2, 4, 8], [8, 4, 2, 1], [1, 4, 8], [8, 1, 2]],
}


def pipelined(blocks: list[list[Block]]) -> tuple[Step, PyTree]:
    """A train step of one stage for each list of blocks, and its state."""
    layers = [block for stage in blocks for block in stage]
    balance = [len(stage) for stage in blocks]
    pipe = jpipe.pipeline(layers, MICROBATCHES, balance=balance)
    tx = optax.adam(1e-3)
    state = pipe.init_train_state(jax.random.key(0), _batch(), tx)
    step = pipe.train_step(square, tx)
    return lambda state, x: step(state, x, x)[0], state


def plain(blocks: list[list[Block]]) -> tuple[Step, PyTree]:
    """The same on one device, as one program: whole batches, nothing rematerialized."""
    layers = [block for stage in blocks for block in stage]
    tx = optax.adam(1e-3)
    keys = jax.random.split(jax.random.key(0), len(layers))
    params = [
        layer.init(key, _batch()) for layer, key in zip(layers, keys, strict=True)
    ]

    def loss(params: list[PyTree], x: jax.Array) -> jax.Array:
        y: Any = x
        for layer, own in zip(layers, params, strict=True):
            y = layer.apply(own, y)
        return square(y, x)

    @jax.jit
    def step(state: PyTree, x: jax.Array) -> PyTree:
        params, opt_state = state
        grads = jax.grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (params, tx.init(params))


SIDES = {"jpipe": pipelined, "plain": plain}


def first_step(side: str, model: str) -> dict[str, float]:
    """What the first step takes more than the second, and when it is built again.

    Args:
      side: a key of `SIDES`.
      model: a key of `HEADS`.

    Returns:
      Seconds of a step that is built for the first and for the second time.
    """
    blocks = [[Block(WIDTH, heads) for heads in stage] for stage in HEADS[model]]
    found = []
    for _ in range(2):
        step, state = SIDES[side](blocks)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, _batch()))
        middle = time.perf_counter()
        jax.block_until_ready(step(state, _batch()))
        found.append(2 * middle - start - time.perf_counter())
    return {"first_s": found[0], "again_s": found[1]}


def gradients(model: str) -> dict[str, float]:
    """What XLA takes for one stage and for all, each as one program.

    Args:
      model: a key of `HEADS`.

    Returns:
      Processor seconds that compile the gradient of the first stage's blocks, and of
      all blocks.
    """
    found = {}
    for name, heads in (
        ("stage", HEADS[model][0]),
        ("whole", [*itertools.chain(*HEADS[model])]),
    ):
        layers = [Block(WIDTH, count) for count in heads]
        x = _batch()
        params = [layer.init(jax.random.key(0), x) for layer in layers]

        def loss(params: list[PyTree], layers: list[Block] = layers) -> jax.Array:
            y: Any = _batch()
            for layer, own in zip(layers, params, strict=True):
                y = layer.apply(own, y)
            return square(y, _batch())

        lowered = jax.jit(jax.grad(loss)).lower(params)
        start = time.process_time()
        lowered.compile()
        found[f"{name}_s"] = time.process_time() - start
    return found


def _batch() -> jax.Array:
    return jnp.ones((4 * MICROBATCHES, 64, WIDTH))


def main() -> None:
    """Prints one side as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    # "gradients": what XLA takes for one stage beside the whole.
    parser.add_argument("model", choices=list(HEADS))
    parser.add_argument("side", choices=[*SIDES, "gradients"])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", STAGES)
    if options.side == "gradients":
        print(json.dumps(gradients(options.model)))
    else:
        print(json.dumps(first_step(options.side, options.model)))


if __name__ == "__main__":
    main()

"""One stage and M micro-batches against the step that a user writes by hand.

Run it with ``python -m benchmarks.overhead.one_stage transformer``.
``python -m benchmarks.overhead`` runs it in several processes, since the luck of one
process with its memory allocator outweighs what is measured.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

from ..cells.predict import one_core
from ..experiment import mean_cross_entropy
from ..models.block import Block
from . import by_hand

Runs = dict[str, Callable[[Any], Any]]
States = dict[str, Any]


def transformer() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, tokens and next tokens: 3.3 M parameters, batch 128 of 64 tokens."""
    width, vocabulary = 256, 256
    layers = [nn.Embed(vocabulary, width), *(Block(width, 4) for _ in range(4))]
    layers += [nn.LayerNorm(), nn.Dense(vocabulary)]
    tokens = jax.random.randint(jax.random.key(1), (128, 65), 0, vocabulary)
    return layers, tokens[:, :-1], tokens[:, 1:]


def cnn() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, images and labels: four convolutions, batch 64 of 32 x 32."""
    layers = [
        nn.Conv(32, (3, 3)),
        nn.relu,
        nn.Conv(64, (3, 3), strides=(2, 2)),
        nn.relu,
        nn.Conv(64, (3, 3)),
        nn.relu,
        nn.Conv(128, (3, 3), strides=(2, 2)),
        nn.relu,
        lambda x: jnp.mean(x, axis=(1, 2)),
        nn.Dense(10),
    ]
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))
    return layers, images, jax.random.randint(jax.random.key(2), (64,), 0, 10)


MODELS: dict[str, Callable[[], Any]] = {"transformer": transformer, "cnn": cnn}


def throughput(
    model: Callable[[], Any],
    rounds: int,
    others: Sequence[str] = ("scan", "unrolled"),
) -> dict[str, float]:
    """One stage and M micro-batches against hand-written steps, same model.

    Args:
      model: gives layers, inputs and targets.
      rounds: how many steps of each side are timed, in turns.
      others: keys of `by_hand.STEPS`.

    Returns:
      The median milliseconds, page faults and busy cores of a step of each side; and
      the throughput of jpipe by that of each hand-written step, the median of the
      rounds' ratios: what slows the machine for a while slows both sides of a round.
    """
    runs, states = _sides(model, others)
    figures: dict[str, list[_Figure]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            states[name], figure = _timed(runs[name], states[name])
            if turn > 1:  # before, all sides compile and warm up
                figures[name].append(figure)
    return _summary(figures, others)


def _sides(model: Callable[[], Any], others: Sequence[str]) -> tuple[Runs, States]:
    """Each step as a function of its state, and the states: equal parameters."""
    layers, x, targets = model()
    number, tx = 8, optax.adamw(1e-3)
    pipe = jpipe.sequential(layers, number)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(mean_cross_entropy, tx)

    def run_by_hand(name: str) -> Callable[[Any], Any]:
        by_hand_step = by_hand.STEPS[name](layers, tx, number)
        return lambda state: by_hand_step(*state, x, targets)[:2]

    # Copies: every side overwrites its parameters.
    copies = [jax.tree.map(jnp.array, state.params) for _ in others]
    states: States = {"jpipe": state}
    runs: Runs = {"jpipe": lambda state: step(state, x, targets)[0]}
    for name, params in zip(others, copies, strict=True):
        states[name] = params, tx.init(params)
        runs[name] = run_by_hand(name)
    return runs, states


class _Figure(NamedTuple):
    """What one step took: milliseconds, minor page faults, cores at work."""

    ms: float
    faults: int
    busy: float


def _timed(run: Callable[[Any], Any], state: Any) -> tuple[Any, _Figure]:
    def now() -> tuple[float, int, float]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return time.perf_counter(), faults, time.process_time()

    before = now()
    state = jax.block_until_ready(run(state))
    wall, faults, cpu = (b - a for a, b in zip(before, now(), strict=True))
    return state, _Figure(1e3 * wall, int(faults), cpu / wall)


def _summary(
    figures: dict[str, list[_Figure]], others: Sequence[str]
) -> dict[str, float]:
    result = {}
    for name, steps in figures.items():
        columns = zip(*steps, strict=True)
        for kind, column in zip(_Figure._fields, columns, strict=True):
            result[f"{name}_{kind}"] = statistics.median(column)
    for name in others:
        rounds_of_both = zip(figures[name], figures["jpipe"], strict=True)
        ratios = [theirs.ms / ours.ms for theirs, ours in rounds_of_both]
        result[f"by_{name}"] = statistics.median(ratios)
    return result


def main() -> None:
    """Prints `throughput` of one model as JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.overhead.one_stage", description=__doc__
    )
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument(
        "--against",
        nargs="+",
        choices=list(by_hand.STEPS),
        default=["scan", "unrolled"],
        help="the hand-written steps",
    )
    parser.add_argument(
        "--one-core", action="store_true", help="run every side on one core"
    )
    options = parser.parse_args()
    if options.one_core and not hasattr(os, "sched_setaffinity"):
        parser.error("--one-core: this system cannot keep a process on a core")
    # Before JAX starts its threads, which then are as many as there are cores.
    with one_core() if options.one_core else nullcontext():
        result = throughput(MODELS[options.model], options.rounds, options.against)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

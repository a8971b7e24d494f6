"""What each remat mode keeps and what it costs, on five models.

Run it with ``python -m benchmarks.overhead.remat``, or with names of models. Two stages
on two CPU devices, eight micro-batches, 1F1B; all modes of a model in one process, in
turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.progress import track

import jpipe
from jpipe._partition import _remat_mode

from ..models.amoebanet import amoebanetd
from ..models.block import Block
from ..models.resnet import resnet101
from ..models.unet import unet
from .dispatch import square

MODES = tuple(mode.name for mode in _remat_mode.MODES)
MICROBATCHES = 8
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")


class Perceptron(nn.Module):
    """A residual block of two products with gelu between them."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, width]`` to the same."""
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


def _images(batch: int, size: int, channels: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, size, size, channels))


# The layers, how many of them the first stage has, and a batch.
MODELS: dict[str, Callable[[], tuple[list[Any], int, jax.Array]]] = {
    "MLP": lambda: (
        [Perceptron(256) for _ in range(8)],
        4,
        jax.random.normal(jax.random.key(1), (1024, 256)),
    ),
    "Transformer": lambda: (
        [Block(256, 4) for _ in range(6)],
        3,
        jax.random.normal(jax.random.key(1), (16, 128, 256)),
    ),
    "ResNet-101": lambda: (
        resnet101(width=16, blocks=(3, 4, 6, 3), num_classes=10),
        90,
        _images(16, 32),
    ),
    "AmoebaNet-D": lambda: (amoebanetd(10, 3, 32), 5, _images(16, 32)),
    "U-Net": lambda: (unet(2, 16, depth=3), 11, _images(16, 32)),
}


def measure(name: str, rounds: int, modes: tuple[str, ...] = MODES) -> dict[str, Any]:
    """Seconds per step and bytes held of each mode on one model."""
    layers, first, x = MODELS[name]()
    targets = jnp.zeros(len(x))
    # With momentum the optimizer's state has the gradient.
    tx = optax.sgd(1e-3, momentum=0.0)
    sides: dict[str, tuple[Any, Any]] = {}
    found: dict[str, Any] = {}
    for mode in modes:
        pipe = jpipe.pipeline(
            layers, MICROBATCHES, remat=mode, balance=[first, len(layers) - first]
        )
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(lambda y, _: square(y, jnp.zeros_like(y)), tx)
        begin = time.perf_counter()
        state, metrics = step(state, x, targets)
        loss = float(metrics["loss"])
        found[mode] = {
            "first": time.perf_counter() - begin,
            "held": [stage.residual_bytes for stage in pipe.plan.stages],
            "peaks": [size for _, size in pipe.plan.peak_bytes],
            "loss": loss,
            "grads": jax.device_get(jax.tree.leaves(state.opt_state)),
            "seconds": [],
        }
        sides[mode] = state, step
    for _ in range(rounds):
        for mode, (state, step) in sides.items():
            begin = time.perf_counter()
            state, metrics = step(state, x, targets)
            jax.block_until_ready((state, metrics))
            found[mode]["seconds"].append(time.perf_counter() - begin)
            sides[mode] = state, step
    grads = {mode: own.pop("grads") for mode, own in found.items()}
    for mode in modes:
        found[mode]["apart"] = apart(grads[mode], grads["none"])
    return found


def apart(ours: list[Any], others: list[Any]) -> float:
    """The largest difference of a gradient, by the largest number in any."""
    # By those in the same array it says nothing: that of a bias of keys is rounding.
    differences = [np.max(np.abs(a - b)) for a, b in zip(ours, others, strict=True)]
    return float(max(differences) / max(np.max(np.abs(b)) for b in others))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results in Markdown: bytes, and time and gradients against ``none``."""
    lines = [
        "| model | " + " | ".join(f"`{mode}`" for mode in MODES) + " | differs by |",
        "| --- |" + " --: |" * (len(MODES) + 1),
    ]
    for name, found in results.items():
        cells = []
        for mode in MODES:
            pairs = zip(found[mode]["seconds"], found["none"]["seconds"], strict=True)
            ratio = statistics.median(own / other for own, other in pairs)
            held = max(found[mode]["held"]) / 2**20
            cells.append(f"{held:.1f} MiB, {ratio:.2f} x")
        cells.append(f"{found['min_cut']['apart']:.0e}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def peaks() -> str:
    """The most that any of four devices holds under each schedule, in Markdown.

    Read off the list of instructions of a step: nothing is compiled.
    """
    lines = ["| peak, MiB | " + " | ".join(f"`{mode}`" for mode in MODES) + " |"]
    lines.append("| --- |" + " --: |" * len(MODES))
    x = jax.random.normal(jax.random.key(1), (16, 128, 256))
    for name in SCHEDULES:
        stages = jpipe.schedules.BY_NAME[name](4, MICROBATCHES).num_stages
        cells = []
        for mode in MODES:
            layers = [Block(256, 4) for _ in range(8)]
            balance = [8 // stages] * stages
            pipe = jpipe.pipeline(
                layers, MICROBATCHES, remat=mode, balance=balance, schedule=name
            )
            variables = pipe.init(jax.random.key(0), x)
            gradient: Any = pipe.value_and_grad(square)
            gradient.program(variables, x, x)
            cells.append(f"{max(size for _, size in pipe.plan.peak_bytes) / 2**20:.1f}")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures what was named, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--schedules", action="store_true", help="what each schedule holds instead"
    )
    options = parser.parse_args()
    if options.schedules:
        jax.config.update("jax_num_cpu_devices", 4)
        return print(peaks())
    jax.config.update("jax_num_cpu_devices", 2)
    results = {
        name: measure(name, options.rounds)
        for name in track(options.models, disable=options.json)
    }
    print(json.dumps(results) if options.json else table(results))


if __name__ == "__main__":
    main()

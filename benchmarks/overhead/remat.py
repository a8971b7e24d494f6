"""What each remat mode keeps and what it costs, on five models.

Run it with ``python -m benchmarks.overhead.remat``, or with names of models. Two stages
on two CPU devices, eight micro-batches, 1F1B; all modes of a model in one process, in
turns.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe
from jpipe._partition import _remat_mode

from ..experiment import mean_square
from ..markdown import table
from ..models.amoebanet import amoebanetd
from ..models.block import Block
from ..models.resnet import resnet101
from ..models.unet import unet
from ..steps import interleaved, train_steps

MODES = tuple(mode.name for mode in _remat_mode.MODES)
_HEAD = [f"`{mode}`" for mode in MODES]
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


def measure(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds per step, bytes held and gradients of each mode on one model."""
    layers, first, x = MODELS[name]()
    targets = jnp.zeros(len(x))
    # With momentum the optimizer's state has the gradient.
    tx = optax.sgd(1e-3, momentum=0.0)
    steps = {}
    figures: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        pipe = jpipe.pipeline(
            layers, MICROBATCHES, remat=mode, balance=[first, len(layers) - first]
        )
        steps[mode] = train_steps(pipe, mean_of_squares, tx, x, targets)
        state = steps[mode]()
        plan = _plan_of_gradient(
            pipe, mean_of_squares, state.variables, x=x, targets=targets
        )
        figures[mode] = {
            "held": [stage.residual_bytes for stage in plan.stages],
            "grads": jax.device_get(jax.tree.leaves(state.opt_state)),
        }
    for mode, seconds in interleaved(steps, rounds, warm_up=0).items():
        figures[mode]["seconds"] = seconds
    return figures


def mean_of_squares(outputs: jax.Array, _: jax.Array) -> jax.Array:
    """A loss without targets."""
    return mean_square(outputs, jnp.zeros_like(outputs))


def apart(ours: list[Any], others: list[Any]) -> float:
    """The largest difference of a gradient, by the largest number in any."""
    # By those in the same array it says nothing: that of a bias of keys is rounding.
    differences = [np.max(np.abs(a - b)) for a, b in zip(ours, others, strict=True)]
    return float(max(differences) / max(np.max(np.abs(b)) for b in others))


def shown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The results in Markdown: bytes, and time and gradients against ``none``."""
    rows = []
    for name, figures in results.items():
        plain = figures["none"]
        cells = []
        for mode in MODES:
            pairs = zip(figures[mode]["seconds"], plain["seconds"], strict=True)
            ratio = statistics.median(seconds / base for seconds, base in pairs)
            held = max(figures[mode]["held"]) / 2**20
            cells.append(f"{held:.1f} MiB, {ratio:.2f} x")
        differs_by = apart(figures["min_cut"]["grads"], plain["grads"])
        rows.append([name, *cells, f"{differs_by:.0e}"])
    return table(["model", *_HEAD, "differs by"], rows)


def peaks() -> str:
    """The most that any of four devices holds under each schedule, in Markdown.

    Read off the list of instructions of a step: nothing is compiled.
    """
    rows = []
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
            plan = _plan_of_gradient(pipe, mean_square, variables, x=x, targets=x)
            cells.append(f"{max(size for _, size in plan.peak_bytes) / 2**20:.1f}")
        rows.append([f"`{name}`", *cells])
    return table(["peak, MiB", *_HEAD], rows)


def _plan_of_gradient(
    pipe: jpipe.Pipeline, loss_fn: Any, variables: Any, *, x: Any, targets: Any
) -> jpipe.Plan:
    """The plan of the gradients of a mini-batch, which do not run."""
    gradient = pipe.value_and_grad(loss_fn)
    gradient._program(variables, x, targets)
    return gradient.plan


def main() -> None:
    """Measures what was named, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--schedules", action="store_true", help="what each schedule holds instead"
    )
    options = parser.parse_args()
    if options.schedules:
        jax.config.update("jax_num_cpu_devices", 4)
        return print(peaks())
    jax.config.update("jax_num_cpu_devices", 2)
    print(shown({name: measure(name, options.rounds) for name in options.models}))


if __name__ == "__main__":
    main()

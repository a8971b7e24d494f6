"""Plans a model for two, four and eight devices, without any of them.

Layers are estimated, not measured: nothing is compiled and nothing runs. It prints, for
each number of devices, what three cuts would take under 1F1B and what the plan takes:
as many layers for each stage, the cut that torchgpipe published for its benchmark, and
the one that `jpipe.partition` finds.

    python examples/plan.py
    python examples/plan.py --blocks 48 --memory 8 --devices 4 --svg build/plan.svg
    python examples/plan.py --model resnet101 --memory 22.5
    python examples/plan.py --model amoebanetd --memory 8
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.progress import track

import jpipe

GIB = 2**30
# Operations and bytes of memory per second, and bytes between two devices: of an
# accelerator of today, and of the Tesla P40 in a PCIe slot that torchgpipe measured on.
FAST = {"peak_flops": 1e14, "memory_bandwidth": 1e12}, 5e10
P40 = {"peak_flops": 1.2e13, "memory_bandwidth": 3.5e11}, 1.2e10
# Layers of each stage, examples and micro-batches (torchgpipe 0.0.7).
PUBLISHED = {
    "resnet101": {
        2: ([135, 235], 25000, 1667),
        4: ([44, 92, 124, 110], 5632, 256),
        8: ([26, 22, 33, 44, 44, 66, 66, 69], 5400, 150),
    },
    "amoebanetd": {
        2: ([9, 15], 1280, 32),
        4: ([3, 6, 7, 8], 1152, 32),
        8: ([2, 2, 2, 3, 3, 4, 4, 4], 1280, 32),
    },
}


class Block(nn.Module):
    """A pre-norm Transformer block."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.width // 64)(h)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


class Task(NamedTuple):
    """A model for a number of devices."""

    layers: list[Any]
    sample: jax.ShapeDtypeStruct
    num_microbatches: int
    published: list[int] | None
    rates: dict[str, float]
    bandwidth: float


def task(given: argparse.Namespace, count: int) -> Task:
    """What was asked for, for so many devices."""
    if given.model == "lm":
        blocks = [Block(given.width) for _ in range(given.blocks)]
        ends = nn.Embed(given.words, given.width), nn.Dense(given.words)
        tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)
        return Task([ends[0], *blocks, ends[1]], tokens, 4 * count, None, *FAST)
    # The models of the benchmarks, beside this folder.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from benchmarks.models.amoebanet import amoebanetd
    from benchmarks.models.resnet import resnet101

    layers = (
        resnet101(1000) if given.model == "resnet101" else amoebanetd(1000, 18, 256)
    )
    published, examples, number = PUBLISHED[given.model][count]
    images = jax.ShapeDtypeStruct((examples, 224, 224, 3), jnp.float32)
    return Task(list(layers), images, number, published, *P40)


def plans(
    asked: Task, count: int, limit: int
) -> Iterator[tuple[str, jpipe.Plan | ValueError]]:
    """Cuts and what they would take, named; or why no plan keeps to the limit."""
    options = {"num_microbatches": asked.num_microbatches, "measure": False}
    options |= asked.rates
    profile = jpipe.profile(asked.layers, asked.sample, **options)
    number = len(asked.layers)
    even = [number // count + (i < number % count) for i in range(count)]
    cuts = {"equal layers": even}
    if asked.published:
        cuts["torchgpipe's"] = asked.published
    cuts["jpipe.partition"] = jpipe.partition(
        profile,
        count,
        objective="step",
        num_microbatches=asked.num_microbatches,
        bandwidth=asked.bandwidth,
        schedule="1f1b",
    )
    options |= {
        "profile": profile,
        "num_devices": count,
        "data": 1,  # what differs is the cut
        "bandwidth": asked.bandwidth,
    }
    inputs = asked.layers, asked.sample, optax.adamw(1e-3)
    for name, cut in cuts.items():
        yield name, jpipe.plan(*inputs, schedules="1f1b", balance=cut, **options)
    try:
        yield "jpipe.plan", jpipe.plan(*inputs, memory_limit=limit, **options)
    except ValueError as error:
        yield "jpipe.plan", error


def main() -> None:
    """Prints a table, and draws the last plan."""
    parser = argparse.ArgumentParser(description="Plans a model.")
    parser.add_argument("--model", choices=["lm", *PUBLISHED], default="lm")
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[2, 4, 8], choices=[2, 4, 8]
    )
    parser.add_argument("--blocks", type=int, default=12, help="of the language model")
    parser.add_argument("--width", type=int, default=1024, help="of its activations")
    parser.add_argument("--words", type=int, default=50_000, help="that it knows")
    parser.add_argument("--memory", type=float, default=16, help="GiB of a device")
    parser.add_argument("--svg", type=Path, help="where to draw the last plan")
    given = parser.parse_args()

    limit = int(given.memory * GIB)
    lines, plan = [], None
    for count in track(given.devices, "planning"):
        asked = task(given, count)
        for name, made in plans(asked, count, limit):
            if isinstance(made, ValueError):
                lines.append(f"{count:7} | {name:15} | {made}")
                continue
            assert made.forecast is not None
            most = max(own.total for own in made.forecast.memory)
            over = ", too much" if most > limit else ""
            lines.append(
                f"{count:7} | {name:15} | {made.forecast.seconds:8.4f} s | "
                f"{most / GIB:5.1f} GiB{over} | {made.balance}, {made.schedule.name}"
            )
            plan = made
    print("devices | cut             | a step     | largest   | balance, schedule")
    print("\n".join(lines))
    print(plan)
    if given.svg and plan:
        given.svg.parent.mkdir(parents=True, exist_ok=True)
        given.svg.write_text(jpipe.draw.svg(plan, width=1100), "utf-8")


if __name__ == "__main__":
    main()

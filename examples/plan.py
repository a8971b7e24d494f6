"""Plans a language model for two, four and eight devices, without any of them.

Layers are estimated, not measured: nothing is compiled and nothing runs. It prints, for
each number of devices, what an equal cut under 1F1B would take and what the plan takes.

    python examples/plan.py
    python examples/plan.py --blocks 48 --memory 8 --svg plan.svg
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

GIB = 2**30
# An accelerator of 100 Tflop/s and 1 TB/s, and 50 GB/s between two of them.
SPEED = {"measure": False, "peak_flops": 1e14, "memory_bandwidth": 1e12}
BETWEEN = 5e10


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


def main() -> None:
    """Prints a table, and draws the plan for four devices."""
    parser = argparse.ArgumentParser(description="Plans a language model.")
    parser.add_argument("--blocks", type=int, default=12, help="how many it has")
    parser.add_argument("--width", type=int, default=1024, help="of its activations")
    parser.add_argument("--words", type=int, default=50_000, help="that it knows")
    parser.add_argument("--memory", type=float, default=16, help="GiB of a device")
    parser.add_argument("--svg", type=Path, help="where to draw the plan for four")
    given = parser.parse_args()

    blocks = [Block(given.width) for _ in range(given.blocks)]
    ends = nn.Embed(given.words, given.width), nn.Dense(given.words)
    layers = [ends[0], *blocks, ends[1]]
    tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)
    print("devices | equal layers, 1f1b | planned | balance, schedule")
    for count in (2, 4, 8):
        plan = jpipe.plan(
            layers,
            tokens,
            optax.adamw(1e-3),
            num_devices=count,
            num_microbatches=4 * count,
            memory_limit=int(given.memory * GIB),
            bandwidth=BETWEEN,
            **SPEED,
        )
        profile = jpipe.profile(layers, tokens, num_microbatches=4 * count, **SPEED)
        sizes = [len(layers) // count + (i < len(layers) % count) for i in range(count)]
        assert plan.forecast is not None
        costs = profile.costs(sizes, bandwidth=BETWEEN)
        equal = jpipe.schedules.one_f_one_b(count, 4 * count).simulate(costs)
        print(
            f"{count:7} | {equal.makespan * 1e3:15.1f} ms | "
            f"{plan.forecast.seconds * 1e3:4.1f} ms | {plan.balance}, "
            f"{plan.schedule.name}"
        )
        if given.svg and count == 4:
            given.svg.write_text(jpipe.draw.svg(plan, width=1100), "utf-8")
    print(plan)


if __name__ == "__main__":
    main()

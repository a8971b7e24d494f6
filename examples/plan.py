"""Plans a language model: where to cut it, and by which schedule to train it.

The layers are measured on the first device of this machine, or estimated from their
operations, in which case nothing is run. The devices that are planned for need not be
there. To plan a model of your own, put it in the place of `layers`, `tokens` and
`loss_fn`.

    python examples/plan.py
    python examples/plan.py --devices 4 --memory 8     # from the profile of before
    python examples/plan.py --estimate --devices 4 --out build/estimated

It writes ``profile.json``, which the next plan reads (delete it to measure again),
``plan.svg``, and ``plan.json``, from which any program builds the pipeline:
``jpipe.pipeline(layers, plan=jpipe.Plan.from_json(text))``.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

MICROBATCHES = 16
BANDWIDTH = 5e10  # bytes per second between two devices
# Operations and bytes of memory per second of an accelerator, for an estimate.
ACCELERATOR = {"measure": False, "peak_flops": 1e14, "memory_bandwidth": 1e12}


class Block(nn.Module):
    """A pre-norm Transformer block."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, time, width]`` to the same shape."""
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.width // 64)(h)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main() -> None:
    """Prints the profile and the plan, and writes both and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--devices", type=int, help="how many; default: those of this machine")
    add("--memory", type=float, default=16, help="GiB of a device")
    add("--estimate", action="store_true", help="run nothing")
    add("--blocks", type=int, default=12, help="of the language model")
    add("--width", type=int, default=1024, help="of its activations")
    add("--words", type=int, default=50_000, help="that it knows")
    add("--out", type=Path, default=Path("build/plan"), help="the folder of the files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    blocks = [Block(options.width) for _ in range(options.blocks)]
    embedding = nn.Embed(options.words, options.width)
    layers = [embedding, *blocks, nn.Dense(options.words)]
    tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)  # or an array
    job: dict[str, Any] = {"loss_fn": loss_fn, "targets": tokens}
    job["num_microbatches"] = MICROBATCHES

    path = options.out / "profile.json"
    if path.exists():
        profile = jpipe.Profile.from_json(path.read_text("utf-8"))
        print(f"read {path}")
    else:
        how: dict[str, Any] = ACCELERATOR if options.estimate else {}
        profile = jpipe.profile(layers, tokens, **job, **how)
        path.write_text(profile.to_json(), "utf-8")
        print(f"wrote {path}")
    print(profile)
    plan = jpipe.plan(
        layers,
        tokens,
        optax.adamw(1e-3),
        profile=profile,
        num_devices=options.devices,
        memory_limit=int(options.memory * 2**30),
        bandwidth=BANDWIDTH,
        **job,
    )
    print(plan)
    (options.out / "plan.json").write_text(plan.to_json(), "utf-8")
    picture = jpipe.draw.svg(plan, width=1100)
    (options.out / "plan.svg").write_text(picture, "utf-8")
    print(f"wrote {options.out}/plan.json and {options.out}/plan.svg")


if __name__ == "__main__":
    main()

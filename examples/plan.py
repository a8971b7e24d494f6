"""Plans a model from a shell: measures a profile, plans from it, draws the plan.

The profile is measured on the first device of this machine and saved; the next plan
reads it from its file: delete that to measure again. The devices that are planned for
need not be there.

    python examples/plan.py
    python examples/plan.py --devices 4 --memory 8 --schedules 1f1b zb_h1
    python examples/plan.py --estimate --devices 4 --out build/estimated

It writes ``profile.json``, ``plan.json`` and ``plan.svg``. A program then builds
``jpipe.pipeline(layers, plan=jpipe.Plan.from_json(text))``. To plan a model of your
own, copy this file and change `make_job`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jpipe

GIB = 2**30
# Operations and bytes of memory per second, and bytes per second between two devices:
# an accelerator of today.
ACCELERATOR = {"peak_flops": 1e14, "memory_bandwidth": 1e12}
BANDWIDTH = 5e10


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


class Job(NamedTuple):
    """A model and what it is trained with; arrays may be shapes and dtypes alone."""

    layers: list[Any]
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    tx: optax.GradientTransformation


def make_job(options: argparse.Namespace) -> Job:
    """The language model of the given size: yours in its place."""
    blocks = [Block(options.width) for _ in range(options.blocks)]
    embedding = nn.Embed(options.words, options.width)
    head = nn.Dense(options.words)
    tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)

    def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    return Job(
        layers=[embedding, *blocks, head],
        inputs=tokens,
        targets=tokens,
        loss_fn=loss_fn,
        tx=optax.adamw(1e-3),
    )


def read_or_make_profile(
    path: Path, job: Job, options: argparse.Namespace
) -> jpipe.Profile:
    """The saved profile; where there is none, a new one, which is saved."""
    if path.exists():
        print(f"read {path}")
        return jpipe.Profile.from_json(path.read_text("utf-8"))
    estimate: dict[str, Any] = {"measure": False, **ACCELERATOR}
    profile = jpipe.profile(
        job.layers,
        job.inputs,
        num_microbatches=options.microbatches,
        loss=job.loss_fn,
        targets=job.targets,
        **(estimate if options.estimate else {}),
    )
    write(path, profile.to_json())
    return profile


def write(path: Path, text: str) -> None:
    """Writes a file and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    print(f"wrote {path}")


def main() -> None:
    """Prints the profile and the plan, and writes both and a picture."""
    parser = argparse.ArgumentParser(description="Plans a model.")
    parser.add_argument(
        "--devices", type=int, help="how many; default: those of this machine"
    )
    parser.add_argument("--memory", type=float, default=16, help="GiB of a device")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=BANDWIDTH,
        help="bytes per second between two devices",
    )
    parser.add_argument(
        "--microbatches", type=int, default=16, help="number per mini-batch"
    )
    parser.add_argument(
        "--schedules", nargs="+", help="to choose from; default: all that jpipe has"
    )
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="take the times of layers from their operations: nothing is run",
    )
    parser.add_argument("--blocks", type=int, default=12, help="of the language model")
    parser.add_argument("--width", type=int, default=1024, help="of its activations")
    parser.add_argument("--words", type=int, default=50_000, help="that it knows")
    parser.add_argument(
        "--out", type=Path, default=Path("build/plan"), help="the folder of the files"
    )
    options = parser.parse_args()

    job = make_job(options)
    profile = read_or_make_profile(options.out / "profile.json", job, options)
    print(profile)
    plan = jpipe.plan(
        job.layers,
        job.inputs,
        job.tx,
        loss=job.loss_fn,
        targets=job.targets,
        profile=profile,
        num_devices=options.devices,
        num_microbatches=options.microbatches,
        memory_limit=int(options.memory * GIB),
        bandwidth=options.bandwidth,
        schedules=options.schedules,
    )
    print(plan)
    write(options.out / "plan.json", plan.to_json())
    write(options.out / "plan.svg", jpipe.draw.svg(plan, width=1100))


if __name__ == "__main__":
    main()

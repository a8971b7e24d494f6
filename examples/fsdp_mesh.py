"""Trains on a mesh of two stages with four devices each, whose parameters are sharded.

The axis `stage` is the pipeline. Along `data` each device takes a part of the examples
of every micro-batch, and `sharding=` cuts the parameters and the optimizer's state of a
stage among its devices, as FSDP does. The same model is trained with whole parameters
on each device, and on one device; the three losses are equal, the bytes are not.

    python examples/fsdp_mesh.py
"""

import argparse
import sys
from typing import Any

import jax
import optax
from arrays import count_bytes
from jax.sharding import PartitionSpec
from stdlib_text import VOCAB_SIZE, random_batches, read_corpus
from transformer import balance, transformer

import jpipe

STAGES, SHARDS, MICROBATCHES = 2, 4, 2
CONTEXT, WIDTH, DEPTH, BATCH_SIZE = 32, 128, 4, 32


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over all tokens, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def shard(path: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> PartitionSpec | None:
    """Cuts every parameter along its largest axis that the devices divide.

    Args:
      path: names such as ``(1, "Dense_0", "kernel")``, from the layer's number on.
      spec: the shape and dtype.
    """
    axes = [axis for axis, size in enumerate(spec.shape) if size % SHARDS == 0]
    if not axes:
        return None
    largest = max(axes, key=lambda axis: spec.shape[axis])
    return PartitionSpec(*[None] * largest, "data")


def main() -> int:
    """Trains in three ways and compares them; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    steps = parser.parse_args().steps
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES * SHARDS)
    if len(jax.devices()) < STAGES * SHARDS:
        sys.exit(
            f"this program needs {STAGES * SHARDS} devices; for those of the CPU "
            "set JAX_PLATFORMS=cpu"
        )
    mesh = jax.make_mesh((STAGES, SHARDS), ("stage", "data"))
    layers = transformer(VOCAB_SIZE, WIDTH, DEPTH, 4)
    stages = {"balance": balance(DEPTH, STAGES), "mesh": mesh}
    pipes = {
        # As many parts of a batch as there are micro-batches and shards together.
        "one device": jpipe.sequential(layers, MICROBATCHES * SHARDS),
        "whole parameters": jpipe.pipeline(layers, MICROBATCHES, **stages),
        "sharded parameters": jpipe.pipeline(
            layers, MICROBATCHES, **stages, sharding=shard
        ),
    }
    tx = optax.adamw(3e-3)
    losses = []
    shown = ""
    for name, pipe in pipes.items():
        batches = random_batches(read_corpus().training, BATCH_SIZE, CONTEXT, seed=0)
        x, targets = next(batches)
        state = pipe.init_train_state(jax.random.key(0), x, tx)
        step = pipe.train_step(loss_fn, tx)
        print(f"{name}: compiles and trains", flush=True)
        metrics = {}
        for _ in range(steps):
            state, metrics = step(state, x, targets)
            x, targets = next(batches)
        losses.append(float(metrics["loss"]))
        size = max(count_bytes((state.params, state.opt_state)).values())
        print(f"  loss {losses[-1]:.6f}, at most {size / 2**20:.2f} MiB on a device")
        shown = str(step)  # of the last one: sharded parameters
    print(shown)
    difference = max(losses) - min(losses)
    print(f"losses differ by at most {difference:.1e}")
    return 0 if difference < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())

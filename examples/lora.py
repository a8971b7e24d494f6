"""Adapts a trained network to new data through adapters of low rank (LoRA).

A network learns handwritten digits. Then it is shown the same digits upside down, and
only its adapters learn, a few percent of its parameters: the rest has no gradient, no
sum of gradients, no optimizer state, and keeps nothing for a backward. The same is
done with all parameters, for comparison.

    python examples/lora.py
"""

import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jpipe

WIDTH, RANK, BLOCKS = 256, 4, 6
BATCH_SIZE, NUM_TRAINING = 256, 1437
PRETRAINED = nnx.Not(nnx.LoRAParam)


class Block(nnx.Module):
    """A two-layer perceptron beside the residual stream, with adapters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.LoRALinear(WIDTH, 2 * WIDTH, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(2 * WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, WIDTH]`` to the same shape."""
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Trained(NamedTuple):
    """What training gave, and what it took."""

    variables: Any
    num_trained: int
    held: int
    seconds: float


def network() -> list[nnx.Module]:
    """The layers, from pixels to logits."""
    rngs = nnx.Rngs(0)
    blocks = [Block(rngs) for _ in range(BLOCKS)]
    return [nnx.Linear(64, WIDTH, rngs=rngs), *blocks, nnx.Linear(WIDTH, 10, rngs=rngs)]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over the examples."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(pipe, variables, x, labels, trainable, steps: int) -> Trained:
    """Trains some of the parameters from given ones."""
    tx = optax.adamw(3e-3)
    start = {"variables": variables, "trainable": trainable}
    state = pipe.init_train_state(jax.random.key(0), x[:BATCH_SIZE], tx, **start)
    step = pipe.train_step(cross_entropy, tx, trainable=trainable)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(steps):
        rows = rng.integers(len(x), size=BATCH_SIZE)
        begin = time.perf_counter()
        state, metrics = step(state, x[rows], labels[rows])
        metrics["loss"].block_until_ready()
        seconds.append(time.perf_counter() - begin)
    # What a step holds, and beside it what the optimizer remembers.
    held = sum(most for _, most in pipe.plan.peak_bytes)
    held += sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    num_trained = sum(stage.num_trained for stage in pipe.plan.stages)
    median = statistics.median(seconds[1:])
    return Trained(state.variables, num_trained, held, median)


def main() -> None:
    """Trains on digits, then on what is new of them in two ways, and compares."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 4)
    devices = (4 * jax.devices())[:4]  # where there are fewer, stages share them
    pipe = jpipe.pipeline(network(), 4, balance=[2] * 4, devices=devices, remat="none")
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    rows = np.random.default_rng(0).permutation(len(labels))
    upright, labels = pixels[rows].astype(np.float32) / 16, labels[rows]
    turned = upright[:, ::-1]
    learn, test = slice(NUM_TRAINING), slice(NUM_TRAINING, None)

    def accuracy(variables: Any, x: np.ndarray) -> str:
        guesses = np.argmax(pipe.apply(variables, x[test]), axis=-1)
        return f"{np.mean(guesses == labels[test]):.1%}"

    made = pipe.init(jax.random.key(0), upright)
    first = train(pipe, made, upright[learn], labels[learn], PRETRAINED, 60)
    print(f"pretrained: {accuracy(first.variables, upright)} of unseen digits,")
    print(f"            {accuracy(first.variables, turned)} of them upside down")

    ends = {}
    for name, trainable in [("all", None), ("adapters", nnx.LoRAParam)]:
        given = first.variables, turned[learn], labels[learn]
        ends[name] = end = train(pipe, *given, trainable, 60)
        print(
            f"{name + ':':<12}{accuracy(end.variables, turned)} of them, "
            f"{end.num_trained:,} parameters trained, {end.held / 2**20:.0f} MiB held, "
            f"{end.seconds * 1e3:.0f} ms per step"
        )
    all_of_it, adapters = ends["all"], ends["adapters"]
    print(
        f"adapters take {adapters.held / all_of_it.held:.0%} of the memory and "
        f"{adapters.seconds / all_of_it.seconds:.0%} of the time"
    )


if __name__ == "__main__":
    main()

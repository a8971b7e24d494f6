"""A language model whose first and last stage share one table of embeddings.

It reads single lines of the Python standard library's source, which differ in length:
they are padded, and the loss is a mean over the bytes that are there, whatever the
micro-batches (`reduction="weighted"`). Adam is clipped by the norm of all gradients,
in which the shared table counts once.

    python examples/tied_lm.py
    python examples/tied_lm.py --steps 100 --schedule zb_v
"""

import argparse
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.progress import track
from stdlib_text import VOCAB_SIZE, read_corpus
from transformer import Block

import jpipe

STAGES, LENGTH, NEWLINE = 4, 64, ord("\n")


class Position(nn.Module):
    """Adds where each token stands."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps vectors ``[batch, length, width]`` to the same shape."""
        return x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])


def language_model(width: int, blocks: int) -> list[object]:
    """The layers; the first and the last are two uses of one module."""
    embed = nn.Embed(VOCAB_SIZE, width, embedding_init=nn.initializers.normal(0.1))
    middle = [Block(num_heads=4) for _ in range(blocks)]
    head = jpipe.layer(embed, method="attend")
    return [embed, Position(), *middle, nn.LayerNorm(), head]


def lines_of(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lines of 20 bytes or more, padded to ``[lines, LENGTH + 1]``, and lengths."""
    ends = np.flatnonzero(text == NEWLINE) + 1
    lines = [line[: LENGTH + 1] for line in np.split(text, ends) if len(line) >= 20]
    padded = np.zeros((len(lines), LENGTH + 1), np.int32)
    for row, line in zip(padded, lines, strict=True):
        row[: len(line)] = line
    return padded, np.array([len(line) for line in lines])


def batch_of(
    lines: np.ndarray, lengths: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What the model reads, and what follows each byte and whether it is there."""
    mask = np.arange(1, LENGTH + 1) < lengths[rows, None]
    targets = {"bytes": lines[rows, 1:], "mask": mask.astype(np.float32)}
    return lines[rows, :-1], targets


def masked_loss(logits: jax.Array, targets: Mapping[str, Any]):
    """The sum over the bytes that are there, and their number."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets["bytes"])
    return (losses * targets["mask"]).sum(), targets["mask"].sum()


def main() -> None:
    """Trains, evaluates, and compares a step with the same model on one device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch-size", type=int, default=64, help="lines per step")
    add("--microbatches", type=int, default=8, help="pieces of a batch")
    add("--width", type=int, default=96, help="size of a vector; 4 divides it")
    add("--blocks", type=int, default=4, help="Transformer blocks; 2 or more")
    add("--schedule", default="1f1b", help=f"of {', '.join(jpipe.schedules.BY_NAME)}")
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", STAGES)
    layers = language_model(options.width, options.blocks)
    inner = options.blocks // 2
    balance = [2, inner, options.blocks - inner, 2]
    build = jpipe.schedules.named(options.schedule)
    ranks = next(n for n in (4, 2) if build(n, options.microbatches).num_stages == 4)
    # Where there are fewer devices than ranks, ranks share them.
    devices = (ranks * jax.devices())[:ranks]
    pipe = jpipe.pipeline(
        layers, options.microbatches, balance=balance, devices=devices, schedule=build
    )
    corpus = read_corpus()
    lines, lengths = lines_of(corpus.training)
    rng = np.random.default_rng(0)

    def draw() -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows = rng.integers(len(lines), size=options.batch_size)
        return batch_of(lines, lengths, rows)

    x, targets = draw()
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 30, max(options.steps, 31))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(masked_loss, tx, reduction="weighted")
    print(pipe)
    for number in track(range(options.steps), "training"):
        state, metrics = step(state, *draw())
        if number % 50 == 0:
            print(
                f"step {number}: {float(metrics['loss']) / np.log(2):.2f} bits per byte"
            )

    held_back = batch_of(*lines_of(corpus.held_back), np.arange(options.batch_size * 4))
    total, count = masked_loss(pipe.apply(state.variables, held_back[0]), held_back[1])
    table, last = state.params[0]["embedding"], pipe.devices[-1]
    print(f"held back: {float(total / count) / np.log(2):.2f} bits per byte")
    print(f"one table of {table.shape} on {table.device}, used on {last} too")

    twin = jpipe.sequential(layers, options.microbatches)
    difference = largest_difference(pipe, twin, state.variables, x, targets)
    print(f"gradients of one step differ from one device by at most {difference:.1e}")


def largest_difference(pipe, twin, variables, x, targets) -> float:
    """Between the gradients of two pipelines of the same layers."""
    sides = []
    for side in (pipe, twin):
        gradient = side.value_and_grad(masked_loss, reduction="weighted")
        _, grads = gradient(side.place(variables), x, targets)
        sides.append(jax.tree.leaves(jax.tree.map(np.asarray, grads)))
    pairs = zip(*sides, strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


if __name__ == "__main__":
    main()

"""Trains a small convolutional network on images of digits, in four stages.

The images are the 1,797 scanned digits that come with scikit-learn. The exit status
is 1 if the network names fewer than 95 % of the ones that it has not seen.

    python examples/digits.py
"""

import sys
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.progress import track
from sklearn.datasets import load_digits

import jpipe

NUM_TRAINING = 1437
EPOCHS = 15
BATCH_SIZE = 64
ENOUGH = 0.95


def main() -> int:
    """Trains and tests; returns the exit status."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 4)
    pipe = jpipe.pipeline(
        convolutional_network(),
        num_microbatches=8,
        balance=[2, 3, 2, 2],
        devices=(4 * jax.devices())[:4],  # with fewer, stages share them
    )
    x, x_test, labels, labels_test = read_digits()
    tx = optax.adamw(1e-3)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(cross_entropy, tx)
    report = step.check(state, x[:24], labels[:24])
    report.raise_if_different()  # micro-batches give what one batch gives
    print(pipe, report, sep="\n\n", end="\n\n", flush=True)

    losses = []
    for epoch in track(range(EPOCHS), "training"):
        for rows in shuffled_batches(len(x), seed=epoch):
            state, metrics = step(state, x[rows], labels[rows])
            losses.append(metrics["loss"])
        # Steps return when they are dispatched; let the bar show what is done.
        losses[-1].block_until_ready()

    guesses = np.argmax(pipe.apply(state.variables, x_test), axis=-1)
    accuracy = np.mean(guesses == labels_test)
    print(f"\nloss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
    print(f"accuracy {accuracy:.1%} on {len(x_test)} images that it has not seen")
    return 0 if accuracy >= ENOUGH else 1


def convolutional_network() -> list:
    """Layers from images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
    return [
        nn.Conv(32, (3, 3)),
        nn.relu,
        nn.Conv(64, (3, 3)),
        nn.relu,
        partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)),
        nn.Conv(64, (3, 3)),
        nn.relu,
        flatten,
        nn.Dense(10),
    ]


def flatten(x: jax.Array) -> jax.Array:
    """Makes one vector of each image."""
    return x.reshape(len(x), -1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def read_digits() -> list[np.ndarray]:
    """Images in [0, 1] and labels in random order, a fifth of them to test.

    Returns:
      x, x_test, labels, labels_test.
    """
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    rows = np.random.default_rng(0).permutation(len(labels))
    x = pixels[rows].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return [*np.split(x, [NUM_TRAINING]), *np.split(labels[rows], [NUM_TRAINING])]


def shuffled_batches(number: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers in random order, in whole batches."""
    rows = np.random.default_rng(seed).permutation(number)
    for start in range(0, number - BATCH_SIZE + 1, BATCH_SIZE):
        yield rows[start : start + BATCH_SIZE]


if __name__ == "__main__":
    sys.exit(main())

"""Trains in half precision, with a loss scale that finds its own size.

The layers compute in bfloat16; parameters are float32, and so are the gradients that
add up over micro-batches. The loss is multiplied by a scale, so that small gradients
do not vanish in half precision, and the gradients are divided by it again. Where one
of them is not finite, on any stage, the step changes nothing and the scale is halved;
after fifty good steps it is doubled. The scale is part of the optimizer's state: no
step waits for it.

bfloat16 has the range of float32 and rarely overflows; with ``--dtype=float16`` the
scale finds its limit. One batch is spoiled on purpose, so that its step is skipped.

    python examples/mixed_precision.py
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jpipe

STEPS = 400
SPOILED = 130
PATIENCE = 50
BATCH_SIZE = 64
NUM_TRAINING = 1437


class Scaled(NamedTuple):
    """The state of `scaled`: the scale, good steps in a row, what is inside."""

    scale: jax.Array
    good: jax.Array
    inner: Any


def main() -> None:
    """Trains, shows the scale over time, and tests."""
    options = parse()
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", 3)
    pipe = jpipe.pipeline(
        network(jnp.dtype(options.dtype)),
        num_microbatches=4,
        balance=[2, 2, 1],
        devices=(3 * jax.devices())[:3],  # with fewer, stages share them
    )
    tx = scaled(optax.adamw(2e-3), options.scale)
    rng = np.random.default_rng(0)
    x, x_test, labels, labels_test = read_digits(rng)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(scaled_cross_entropy, tx)

    scales, skipped = [], []
    for number in range(STEPS):
        rows = rng.integers(len(x), size=BATCH_SIZE)
        images = x[rows] * (1e38 if number == SPOILED else 1)
        # A step overwrites its state: what is to be kept is copied.
        scales.append(jnp.copy(state.opt_state.scale))
        # One for each image, as the targets are split into micro-batches.
        each = jnp.full(BATCH_SIZE, scales[-1])
        state, _ = step(state, images, (labels[rows], each))
        skipped.append(jnp.copy(~state.opt_state.inner.last_finite))

    show(np.array(scales), np.array(skipped))
    guesses = np.argmax(pipe.apply(state.variables, x_test), axis=-1)
    print(f"{int(state.opt_state.inner.total_notfinite)} of {STEPS} steps skipped")
    print(f"accuracy {np.mean(guesses == labels_test):.1%} on {len(x_test)} new images")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains digits in half precision.")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="in which the layers compute; parameters are float32 (bfloat16)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=2.0**15,
        help="by which the loss is multiplied at first (32768)",
    )
    return parser.parse_args()


def network(dtype: Any) -> list:
    """Layers from 64 pixels to logits, which compute in a dtype of their own."""
    return [
        nn.Dense(128, dtype=dtype),
        nn.relu,
        nn.Dense(128, dtype=dtype),
        nn.relu,
        nn.Dense(10, dtype=dtype),
    ]


def scaled_cross_entropy(logits: jax.Array, targets: Any) -> jax.Array:
    """The mean over images, in float32, times the scale."""
    labels, scales = targets
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return jnp.mean(losses * scales)


def scaled(
    inner: optax.GradientTransformation, scale: float
) -> optax.GradientTransformation:
    """An optimizer for gradients of a loss that was multiplied by ``state.scale``."""
    # It looks at the gradients of all stages; only flags move between devices.
    guarded = optax.apply_if_finite(inner, max_consecutive_errors=STEPS)

    def init(params: Any) -> Scaled:
        return Scaled(jnp.float32(scale), jnp.int32(0), guarded.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Scaled]:
        updates = jax.tree.map(lambda grad: grad / state.scale, updates)
        inside: Any
        updates, inside = guarded.update(updates, state.inner, params)
        finite = inside.last_finite
        good = jnp.where(finite, state.good + 1, 0)
        grown = jnp.where(good == PATIENCE, 2 * state.scale, state.scale)
        new_scale = jnp.where(finite, grown, state.scale / 2)
        return updates, Scaled(new_scale, good % PATIENCE, inside)

    return optax.GradientTransformation(init, update)


def read_digits(rng: np.random.Generator) -> list[np.ndarray]:
    """Scikit-learn's digits in random order: x, x_test, labels, labels_test."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    rows = rng.permutation(len(labels))
    x = pixels[rows].astype(np.float32) / 16
    return [*np.split(x, [NUM_TRAINING]), *np.split(labels[rows], [NUM_TRAINING])]


def show(scales: np.ndarray, skipped: np.ndarray) -> None:
    """Prints the scale where it changes, and the steps that were skipped."""
    for number, scale in enumerate(scales):
        note = ": not finite, skipped" if skipped[number] else ""
        if note or number == 0 or scale != scales[number - 1]:
            print(f"step {number:3}: scale 2^{np.log2(scale):.0f}{note}")


if __name__ == "__main__":
    main()

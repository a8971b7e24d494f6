"""Trains in bfloat16: layers compute in it, parameters and their updates are float32.

`dtype=` of a Flax layer is what it computes in. Its parameters stay float32, and so do
their gradients, which add up over micro-batches, and Adam's averages. bfloat16 has the
range of float32: no loss scale is needed. Should a batch overflow all the same,
`skip_nonfinite` skips its step on all stages; here one is spoiled on purpose.

    python examples/mixed_precision.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import flatten, read_digits
from flax import linen as nn

import jpipe

STAGES, STEPS, SPOILED, BATCH_SIZE = 3, 400, 130, 64


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, in float32: bfloat16 has three digits."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    """Trains and tests."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    first, second, last = (nn.Dense(n, dtype=jnp.bfloat16) for n in (128, 128, 10))
    pipe = jpipe.pipeline(
        [flatten, first, nn.relu, second, nn.relu, last],
        num_microbatches=4,
        balance=[3, 2, 1],
        devices=(STAGES * jax.devices())[:STAGES],  # with fewer, stages share them
    )
    x, x_test, labels, labels_test = read_digits()
    tx = optax.adamw(2e-3)
    state = pipe.init_train_state(jax.random.key(0), x[:BATCH_SIZE], tx)
    step = pipe.train_step(loss_fn, tx, skip_nonfinite=True)
    num_skipped = 0
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        rows = rng.integers(len(x), size=BATCH_SIZE)
        images = x[rows] * np.float32(np.nan if number == SPOILED else 1)
        state, metrics = step(state, images, labels[rows])
        num_skipped += metrics["skipped"]
        if number % 100 == 0:
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)

    guesses = np.argmax(pipe.apply(state.variables, x_test), axis=-1)
    print(f"{int(num_skipped)} of {STEPS} steps skipped")
    print(f"accuracy {np.mean(guesses == labels_test):.1%} on {len(x_test)} new images")


if __name__ == "__main__":
    main()

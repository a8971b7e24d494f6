"""Trains a Vision Transformer in bfloat16 on images of digits, in four stages.

The blocks compute in bfloat16. Parameters, gradients and the optimizer are float32, and
so are norms' statistics, the softmax of attention and the loss, where bfloat16 has too
few digits. bfloat16 has the range of float32: no loss scale is needed. The images are
the 1,797 scanned digits that come with scikit-learn.

    python examples/vit.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import read_digits, shuffled_batches
from flax import linen as nn

import jpipe

STAGES, PATCH, WIDTH, HEADS, BLOCKS = 4, 2, 64, 4, 4
DTYPE = jnp.bfloat16


class Block(nn.Module):
    """Attention between all patches, and a perceptron."""

    @nn.compact
    def __call__(self, x, train=False):
        """Maps ``[batch, patches, width]`` to the same shape."""
        drop = nn.Dropout(0.1, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            HEADS, dtype=DTYPE, force_fp32_for_softmax=True
        )
        x = x + drop(attention(nn.LayerNorm(dtype=DTYPE)(x)))
        h = nn.Dense(4 * WIDTH, dtype=DTYPE)(nn.LayerNorm(dtype=DTYPE)(x))
        return x + drop(nn.Dense(WIDTH, dtype=DTYPE)(nn.gelu(h)))


class VisionTransformer(nn.Module):
    """Images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""

    @nn.compact
    def __call__(self, images, train=False):
        """Cuts images in patches, mixes them, and names the digit by their mean."""
        patch = (PATCH, PATCH)
        x = nn.Conv(WIDTH, patch, strides=patch, dtype=DTYPE, name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + positions.astype(DTYPE)
        for _ in range(BLOCKS):
            x = Block()(x, train)
        x = nn.LayerNorm(dtype=DTYPE)(x).mean(axis=1)
        return nn.Dense(10, name="head")(x.astype(jnp.float32))


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over images, with labels that are smoothed a little."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def main() -> None:
    """Trains and tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=15, help="times over all images")
    epochs = parser.parse_args().epochs
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    devices = (STAGES * jax.devices())[:STAGES]  # with fewer, stages share them
    pipe = jpipe.pipeline(VisionTransformer(), 4, num_stages=STAGES, devices=devices)
    x, x_test, labels, labels_test = read_digits()
    rate = optax.cosine_decay_schedule(3e-3, max(epochs, 1) * 22)
    tx = optax.adamw(rate, weight_decay=0.05)
    state = pipe.init_train_state(jax.random.key(0), x[:64], tx)
    print(pipe, flush=True)
    leaf_dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)}
    print(f"compute in {jnp.dtype(DTYPE)}, parameters in {', '.join(leaf_dtypes)}")

    step = pipe.train_step(loss_fn, tx)
    for epoch in range(epochs):
        losses = []
        for rows in shuffled_batches(len(x), seed=epoch):
            state, metrics = step(state, x[rows], labels[rows])
            losses.append(metrics["loss"])
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}", flush=True)
    guesses = np.argmax(pipe.apply(state.variables, x_test), axis=-1)
    accuracy = np.mean(guesses == labels_test)
    print(f"accuracy {accuracy:.1%} on {len(x_test)} images that it has not seen")


if __name__ == "__main__":
    main()

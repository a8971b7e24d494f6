"""Trains a U-Net to take noise out of photographs, in four stages.

The images are patches of the two photographs that come with scikit-learn; the lowest
third of these is held back. What a level of the encoder sees at its resolution goes to
the decoder by `jpipe.stash` and `jpipe.pop`: straight from stage to stage, past those
between.

    python examples/unet.py
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_sample_images

import jpipe

STAGES, LEVELS, NOISE = 4, 3, 0.15
HELD_BACK_ROWS = 144  # of the 427 rows of a photograph
BATCH_SIZE, PATCH = 8, 32


class Convolutions(nn.Module):
    """Two convolutions that keep the resolution, with ``width`` channels."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to as many, with other channels."""
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        return nn.relu(nn.Conv(self.width, (3, 3))(x))


class Down(nn.Module):
    """A level of the encoder: stashes what it sees, halves the resolution."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to half the height and width."""
        x = Convolutions(self.width)(x)
        jpipe.stash("detail", x)
        return nn.avg_pool(x, (2, 2), strides=(2, 2))


class Up(nn.Module):
    """A level of the decoder: doubles the resolution, pops what was stashed."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to twice the height and width."""
        x = nn.ConvTranspose(self.width, (2, 2), strides=(2, 2))(x)
        x = jnp.concatenate([x, jpipe.pop("detail")], axis=-1)
        return Convolutions(self.width)(x)


def keep_image(x: jax.Array) -> jax.Array:
    """Stashes the noisy image for `remove_noise`."""
    jpipe.stash("image", x)
    return x


def remove_noise(noise: jax.Array) -> jax.Array:
    """The image without the noise that the network found: the easier thing to learn."""
    return jpipe.pop("image") - noise


def unet(width: int) -> list[Any]:
    """Layers from noisy images to clean ones, ``[batch, height, width, 3]``.

    Args:
      width: channels at full resolution; each level below has twice as many.
    """
    widths = [width * 2**level for level in range(LEVELS)]
    # The blocks of a level share a namespace, else all would stash the same "detail".
    down = [jpipe.isolate(Down(widths[n]), n) for n in range(LEVELS)]
    up = [jpipe.isolate(Up(widths[n]), n) for n in reversed(range(LEVELS))]
    noise = nn.Conv(3, (3, 3), kernel_init=nn.initializers.zeros)  # at first none
    return [keep_image, *down, Convolutions(2 * widths[-1]), *up, noise, remove_noise]


def mean_square(images: jax.Array, clean: jax.Array) -> jax.Array:
    """The mean over all numbers of the images."""
    return jnp.mean((images - clean) ** 2)


def make_batches(photos: list[np.ndarray], seed: int) -> Iterator[Any]:
    """Random patches without end, with noise and without."""
    rng = np.random.default_rng(seed)
    while True:
        patches = []
        for index in rng.integers(len(photos), size=BATCH_SIZE):
            photo = photos[index]
            row = rng.integers(photo.shape[0] - PATCH + 1)
            column = rng.integers(photo.shape[1] - PATCH + 1)
            patches.append(photo[row : row + PATCH, column : column + PATCH])
        clean = np.stack(patches)
        yield clean + NOISE * rng.standard_normal(clean.shape, np.float32), clean


def main() -> None:
    """Trains and judges."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--width", type=int, default=16, help="channels at the top")
    options = parser.parse_args()
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", STAGES)
    devices = (STAGES * jax.devices())[:STAGES]  # with fewer, stages share them
    photos = [photo.astype(np.float32) / 255 for photo in load_sample_images().images]
    batches = make_batches([photo[:-HELD_BACK_ROWS] for photo in photos], seed=0)
    layers = unet(options.width)
    pipe = jpipe.pipeline(layers, 4, balance=[2, 2, 3, 3], devices=devices)
    # The rate falls to nothing, so that the last weights are good ones.
    tx = optax.adam(optax.cosine_decay_schedule(4e-3, options.steps))
    state = pipe.init_train_state(jax.random.key(0), next(batches)[0], tx)
    step = pipe.train_step(mean_square, tx)
    print(pipe, flush=True)
    for number in range(1, options.steps + 1):
        state, metrics = step(state, *next(batches))
        if number % 100 == 0 or number == options.steps:
            print(f"step {number}: error {float(metrics['loss']):.5f}", flush=True)

    held_back = make_batches([photo[-HELD_BACK_ROWS:] for photo in photos], seed=1)
    error = pipe.jit(mean_square)
    errors = []
    for _ in range(8):
        noisy, clean = next(held_back)
        denoised = pipe.apply(state.variables, noisy)
        errors.append([error(noisy, clean), error(denoised, clean)])
    before, after = np.mean(errors, axis=0)
    print(f"error on patches that were held back: {before:.5f}, denoised {after:.5f}")


if __name__ == "__main__":
    main()

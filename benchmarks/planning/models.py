"""Ten small models whose layers differ in ten ways."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ..models.amoebanet import amoebanetd
from ..models.block import Block
from ..models.unet import unet

Model = tuple[list[Any], jax.Array]


class Perceptron(nn.Module):
    """A residual block of two products with gelu between them."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, width]`` to the same."""
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.width)(x)))


class Convolution(nn.Module):
    """A convolution with a norm."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, height, width, channels]`` to another size and channels."""
        x = nn.Conv(self.features, (3, 3), (self.stride, self.stride))(x)
        return nn.relu(nn.GroupNorm(8)(x))


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Float ``[batch, height, width, channels]`` to another size and channels."""
        h = x
        for stride in (self.stride, 1):
            h = nn.Conv(self.features, (3, 3), (stride, stride), use_bias=False)(h)
            h = nn.relu(nn.BatchNorm(not train)(h))
        one = (self.stride, self.stride)
        return h + nn.Conv(self.features, (1, 1), one, use_bias=False)(x)


def _vectors(batch: int, width: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, width))


def _images(batch: int, size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, size, size, 3))


def _tokens(batch: int, time: int, words: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, words, (batch, time)))


MODELS: dict[str, Callable[[], Model]] = {
    "equal blocks": lambda: (
        [Block(128, 4) for _ in range(8)],
        jax.random.normal(jax.random.key(1), (16, 64, 128)),
    ),
    "growing widths": lambda: (
        [nn.Sequential([nn.Dense(2**i), jnp.tanh]) for i in range(4, 12)],
        _vectors(1024, 64),
    ),
    "falling images": lambda: (
        [
            Convolution(16),
            *[Convolution(16 * 2**i, 2 - i % 2) for i in range(1, 5)],
            lambda x: x.mean((1, 2)),
            nn.Dense(10),
        ],
        _images(32, 32),
    ),
    "U-Net": lambda: (unet(2, 16, depth=2), _images(32, 32)),
    "large vocabulary": lambda: (
        [nn.Embed(4096, 128), *[Block(128, 4) for _ in range(4)], nn.Dense(4096)],
        _tokens(16, 32, 4096),
    ),
    "ResNet": lambda: (
        [
            Convolution(16),
            *[Residual(16 * 2 ** (i // 2), 2 - i % 2) for i in range(8)],
            lambda x: x.mean((1, 2)),
            nn.Dense(10),
        ],
        _images(32, 32),
    ),
    "AmoebaNet-D": lambda: (amoebanetd(10, 3, 32), _images(32, 32)),
    "one giant layer": lambda: (
        [Perceptron(w) for w in (256, 256, 256, 8192, 256, 256, 256)],
        _vectors(1024, 256),
    ),
    "many tiny layers": lambda: (
        [nn.Sequential([nn.Dense(32), jnp.tanh]) for _ in range(16)],
        _vectors(64, 32),
    ),
    "recurrent": lambda: (
        [nn.RNN(nn.OptimizedLSTMCell(64)) for _ in range(6)],
        jax.random.normal(jax.random.key(1), (32, 32, 64)),
    ),
}

"""ResNet-101, as the 370 layers that the published balances count.

A bottleneck is eleven layers here, not one, so that a pipeline may be cut inside of it:
its shortcut is stashed before the first convolution and popped after the last, and goes
straight to wherever that is. Every number is that of torchvision's model: 44,549,160
parameters for 1000 classes, with the stride on the 3x3 convolution.

References:
  He et al., `Deep Residual Learning for Image Recognition
  <https://arxiv.org/abs/1512.03385>`_ (2015).
  Kim et al., `torchgpipe <https://arxiv.org/abs/2004.09910>`_ (2020), who published
  the balances.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

import jpipe

# A bottleneck makes four times as many channels as its convolutions work in.
EXPANSION = 4
# Of He et al., `Delving Deep into Rectifiers <https://arxiv.org/abs/1502.01852>`_.
HE_NORMAL = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
# Uniform within 1 / sqrt(fan_in): what PyTorch gives a layer that was told nothing.
TORCH_UNIFORM = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def resnet101(
    num_classes: int = 1000,
    *,
    width: int = 64,
    blocks: Sequence[int] = (3, 4, 23, 3),
    dtype: Any = None,
) -> list[Any]:
    """Layers from images ``[batch, height, width, 3]`` to ``[batch, num_classes]``.

    The layers are 4 of the stem, 11 per bottleneck and 3 of the head; no two are one
    object but functions, which hold nothing.

    Args:
      num_classes: the number of classes.
      width: channels of the stem and of the convolutions of the first group; each
        group doubles them.
      blocks: the number of bottlenecks in each group; all groups but the first halve
        height and width.
      dtype: of the computation, such as ``jnp.bfloat16``; parameters and running
        statistics stay float32. ``None``: that of images and parameters.
    """
    layers = [_conv(width, 7, 2, dtype), norm(dtype), nn.relu, max_pool]
    for group, count in enumerate(blocks):
        for number in range(count):
            layers += _bottleneck(
                width * 2**group,
                stride=2 if group and not number else 1,
                projected=not number,
                name=f"layer{group + 1}_{number}",
                dtype=dtype,
            )
    features = EXPANSION * width * 2 ** (len(blocks) - 1)
    return [*layers, average_pool, flatten, linear(num_classes, features, dtype)]


def _bottleneck(
    width: int, *, stride: int, projected: bool, name: str, dtype: Any
) -> list[Any]:
    """Eleven layers that keep their input, transform it and add what they kept.

    Args:
      width: channels of the 3x3 convolution.
      stride: that of the 3x3 convolution and of the projection.
      projected: whether the shortcut has other channels than the sum and needs a
        projection.
      name: the namespace of the shortcut.
      dtype: of the computation.
    """
    projection = EXPANSION * width if projected else None
    return [
        jpipe.isolate(identity, name),
        *(_conv(width, 1, 1, dtype), norm(dtype), nn.relu),
        *(_conv(width, 3, stride, dtype), norm(dtype), nn.relu),
        *(_conv(EXPANSION * width, 1, 1, dtype), norm(dtype)),
        jpipe.isolate(Residual(projection, stride, dtype), name),
        nn.relu,
    ]


def identity(x: jax.Array) -> jax.Array:
    """Puts the input of a bottleneck aside for `Residual`."""
    jpipe.stash("shortcut", x)
    return x


class Residual(nn.Module):
    """The end of a bottleneck: brings the shortcut back and adds it.

    Attributes:
      projection: channels that the shortcut is projected to; ``None``: it fits.
      stride: of the projection.
      dtype: of the computation.
    """

    projection: int | None = None
    stride: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to the same shape."""
        shortcut = jpipe.pop("shortcut")
        if self.projection is not None:
            shortcut = _conv(self.projection, 1, self.stride, self.dtype)(shortcut)
            shortcut = norm(self.dtype)(shortcut, use_running_average=not train)
        return x + shortcut


def max_pool(x: jax.Array, size: int = 3, stride: int = 2) -> jax.Array:
    """The largest of each window; what an odd one is padded with never is."""
    padding = ((size - 1) // 2,) * 2
    window, strides = (size, size), (stride, stride)
    return nn.pool(x, -jnp.inf, lax.max, window, strides, (padding, padding))


def average_pool(x: jax.Array) -> jax.Array:
    """The mean over height and width, which become 1."""
    return jnp.mean(x, axis=(1, 2), keepdims=True)


def flatten(x: jax.Array) -> jax.Array:
    """Maps ``[batch, ...]`` to ``[batch, features]``."""
    return x.reshape(len(x), -1)


def linear(features: int, fan_in: int, dtype: Any = None) -> nn.Dense:
    """A dense layer that starts as one of PyTorch does, its bias not from zero.

    Args:
      features: what it makes.
      fan_in: what it is given; Flax does not tell this to the bias.
      dtype: of the computation.
    """
    bias = _uniform_within(fan_in**-0.5)
    return nn.Dense(features, dtype=dtype, kernel_init=TORCH_UNIFORM, bias_init=bias)


@cache  # partials are equal only to themselves, and layers only if these are
def _uniform_within(bound: float) -> Callable[..., jax.Array]:
    return partial(jax.random.uniform, minval=-bound, maxval=bound)


def convolution(
    channels: int,
    window: tuple[int, int],
    strides: tuple[int, int],
    dtype: Any = None,
    kernel_init: Any = HE_NORMAL,
) -> nn.Conv:
    """A convolution without bias, since a norm follows that would take it out again.

    Args:
      channels: what it makes.
      window: height and width of the kernel, odd.
      strides: along height and width.
      dtype: of the computation.
      kernel_init: where the kernel starts.
    """
    return nn.Conv(
        channels,
        window,
        strides,
        # Not "SAME", which at stride 2 pads an even image on one side only.
        padding=tuple((size // 2, size // 2) for size in window),
        use_bias=False,
        dtype=dtype,
        kernel_init=kernel_init,
    )


def norm(dtype: Any = None) -> nn.BatchNorm:
    """A batch norm; PyTorch calls this momentum 0.1."""
    return nn.BatchNorm(momentum=0.9, epsilon=1e-5, dtype=dtype)


def _conv(channels: int, size: int, stride: int, dtype: Any) -> nn.Conv:
    return convolution(channels, (size, size), (stride, stride), dtype)

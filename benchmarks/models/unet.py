"""The U-Net of torchgpipe's benchmarks, as one flat sequence of layers.

A U-Net (Ronneberger et al., 2015, arXiv:1505.04597) with more convolutions per level:
that of Kim et al. (2020, arXiv:2004.09910), whose balances count layers as they stand
here. The units of a level, its convolutions, come one after the other:

* a unit: convolution 3x3 without bias, dropout of whole channels, instance norm without
  scale and bias, leaky ReLU; four layers;
* a level of the encoder: the units, then the layer that keeps what they made for the
  decoder, then max pooling;
* the bottleneck: units alone;
* a level of the decoder: upsampling, then the layer that puts what was kept beside it,
  then the units.

So ``d`` levels of ``B`` units are ``4 B (2 d + 1) + 4 d + 1`` layers, ``44 B + 21`` for
the usual five. With ``C`` channels at full resolution, encoder level ``k`` has ``C
2^k``, the bottleneck ``C 2^d`` but for its last unit, which has half as many, as have
the units of decoder level ``k``: ``C 2^(k - 1)``. All parameters are those of
convolutions.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jpipe

# Uniform between plus and minus 1 / sqrt(fan in): PyTorch's, as there. One object for
# all layers, so that equal ones share the program that makes their parameters.
UNIFORM = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def unet(
    num_convs: int = 5,
    base_channels: int = 64,
    *,
    depth: int = 5,
    out_channels: int = 1,
    carried: bool = False,
    dropout: float = 0.1,
    dtype: Any = None,
) -> list[Any]:
    """The layers, from images to logits.

    Images are ``[batch, height, width, channels]`` of any size and any number of
    channels; logits are ``[batch, height, width, out_channels]``.

    Args:
      num_convs: units per level, ``B``.
      base_channels: channels at full resolution, ``C``; an even number.
      depth: levels, ``d``.
      out_channels: logits per pixel.
      carried: whether what the decoder needs travels from layer to layer, in a tuple
        with their input, instead of by `jpipe.stash`: what a pipeline without skip
        connections has to do. Parameters and results are the same.
      dropout: the rate, of channels.
      dtype: that of the arithmetic; parameters are float32. ``None``: that of the
        images and parameters.

    Returns:
      ``4 B (2 d + 1) + 4 d + 1`` layers.

    Raises:
      ValueError: if ``base_channels`` is odd.
    """
    if base_channels % 2:
        raise ValueError(f"base_channels={base_channels}: needs an even number")

    def level(inner: int, last: int) -> list[Any]:
        made = units([inner] * (num_convs - 1) + [last], dropout, dtype)
        return [on_first(layer) for layer in made] if carried else made

    pool, double = halve, upsample
    if carried:
        pool, double = on_first(halve), on_first(upsample)
    encoder, decoder = [], []
    for k in range(depth):
        keep, join = (carry, join_carried) if carried else by_stash(k)
        width = base_channels * 2**k
        encoder += [*level(width, width), keep, pool]
        # Inside out: the first level down is the last one up.
        decoder = [double, join, *level(width // 2, width // 2), *decoder]
    width = base_channels * 2**depth
    segment = convolution(out_channels, 1, dtype)
    return [*encoder, *level(width, width // 2), *decoder, segment]


def units(features: list[int], dropout: float, dtype: Any) -> list[Any]:
    """The layers of units with so many channels each."""
    layers = []
    for width in features:
        layers += [
            convolution(width, 3, dtype),
            # One draw for all pixels of a channel.
            nn.Dropout(dropout, broadcast_dims=(1, 2)),
            nn.InstanceNorm(epsilon=1e-5, use_bias=False, use_scale=False, dtype=dtype),
            nn.leaky_relu,
        ]
    return layers


def convolution(features: int, size: int, dtype: Any) -> nn.Conv:
    """A convolution that keeps height and width."""
    return nn.Conv(
        features, (size, size), use_bias=False, dtype=dtype, kernel_init=UNIFORM
    )


def halve(x: jax.Array) -> jax.Array:
    """The largest number of each two by two pixels; an odd last row is left out."""
    return nn.max_pool(x, (2, 2), strides=(2, 2))


def upsample(x: jax.Array) -> jax.Array:
    """Each pixel, two by two times."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def beside(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The channels of both.

    Args:
      x: ``[batch, rows, columns, channels]``, with zeros added below and right where
        pooling left out a row or a column.
      kept: ``[batch, height, width, channels]``.
    """
    sizes = zip(kept.shape[1:3], x.shape[1:3], strict=True)
    below, right = (size - there for size, there in sizes)
    padded = jnp.pad(x, [(0, 0), (0, below), (0, right), (0, 0)])
    return jnp.concatenate([padded, kept], axis=-1)


def by_stash(level: int) -> tuple[Any, Any]:
    """The layers that keep and join at a level, with the value going straight."""
    return jpipe.isolate(keep, level), jpipe.isolate(join, level)


def keep(x: jax.Array) -> jax.Array:
    """Puts what it is given aside, too."""
    jpipe.stash("skip", x)
    return x


def join(x: jax.Array) -> jax.Array:
    """Puts what was put aside beside what it is given."""
    return beside(x, jpipe.pop("skip"))


def carry(state: Any) -> tuple[jax.Array, ...]:
    """Adds ``x`` at the end of ``(x, *kept)``, or of a bare ``x``."""
    x, *kept = opened(state)
    return x, *kept, x


def join_carried(state: tuple[jax.Array, ...]) -> Any:
    """Takes the last of ``(x, *kept)`` and puts it beside ``x``."""
    x, *kept, last = state
    return closed(beside(x, last), kept)


def opened(state: Any) -> tuple[jax.Array, ...]:
    """A tuple, of one where nothing is carried."""
    return state if isinstance(state, tuple) else (state,)


def closed(x: jax.Array, kept: list[jax.Array]) -> Any:
    """``(x, *kept)``, or a bare ``x`` where nothing is carried: as the model's ends."""
    return (x, *kept) if kept else x


def on_first(layer: Any) -> Any:
    """The layer for ``(x, *kept)``: it maps ``x`` and passes the rest on."""
    return OnFirst(layer) if isinstance(layer, nn.Module) else _function_on_first(layer)


def _function_on_first(function: Callable[..., Any]) -> Callable[[Any], Any]:
    @wraps(function)
    def run(state: Any) -> Any:
        x, *kept = opened(state)
        return closed(function(x), kept)

    return run


class OnFirst(nn.Module):
    """A module for ``(x, *kept)``, with the parameters and draws of the module itself.

    Attributes:
      layer: the module.
    """

    layer: nn.Module

    def setup(self) -> None:
        """Puts the module's parameters where they are without this one."""
        nn.share_scope(self, self.layer)

    def __call__(self, state: Any, deterministic: bool) -> Any:
        """Maps ``x`` and passes the rest on."""
        x, *kept = opened(state)
        is_random = isinstance(self.layer, nn.Dropout)
        options = {"deterministic": deterministic} if is_random else {}
        return closed(self.layer(x, **options), kept)

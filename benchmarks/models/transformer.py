"""GPipe's Transformer-L, of its Table 1.

Blocks as in Vaswani et al. (2017, arXiv:1706.03762): attention with biases, a two-layer
perceptron with ReLU, sinusoidal positions; with the norms in front, as deep ones need.
The sizes are those of Huang et al. (2019, arXiv:1811.06965). What beside them makes the
published counts of parameters is inferred from these: `transformer_l` says how. There
is no dropout, and no mask for padding.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def transformer_l(
    num_layers: int,
    *,
    width: int = 2048,
    hidden: int = 8192,
    heads: int = 16,
    vocabulary: int = 32_000,
    dtype: Any = None,
) -> list[Any]:
    """GPipe's Transformer-L: a decoder, from tokens to logits of the next ones.

    A block has ``4 w^2 + 4 w`` parameters in its attention, ``2 w h + h + w`` in its
    perceptron and ``4 w`` in its norms, 50,358,272 at ``w = 2048`` and ``h = 8192``:
    the published counts of 3 and 13 layers differ by ten times 50.36 M. They leave
    131.09 M to 131.18 M beside the blocks, which are two tables of ``32,000 w``, one to
    read tokens and one to make logits, with a bias and a last norm: 131,108,096. (From
    31,997 to 32,016 words fit.)

    ======  ==============  =========
    layers  parameters      published
    ======  ==============  =========
    3          282,182,912     282.2M
    13         785,765,632     785.8M
    103      5,318,010,112       5.3B
    415     21,029,790,976      21.0B
    1663    83,876,914,432      83.9B
    ======  ==============  =========

    Args:
      num_layers: blocks.
      width: size of the vector that stands for a token, ``w``.
      hidden: size of the perceptrons' middle, ``h``.
      heads: of the attention; they divide the width and change no count.
      vocabulary: number of tokens.
      dtype: that of the arithmetic; parameters are float32. ``None``: theirs.

    Returns:
      ``num_layers + 2`` layers, from integers ``[batch, length]`` to logits ``[batch,
      length, vocabulary]``.
    """
    return [
        Embedding(vocabulary, width, dtype),
        *(Block(heads, hidden, dtype) for _ in range(num_layers)),
        Head(vocabulary, dtype),
    ]


def sinusoids(length: int, width: int, dtype: Any) -> jax.Array:
    """Positions ``[length, width]``: sines and cosines in turn, slower and slower."""
    rates = 10_000 ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
    angles = jnp.arange(length, dtype=dtype)[:, None] * rates
    both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(length, -1)[:, :width]


class Embedding(nn.Module):
    """Tokens ``[batch, length]`` to vectors ``[batch, length, width]``."""

    vocabulary: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """What each token is, plus where it stands."""
        # Times the root, as in Vaswani et al.: as large as the positions.
        normal = nn.initializers.normal(self.width**-0.5)
        size = self.vocabulary, self.width
        table = nn.Embed(*size, dtype=self.dtype, embedding_init=normal)
        x = table(tokens) * self.width**0.5
        # In bfloat16, positions above 256 could not be told apart.
        exact = jnp.promote_types(x.dtype, jnp.float32)
        return x + sinusoids(tokens.shape[1], self.width, exact).astype(x.dtype)


class Attention(nn.Module):
    """Causal attention of many heads, with biases; the attributes are `Block`'s."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` likewise."""
        heads = self.heads, x.shape[-1] // self.heads
        query = nn.DenseGeneral(heads, dtype=self.dtype, name="query")(x)
        # One product for both.
        pair = nn.DenseGeneral((2, *heads), dtype=self.dtype, name="key_value")(x)
        key, value = pair[:, :, 0], pair[:, :, 1]
        # Never in half precision, and in double where the rest is: jax.nn's is not.
        exact = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=exact)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = nn.softmax(scores / query.shape[-1] ** 0.5, where=seen)
        read = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)
        out = nn.DenseGeneral(x.shape[-1], (-2, -1), dtype=self.dtype, name="out")
        return out(read)


class Block(nn.Module):
    """Attention, then a perceptron, each behind a norm and added to its input.

    Attributes:
      heads: number of heads; they divide the width.
      hidden: size of the perceptron's middle.
      dtype: of the arithmetic.
    """

    heads: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` likewise."""
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        x = x + Attention(self.heads, self.dtype)(norm()(x))
        middle = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(norm()(x)))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(middle)


class Head(nn.Module):
    """The last norm, and a logit for each of the tokens that may come next."""

    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to ``[batch, length, vocabulary]``."""
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)

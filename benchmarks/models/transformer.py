"""GPipe's Transformers: Transformer-L of its Table 1 and T(L, H, A) of its section 5.

Blocks as in Vaswani et al. (2017, arXiv:1706.03762): attention with biases, a two-layer
perceptron with ReLU, sinusoidal positions; with the norms in front, as deep ones need.
The sizes are those of Huang et al. (2019, arXiv:1811.06965). What beside them makes the
published counts of parameters is inferred from these: `transformer_l` and `transformer`
say how. Neither has dropout, nor masks for padding.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import jpipe


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
    block = partial(Block, heads, width // heads, hidden, causal=True, dtype=dtype)
    return [
        Embedding(vocabulary, width, dtype),
        *(block() for _ in range(num_layers)),
        Head(vocabulary, dtype),
    ]


def transformer(
    num_layers: int,
    hidden: int,
    heads: int,
    *,
    width: int = 1024,
    head_dim: int = 64,
    vocabulary: int = 50_000,
    dtype: Any = None,
) -> list[Any]:
    """GPipe's T(L, H, A): an encoder that reads a sentence, a decoder that writes.

    The input is a pair of integers, ``[batch, source length]`` and ``[batch, target
    length]``. The target tokens, which nothing in the encoder needs, go from the first
    layer straight to the decoder's first by `jpipe.stash`. What the encoder made of the
    source, all layers of the decoder read: it flows on with their input, as a pair. By
    `jpipe.stash` it would leave the encoder once for each of them, not once for each
    stage, since what is stashed is popped once.

    Heads have 64 numbers, as many as they are: only so can T(24, 8192, 16) and T(12,
    16384, 32) both have 1.3 B. Three tables of ``1024 v`` (source, target, logits) then
    bring all sizes to the published ones, as rounded there, if there are from 46,177 to
    56,272 words. The default is one such number, not known to be theirs:

    ================  =============  =========
    L, H, A           parameters     published
    ================  =============  =========
    (6, 8192, 16)       430,723,920       400M
    (24, 8192, 16)    1,261,933,392       1.3B
    (12, 16384, 32)   1,261,749,072       1.3B
    (32, 16384, 32)   3,108,574,032         3B
    (64, 16384, 32)   6,063,493,968         6B
    ================  =============  =========

    Args:
      num_layers: blocks of the encoder, and of the decoder, ``L``.
      hidden: size of the perceptrons' middle, ``H``.
      heads: of the attention, ``A``.
      width: size of the vector that stands for a token.
      head_dim: size of a head's queries, keys and values.
      vocabulary: number of tokens of either side.
      dtype: as of `transformer_l`.

    Returns:
      ``2 num_layers + 4`` layers, from the pair to logits ``[batch, target length,
      vocabulary]``.
    """
    block = partial(Block, heads, head_dim, hidden, dtype=dtype)
    return [
        send_target,
        Embedding(vocabulary, width, dtype),
        *(block() for _ in range(num_layers)),
        Target(vocabulary, width, dtype),
        *(block(causal=True, cross=True) for _ in range(num_layers)),
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


def attend(query: Any, key: Any, value: Any, causal: bool) -> jax.Array:
    """What the queries read, ``[batch, length, heads, head_dim]`` as all of them."""
    # Never in half precision, and in double where the rest is: jax.nn's is not.
    exact = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=exact)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else None
    weights = nn.softmax(scores / query.shape[-1] ** 0.5, where=seen)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


class Attention(nn.Module):
    """Attention of many heads, with biases; the attributes are those of `Block`."""

    heads: int
    head_dim: int
    causal: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        """Maps ``[batch, length, width]`` likewise; reads the memory, or itself."""
        heads = self.heads, self.head_dim
        query = nn.DenseGeneral(heads, dtype=self.dtype, name="query")(x)
        # One product for both.
        pair = nn.DenseGeneral((2, *heads), dtype=self.dtype, name="key_value")
        both = pair(x if memory is None else memory)
        read = attend(query, both[:, :, 0], both[:, :, 1], self.causal)
        out = nn.DenseGeneral(x.shape[-1], (-2, -1), dtype=self.dtype, name="out")
        return out(read)


class Block(nn.Module):
    """Attention, then a perceptron, each behind a norm and added to its input.

    Attributes:
      heads: number of heads.
      head_dim: size of a head's queries, keys and values.
      hidden: size of the perceptron's middle.
      causal: whether a token reads only itself and what stands before it.
      cross: whether it reads a memory too, between the two.
      dtype: of the arithmetic.
    """

    heads: int
    head_dim: int
    hidden: int
    causal: bool = False
    cross: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, state: Any) -> Any:
        """Maps ``[batch, length, width]``, or a memory and that, likewise."""
        memory, x = state if self.cross else (None, state)
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        attention = partial(Attention, self.heads, self.head_dim, dtype=self.dtype)
        x = x + attention(causal=self.causal)(norm()(x))
        if self.cross:
            x = x + attention()(norm()(x), memory)
        middle = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(norm()(x)))
        x = x + nn.Dense(x.shape[-1], dtype=self.dtype)(middle)
        return (memory, x) if self.cross else x


class Head(nn.Module):
    """The last norm, and a logit for each of the tokens that may come next."""

    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, state: Any) -> jax.Array:
        """Maps as `Block` does, to ``[batch, length, vocabulary]`` alone."""
        x = state[1] if isinstance(state, tuple) else state
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def send_target(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Sends the target's tokens to the decoder; returns the source's."""
    source, target = tokens
    jpipe.stash("target", target)
    return source


class Target(nn.Module):
    """Between encoder and decoder: the last norm of one, the other's first vectors."""

    vocabulary: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps the encoder's vectors to ``(memory, vectors)``."""
        vectors = Embedding(self.vocabulary, self.width, self.dtype)
        return nn.LayerNorm(dtype=self.dtype)(x), vectors(jpipe.pop("target"))

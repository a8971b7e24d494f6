"""A decoder-only Transformer as a list of layers, ready to be pipelined."""

import jax
from flax import linen as nn


class Embedding(nn.Module):
    """Vectors for what each token is, plus vectors for where it stands.

    Attributes:
      vocab_size: the number of tokens.
      width: the size of a vector.
    """

    vocab_size: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers ``[batch, length]`` to vectors ``[batch, length, width]``."""
        init = nn.initializers.normal(0.5)
        meaning = nn.Embed(self.vocab_size, self.width, embedding_init=init)
        return meaning(tokens) + self.param(
            "position", init, (tokens.shape[1], self.width)
        )


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron, each added to its input.

    Attributes:
      num_heads: the number of attention heads; it divides the width.
    """

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape."""
        # A block that starts as the identity learns sooner.
        zeros = nn.initializers.zeros
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, use_bias=False, out_kernel_init=zeros
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], kernel_init=zeros)(h)


class Head(nn.Module):
    """A norm, and a logit for each token that may come next.

    Attributes:
      vocab_size: the number of tokens.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to ``[batch, length, vocab_size]``."""
        return nn.Dense(self.vocab_size, use_bias=False)(nn.LayerNorm()(x))


def transformer(
    vocab_size: int, width: int, depth: int, num_heads: int
) -> list[nn.Module]:
    """The layers of a language model: an embedding, ``depth`` blocks and a head."""
    blocks = [Block(num_heads) for _ in range(depth)]
    return [Embedding(vocab_size, width), *blocks, Head(vocab_size)]


def balance(depth: int, num_stages: int) -> list[int]:
    """The number of layers of each stage; ``num_stages`` divides ``depth``.

    The embedding goes with the first blocks, the head with the last ones.
    """
    sizes = [depth // num_stages] * num_stages
    sizes[0] += 1
    sizes[-1] += 1
    return sizes

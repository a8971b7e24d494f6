"""A decoder-only pre-LN Transformer as a list of layers, ready to be pipelined."""

import jax
import jax.numpy as jnp
from flax import linen as nn

# A block that starts as the identity learns sooner: it need not first unlearn noise.
ZEROS = nn.initializers.zeros


class Embedding(nn.Module):
    """Tokens to vectors: what each token is, plus where it stands.

    Attributes:
      vocab_size: the number of tokens.
      context: the longest sequence.
      width: the size of a vector.
    """

    vocab_size: int
    context: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers ``[batch, length]`` to vectors ``[batch, length, width]``."""
        normal = nn.initializers.normal(0.5)
        meaning = nn.Embed(self.vocab_size, self.width, embedding_init=normal)
        position = self.param("position", normal, (self.context, self.width))
        return meaning(tokens) + position[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal self-attention: each token reads itself and what stands before it.

    Attributes:
      num_heads: the number of heads; it divides the width.
    """

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape."""
        width = x.shape[-1]
        heads = (3, self.num_heads, width // self.num_heads)
        # No bias: softmax ignores that of the keys, whose gradient is rounding alone.
        qkv = nn.DenseGeneral(heads, use_bias=False)(x)
        query, key, value = jnp.moveaxis(qkv, -3, 0)
        read = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        out = nn.DenseGeneral(width, (-2, -1), use_bias=False, kernel_init=ZEROS)
        return out(read)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream.

    Attributes:
      num_heads: the number of attention heads.
    """

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape."""
        width = x.shape[-1]
        x = x + Attention(self.num_heads)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width, kernel_init=ZEROS)(hidden)


class Head(nn.Module):
    """The last norm, and a logit for each token that may come next.

    Attributes:
      vocab_size: the number of tokens.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to ``[batch, length, vocab_size]``."""
        return nn.Dense(self.vocab_size, use_bias=False)(nn.LayerNorm()(x))


def transformer(
    vocab_size: int, context: int, width: int, depth: int, num_heads: int
) -> list[nn.Module]:
    """The layers of a language model: an embedding, ``depth`` blocks and a head.

    Args:
      vocab_size: the number of tokens.
      context: the longest sequence.
      width: the size of the vector that stands for a token; ``num_heads`` divides it.
      depth: the number of blocks.
      num_heads: the number of attention heads of a block.

    Returns:
      ``depth + 2`` layers, from integers ``[batch, length]`` to logits
      ``[batch, length, vocab_size]``.
    """
    blocks = [Block(num_heads) for _ in range(depth)]
    return [Embedding(vocab_size, context, width), *blocks, Head(vocab_size)]


def balance(depth: int, num_stages: int) -> list[int]:
    """How many of the `transformer`'s layers each stage takes.

    Blocks are most of the work and are dealt out evenly; the embedding goes with the
    first of them, the head with the last.

    Args:
      depth: the number of blocks.
      num_stages: the number of stages, at most ``depth``.

    Returns:
      One number per stage, ``depth + 2`` together.
    """
    sizes = [depth // num_stages] * num_stages
    # The middle comes first with what is left over: the ends have more to do already.
    order = [*range(1, num_stages - 1), 0, num_stages - 1]
    for stage in order[: depth % num_stages]:
        sizes[stage] += 1
    sizes[0] += 1
    sizes[-1] += 1
    return sizes

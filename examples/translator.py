"""GPipe's Transformer T(L, H, A): an encoder that reads, a decoder that writes.

A module of Flax like any other, in which nothing knows of a pipeline. Each side has L
layers with A heads and a perceptron of H (Huang et al. 2019, arXiv:1811.06965, section
5). Blocks are those of Vaswani et al. (2017, arXiv:1706.03762) with the norms in front,
as deep models need them. Layers are scanned: one layer of each side is traced and
compiled, however many there are.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from messages import BEGIN, END, PAD

import jpipe


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Translator.

    The paper names L, H and A only. Its counts of parameters follow with the defaults
    here: a width of 1024, heads of 64, and three tables of 50,000 words, one for
    sources, one for targets, one for logits.

    Attributes:
      layers: L, of the encoder, and of the decoder.
      hidden: H, the features in the middle of a perceptron.
      heads: A, the heads of an attention.
      width: the features of a token.
      head_dim: the features of a query, a key or a value of one head.
      source_words: the vocabulary of sources.
      english_words: the vocabulary of targets.
      ties_logits: True if logits come from the table of targets.
      dropout: the share of features that are dropped at the end of a block.
      dtype: the type of the arithmetic; parameters are float32.
    """

    layers: int
    hidden: int
    heads: int
    width: int = 1024
    head_dim: int = 64
    source_words: int = 50_000
    english_words: int = 50_000
    ties_logits: bool = False
    dropout: float = 0.1
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        """T(L, H, A)."""
        return f"T({self.layers}, {self.hidden}, {self.heads})"


# Name -> a model of the paper, which names models by their parameters.
PAPER = {
    "400M": Sizes(6, 8192, 16),
    "1.3B deep": Sizes(24, 8192, 16),
    "1.3B wide": Sizes(12, 16384, 32),
    "6B": Sizes(64, 16384, 32),
}


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder if it gets a memory.

    It maps vectors ``[batch, length, width]`` to the same shape, in the form that
    `nn.scan` calls.
    """

    sizes: Sizes
    train: bool

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        """Adds attention to itself, attention to the memory and a perceptron."""
        x = x + self.attend(x, mask, name="self")
        if memory is not None:
            x = x + self.attend(x, memory_mask, memory=memory, name="cross")
        h = nn.Dense(self.sizes.hidden, dtype=self.sizes.dtype)(self.norm(x))
        h = nn.Dense(self.sizes.width, dtype=self.sizes.dtype)(nn.relu(h))
        return x + self.drop(h), None

    def attend(self, x, mask, *, memory=None, name):
        """The attention of normed vectors to themselves, or to a memory."""
        sizes = self.sizes
        attention = nn.MultiHeadDotProductAttention(
            sizes.heads,
            qkv_features=sizes.heads * sizes.head_dim,
            out_features=sizes.width,
            dtype=sizes.dtype,
            force_fp32_for_softmax=True,
            name=name,
        )
        return self.drop(attention(self.norm(x), memory, mask=mask))

    def norm(self, x):
        """A new layer norm."""
        return nn.LayerNorm(dtype=self.sizes.dtype)(x)

    def drop(self, x):
        """Drops some features in training."""
        return nn.Dropout(self.sizes.dropout, deterministic=not self.train)(x)


class Translator(nn.Module):
    """The model: sources and shifted targets to logits."""

    sizes: Sizes

    @nn.compact
    def __call__(self, source, shifted, train=False):
        """Predicts each token of the targets from those before it and the source.

        Args:
          source: integers ``[batch, source length]``, padded with `PAD`.
          shifted: integers ``[batch, length]``: `BEGIN` and all but the last target.
          train: True if dropout is on.

        Returns:
          Logits ``[batch, length, english words]``, float32.
        """
        sizes = self.sizes
        init = nn.initializers.normal(sizes.width**-0.5)
        table = partial(
            nn.Embed, features=sizes.width, dtype=sizes.dtype, embedding_init=init
        )
        stack = partial(
            nn.scan,
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            # All layers read the same masks and memory.
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=sizes.layers,
        )
        norm = partial(nn.LayerNorm, dtype=sizes.dtype)
        source_mask = (source != PAD)[:, None, None]

        x = add_positions(table(sizes.source_words, name="source_table")(source))
        x, _ = stack()(sizes, train, name="encoder")(x, source_mask)
        memory = norm(name="encoder_norm")(x)

        english = table(sizes.english_words, name="english_table")
        y = add_positions(english(shifted))
        causal_mask = nn.make_causal_mask(shifted)
        decoder = stack()(sizes, train, name="decoder")
        y, _ = decoder(y, causal_mask, memory, source_mask)
        y = norm(name="decoder_norm")(y)
        if sizes.ties_logits:
            return english.attend(y).astype(jnp.float32)
        logits = nn.Dense(sizes.english_words, dtype=sizes.dtype, name="logits")(y)
        return logits.astype(jnp.float32)


def add_positions(x: jax.Array) -> jax.Array:
    """Scales embeddings ``[batch, length, width]`` to 1; adds waves of positions."""
    length = x.shape[1]
    width = x.shape[2]
    rates = 10_000 ** (-jnp.arange(0, width, 2) / width)
    angles = jnp.arange(length)[:, None] * rates
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return x * width**0.5 + waves.astype(x.dtype)


def count_parameters(sizes: Sizes) -> int:
    """The parameters of a model, by shapes only: no memory is needed."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = partial(Translator(sizes).init, jax.random.key(0))
    leaves = jax.tree.leaves(jax.eval_shape(init, tokens, tokens))
    return sum(leaf.size for leaf in leaves)


def translate(
    pipe: jpipe.Pipeline, variables: Any, source: np.ndarray, length: int
) -> np.ndarray:
    """Translates greedily: each token is the likeliest behind those before it.

    Args:
      pipe: a pipeline of a `Translator`.
      variables: its variables.
      source: tokens ``[messages, source length]``.
      length: the most tokens of a translation.

    Returns:
      English tokens ``[messages, length]``.
    """
    shifted = np.full((len(source), length + 1), PAD, np.int32)
    shifted[:, 0] = BEGIN
    for index in range(length):
        # Each token costs a forward pass over all tokens: slow, but simple.
        logits = pipe.apply(variables, jpipe.inputs(source, shifted[:, :-1]))
        shifted[:, index + 1] = np.asarray(logits)[:, index].argmax(axis=-1)
        if (shifted == END).any(axis=1).all():
            break
    return shifted[:, 1:]

"""The Transformer block whose cost is measured, beside those of peers too."""

import jax
from flax import linen as nn


class Block(nn.Module):
    """A pre-LN Transformer block with causal attention."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        mask = nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(self.heads)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)

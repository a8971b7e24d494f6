"""A PRNG of which every draw is the median.

With its keys a layer computes the same for each example, in whatever shape it draws: a
dropout of a rate up to one half leaves out nothing, and noise about zero is zero.
"""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from . import _rng


@functools.cache
def _implementation() -> Any:
    def random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        del key
        return jnp.full(shape, 2 ** (width - 1) - 1, f"uint{width}")

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros((1,), jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=random_bits,
        fold_in=lambda key, number: key,
        name="jpipe_half",
        tag="half",
    )


def median_keys(rngs: _rng.Rngs) -> _rng.Rngs:
    """Median keys for the streams of `rngs`; ``None`` where there are none."""
    keys = _rng.streams(rngs)
    return None if keys is None else dict.fromkeys(keys, median_key())


def median_key() -> jax.Array:
    """A key of which every draw is the median."""
    return jax.random.key(0, impl=_implementation())

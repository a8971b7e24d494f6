"""Random keys, which pass between processes as the numbers that they are made of."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: Any) -> bool:
    """Whether a leaf, or its spec, is a typed key of `jax.random`."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> Any:
    """The numbers of a key; any other array as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_key(numbers: Any, like: Any) -> Any:
    """Numbers as a key of the kind of another; if that is no key, as they are."""
    if not is_key(like) or is_key(numbers):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like))

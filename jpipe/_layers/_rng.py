"""Randomness as a function of step, micro-batch and layer, and of nothing else.

Stages, devices, schedules and rematerialization do not enter, so none of them
changes a dropout mask.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

# One key, or a dictionary of keys by stream name, as Flax takes them.
Rngs = chex.PRNGKey | Mapping[str, chex.PRNGKey] | None


def key_spec() -> Any:
    """Any key, where only its shape and dtype are asked for."""
    return jax.eval_shape(jax.random.key, 0)


def check_rngs(rngs: Any) -> None:
    """Checks that something is a key, or keys by stream name.

    Raises:
      TypeError: if it is not.
    """
    if isinstance(rngs, nnx.Rngs):
        raise TypeError(
            "rngs is an nnx.Rngs; needs a key, such as rngs() gives, or keys by stream "
            "name, such as {'dropout': rngs.dropout()}"
        )
    named = rngs.items() if isinstance(rngs, Mapping) else [(None, rngs)]
    for name, key in named:
        check_key(key, "rngs" if name is None else f"rngs[{name!r}]")


def check_key(key: Any, what: str = "key") -> None:
    """Checks that something is a key of `jax.random`, typed or raw.

    Args:
      key: what was given.
      what: what to call it.

    Raises:
      TypeError: if it is not.
    """
    if isinstance(key, nnx.Rngs):
        raise TypeError(
            f"{what} is an nnx.Rngs; needs a random key, such as jax.random.key(0)"
        )
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if shape == ():
            return
    elif dtype == jnp.uint32 and shape is not None and len(shape) == 1:
        return
    given = reprlib.repr(key) if dtype is None else f"a {dtype}{list(shape or ())}"
    seed = key if isinstance(key, int) else 0
    raise TypeError(
        f"{what} is {given}; needs a random key, such as jax.random.key({seed})"
    )


def layer_key(key: chex.PRNGKey, layer: jax.Array | int) -> chex.PRNGKey:
    """The key with which a layer is initialized."""
    return jax.random.fold_in(key, layer)


@jax.jit  # to be given a number is to move it
def training_key(key: chex.PRNGKey) -> chex.PRNGKey:
    """The key that a train state keeps; none of the keys of `layer_key`."""
    return jax.random.fold_in(key, 2**31 - 1)


def wrapped_once(key: chex.PRNGKey) -> chex.PRNGKey:
    """The same key; a raw one from a typed one that was made of it."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.key_data(jax.random.wrap_key_data(key))


def layer_rngs(rngs: Rngs, layer: jax.Array | int) -> dict[str, chex.PRNGKey] | None:
    """The keys of one layer.

    Args:
      rngs: those of the micro-batch: one key, a dictionary of them, or ``None``.
      layer: the number of the layer in the user's list, an int32 scalar.

    Returns:
      A dictionary of keys by stream name: see `streams`.
    """
    keys = streams(rngs)
    if keys is None:
        return None
    return {name: jax.random.fold_in(key, layer) for name, key in keys.items()}


def streams(rngs: Rngs) -> dict[str, chex.PRNGKey] | None:
    """Keys by stream name, for modules of nnx and for calls that name ``rngs``.

    A single key serves every stream: dropout has a key of its own, and nnx takes
    ``"default"`` for a name that is missing.

    Args:
      rngs: one key for all streams, a dictionary of them, or ``None``.
    """
    if rngs is None or isinstance(rngs, Mapping):
        return None if rngs is None else dict(rngs)
    dropout = jax.random.fold_in(rngs, 1)
    return {"params": rngs, "dropout": dropout, "default": rngs}


def linen_streams(rngs: Rngs) -> Mapping[str, chex.PRNGKey] | None:
    """Keys by stream name, as `flax.linen.Module.apply` understands ``rngs``.

    A single key is that of ``"params"``, which linen takes for all names that are
    missing, such as ``"dropout"``. Modules of nnx in a `flax.nnx.bridge.ToLinen` take
    ``"default"``.

    Args:
      rngs: one key for all streams, a dictionary of them, or ``None``.
    """
    if rngs is None or isinstance(rngs, Mapping):
        return rngs
    return {"params": rngs, "default": rngs}


def step_key(rng: chex.PRNGKey, step: jax.Array) -> chex.PRNGKey:
    """The key of one training step, from which every layer's keys follow."""
    return jax.random.fold_in(rng, step)

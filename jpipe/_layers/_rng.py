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
    """The shape and dtype of a key."""
    return jax.eval_shape(jax.random.key, 0)


def check_rngs(rngs: Any) -> None:
    """Checks that `rngs` is a key, or keys by stream name.

    Raises:
      TypeError: if it is not.
    """
    if isinstance(rngs, nnx.Rngs):
        raise TypeError(
            "rngs is an nnx.Rngs; needs a key, such as rngs() gives, or keys by stream "
            "name, such as {'dropout': rngs.dropout()}"
        )
    if not isinstance(rngs, Mapping):
        check_key(rngs, "rngs")
        return
    for name, key in rngs.items():
        check_key(key, f"rngs[{name!r}]")


def check_key(key: Any, name: str = "key") -> None:
    """Checks that `key` is a key of `jax.random`, typed or raw.

    Args:
      key: the argument of the user.
      name: its name in errors.

    Raises:
      TypeError: if it is not.
    """
    if isinstance(key, nnx.Rngs):
        raise TypeError(
            f"{name} is an nnx.Rngs; needs a random key, such as jax.random.key(0)"
        )
    dtype = getattr(key, "dtype", None)
    shape = getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if shape == ():
            return
    elif dtype == jnp.uint32 and shape is not None and len(shape) == 1:
        return

    is_array = dtype is not None
    text = f"a {dtype}{list(shape or ())}" if is_array else reprlib.repr(key)
    seed = key if isinstance(key, int) else 0
    raise TypeError(
        f"{name} is {text}; needs a random key, such as jax.random.key({seed})"
    )


def layer_key(key: chex.PRNGKey, layer_index: jax.Array | int) -> chex.PRNGKey:
    """The key with which a layer is initialized."""
    return jax.random.fold_in(key, layer_index)


@jax.jit  # the number is a constant of the program: as an argument it would be moved
def training_key(key: chex.PRNGKey) -> chex.PRNGKey:
    """The key that a train state keeps, other than all of `layer_key`."""
    return jax.random.fold_in(key, 2**31 - 1)


def normalize_key(key: chex.PRNGKey) -> chex.PRNGKey:
    """The key, unchanged in value; raw keys are wrapped and unwrapped once."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.key_data(jax.random.wrap_key_data(key))


def layer_rngs(
    rngs: Rngs, layer_index: jax.Array | int
) -> dict[str, chex.PRNGKey] | None:
    """The keys of one layer.

    Args:
      rngs: the keys of the micro-batch: one key, a dictionary of them, or ``None``.
      layer_index: the index of the layer in the user's list, an int32 scalar.

    Returns:
      A dictionary of keys by stream name: see `streams`.
    """
    keys = streams(rngs)
    if keys is None:
        return None
    return {name: jax.random.fold_in(key, layer_index) for name, key in keys.items()}


def streams(rngs: Rngs) -> dict[str, chex.PRNGKey] | None:
    """Keys by stream name, for modules of nnx and for calls that name ``rngs``.

    A single key serves every stream: dropout has a separate key, and nnx takes
    ``"default"`` for a name that is missing.

    Args:
      rngs: one key for all streams, a dictionary of them, or ``None``.
    """
    if rngs is None:
        return None
    if isinstance(rngs, Mapping):
        return dict(rngs)
    dropout = jax.random.fold_in(rngs, 1)
    return {"params": rngs, "dropout": dropout, "default": rngs}


def linen_streams(rngs: Rngs) -> Mapping[str, chex.PRNGKey] | None:
    """Keys by stream name, as `flax.linen.Module.apply` understands ``rngs``.

    A single key serves ``"params"``, which linen takes for all names that are
    missing, such as ``"dropout"``. Modules of nnx in a `flax.nnx.bridge.ToLinen` take
    ``"default"``.

    Args:
      rngs: one key for all streams, a dictionary of them, or ``None``.
    """
    if rngs is None or isinstance(rngs, Mapping):
        return rngs
    return {"params": rngs, "default": rngs}


def step_keys(rngs: Any, step: jax.Array) -> Any:
    """The keys of one training step, from which every layer's keys follow.

    Args:
      rngs: the key of a state, or a pytree of keys.
      step: the number of steps taken before.
    """
    return jax.tree.map(lambda key: jax.random.fold_in(key, step), rngs)


def is_single_key(leaf: Any) -> bool:
    """True if a leaf is a single typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.shape == ()


def microbatch_key(key: jax.Array, microbatch: jax.Array | int) -> jax.Array:
    """The key that a micro-batch is given in place of the key of the mini-batch.

    Args:
      key: a key of `jax.random.key`.
      microbatch: the index of the micro-batch, from 0 on.

    Returns:
      A key.

    Raises:
      TypeError: if it is given no key.

    Example:
      >>> import jax, jpipe
      >>> key = jpipe.microbatch_key(jax.random.key(0), 3)
      >>> key.shape
      ()
    """
    check_key(key, "microbatch_key(key, microbatch): key")
    return jax.random.fold_in(key, microbatch)

"""The random streams of nnx modules: started anew from the keys of a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

Keys = Mapping[str, chex.PRNGKey] | None
# The stream of the initial carry of an nnx.RNN: zeros, unless its cell says otherwise.
_CARRY = "carry"


def seed(module: nnx.Module, rngs: Keys) -> list[str]:
    """Starts the random streams of a module anew.

    Args:
      module: the module, which this changes.
      rngs: the keys by name, or ``None``.

    Returns:
      The names of the streams without a key: drawing from these is an error of JAX.
    """
    streams = _streams(module)
    # stream name -> key
    keys: dict[str, Any] = {}
    missing = []
    for name in dict.fromkeys(stream.tag for stream in streams):
        key = _key_of(rngs, name)
        if key is not None:
            keys[name] = key
        elif name != _CARRY:
            missing.append(name)
    nnx.reseed(module, policy="match_shape", **keys)

    for stream in streams:
        if stream.tag in missing:
            stream.key.set_value(jnp.zeros(stream.key.shape, bool))

    if rngs is None:
        for _, node in nnx.iter_graph(module, graph=True):
            # It would draw from all streams in each call; linen names what it lacks.
            if isinstance(node, nnx.bridge.ToNNX):
                node.to_nnx__rngs = None
    return missing


@contextmanager
def explain_missing_keys(missing: Sequence[str]) -> Iterator[None]:
    """The scope of a call in which drawing from a stream without a key is explained.

    Args:
      missing: the names of the streams without a key.

    Raises:
      ValueError: if the call draws from one.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not missing or "PRNG key" not in str(error):
            raise
        keys = ", ".join(f"{name!r}: jax.random.key(0)" for name in missing)
        raise ValueError(
            f"the layer draws from a random stream for which there is no key; give "
            f"rngs=jax.random.key(0), or rngs={{{keys}}}"
        ) from error


def as_rngs(keys: Mapping[str, chex.PRNGKey], module: nnx.Module) -> nnx.Rngs:
    """Keys for a ``__call__`` that asks for them, other than those of `seed`.

    Args:
      keys: the keys by name.
      module: the module that `seed` has seeded.

    Returns:
      One stream per key, and "default" from "params".
    """
    if "params" in keys:
        keys = {"default": keys["params"], **keys}
    # `nnx.reseed` folds numbers below that of the streams into the same keys.
    first_number = len(_streams(module))
    return nnx.Rngs(
        {
            name: jax.random.fold_in(_typed(keys[name]), number)
            for number, name in enumerate(sorted(keys), first_number)
        }
    )


def _streams(module: nnx.Module) -> list[nnx.RngStream]:
    nodes = (node for _, node in nnx.iter_graph(module, graph=True))
    return [node for node in nodes if isinstance(node, nnx.RngStream)]


def _key_of(keys: Keys, stream_name: str) -> chex.PRNGKey | None:
    """The key of a stream; ``None`` if there is none."""
    if keys is None:
        return None
    names = [stream_name, "default", "params"]
    if stream_name == "default":
        # The one stream of nnx.Rngs(0) serves all and is called "default": it takes a
        # key that was given for dropout.
        names.append("dropout")
    for name in names:
        if name in keys:
            return _typed(keys[name])
    return None


def _typed(key: chex.PRNGKey) -> jax.Array:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jnp.asarray(key) if is_typed else jax.random.wrap_key_data(key)

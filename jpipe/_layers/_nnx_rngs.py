"""The random streams of nnx modules: started anew from the keys of a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

Keys = Mapping[str, chex.PRNGKey] | None
# By which nnx.RNN makes what it starts from: zeros, unless its cell says otherwise.
_CARRY = "carry"


def seed(module: nnx.Module, rngs: Keys) -> list[str]:
    """Starts the random streams of a module anew.

    Args:
      module: the module, which this changes.
      rngs: the keys by name, or ``None``.

    Returns:
      The names of the streams without a key: to draw from one is an error of JAX.
    """
    streams = _streams(module)
    tags = dict.fromkeys(stream.tag for stream in streams)
    keys: dict[str, Any] = {
        tag: key for tag in tags if (key := _key_of(rngs, tag)) is not None
    }
    nnx.reseed(module, policy="match_shape", **keys)
    lacking = [tag for tag in tags if tag not in keys and tag != _CARRY]
    for stream in streams:
        if stream.tag in lacking:
            stream.key.set_value(jnp.zeros(stream.key.shape, bool))
    if rngs is None:
        for _, node in nnx.iter_graph(module, graph=True):
            # It would draw from all streams in each call; linen names what it lacks.
            if isinstance(node, nnx.bridge.ToNNX):
                node.to_nnx__rngs = None
    return lacking


@contextmanager
def needed(lacking: Sequence[str]) -> Iterator[None]:
    """The scope of a call, where drawing from streams without a key says so.

    Raises:
      ValueError: if the call does.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not lacking or "PRNG key" not in str(error):
            raise
        given = ", ".join(f"{tag!r}: jax.random.key(0)" for tag in lacking)
        raise ValueError(
            f"the layer draws from a random stream for which there is no key; give "
            f"rngs=jax.random.key(0), or rngs={{{given}}}"
        ) from error


def as_rngs(rngs: Mapping[str, chex.PRNGKey], module: nnx.Module) -> nnx.Rngs:
    """The keys for a ``__call__`` that asks for them, other than those of `seed`.

    Args:
      rngs: the keys by name.
      module: the module that `seed` has seeded.

    Returns:
      One stream for each key, and "default" from "params".
    """
    given = {"default": rngs["params"], **rngs} if "params" in rngs else rngs
    return nnx.Rngs(
        {
            stream: jax.random.fold_in(_typed(given[stream]), number)
            for number, stream in enumerate(sorted(given), len(_streams(module)))
        }
    )


def _streams(module: nnx.Module) -> list[nnx.RngStream]:
    nodes = (node for _, node in nnx.iter_graph(module, graph=True))
    return [node for node in nodes if isinstance(node, nnx.RngStream)]


def _key_of(rngs: Keys, stream: str) -> chex.PRNGKey | None:
    # The one stream of nnx.Rngs(0) serves all and is called "default": it takes a key
    # that was given for dropout.
    for given in (stream, "default", "params", *["dropout"] * (stream == "default")):
        if rngs is not None and given in rngs:
            return _typed(rngs[given])
    return None


def _typed(key: chex.PRNGKey) -> jax.Array:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jnp.asarray(key) if is_typed else jax.random.wrap_key_data(key)

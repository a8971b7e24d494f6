"""The random streams of nnx modules: started anew from the keys of a step."""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

Path = tuple[Any, ...]
Keys = Mapping[str, chex.PRNGKey] | None
# By which nnx.RNN makes what it starts from: zeros, unless its cell says otherwise.
_CARRY = "carry"


def seed(module: nnx.Module, rngs: Keys) -> int:
    """Starts the random streams of a module anew.

    Args:
      module: the module, which this changes.
      rngs: the keys by name, or ``None``.

    Returns:
      The number of streams.
    """
    tags = dict.fromkeys(stream.tag for stream in _streams(module).values())
    keys: dict[str, Any] = {
        tag: key for tag in tags if (key := _key_of(rngs, tag)) is not None
    }
    nnx.reseed(module, policy="match_shape", **keys)
    if rngs is None:
        for _, node in nnx.iter_graph(module, graph=True):
            # It would draw from all streams in each call; linen names what it lacks.
            if isinstance(node, nnx.bridge.ToNNX):
                node.to_nnx__rngs = None
    return len(_streams(module))


def counts(module: nnx.Module) -> dict[Path, Any]:
    """How often each random stream was drawn from, by its path."""
    return {
        path: stream.count.get_raw_value() for path, stream in _streams(module).items()
    }


def check_drawn(module: nnx.Module, before: Mapping[Path, Any], rngs: Keys) -> None:
    """Checks that a call drew from no stream without a key.

    Args:
      module: the module after the call.
      before: its `counts` before.
      rngs: the keys by name, or ``None``.

    Raises:
      ValueError: if it did: each step would draw the same numbers.
    """
    for path, stream in _streams(module).items():
        drawn = stream.count.get_raw_value() is not before.get(path)
        if drawn and stream.tag != _CARRY and _key_of(rngs, stream.tag) is None:
            raise ValueError(
                f"{dotted(path)} draws from the random stream {stream.tag!r}, for "
                f"which there is no key; give rngs=jax.random.key(0) or "
                f"rngs={{{stream.tag!r}: jax.random.key(0)}}"
            )


def shapes(module: nnx.Module) -> dict[Path, tuple[int, ...]]:
    """The shapes of the random streams, by path: all that `seed` keeps of them."""
    return {path: stream.key.shape for path, stream in _streams(module).items()}


def as_rngs(rngs: Mapping[str, chex.PRNGKey], first: int) -> nnx.Rngs:
    """The keys for a ``__call__`` that asks for them, other than those of `seed`.

    Args:
      rngs: the keys by name.
      first: how many streams `seed` started.

    Returns:
      One stream for each key, and "default" from "params".
    """
    given = {"default": rngs["params"], **rngs} if "params" in rngs else rngs
    return nnx.Rngs(
        {
            stream: jax.random.fold_in(_typed(given[stream]), number)
            for number, stream in enumerate(sorted(given), first)
        }
    )


def dotted(path: Path) -> str:
    """A path in a module, as Python writes attributes."""
    return ".".join(map(str, path))


def _streams(module: nnx.Module) -> dict[Path, nnx.RngStream]:
    return {
        tuple(path): node
        for path, node in nnx.iter_graph(module, graph=True)
        if isinstance(node, nnx.RngStream)
    }


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

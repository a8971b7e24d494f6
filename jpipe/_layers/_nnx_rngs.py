"""The random streams of nnx modules: started anew from the keys of a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

Path = tuple[Any, ...]
Keys = Mapping[str, chex.PRNGKey] | None
# By which nnx.RNN makes what it starts from: zeros, unless its cell says otherwise.
_CARRY = "carry"


class AnyPath:
    """A path that equals any other: with it on them, equal modules stay equal."""

    def __init__(self, parts: Path) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyPath)

    def __hash__(self) -> int:
        return hash(AnyPath)


class _Missing(nnx.RngStream):
    """A random stream for which there is no key."""

    path: AnyPath

    def __call__(self) -> Any:
        if self.tag == _CARRY:
            return _Unneeded(self.path, self.tag)
        raise _lacks(self.path, self.tag)


class _Unneeded:
    """In the place of a key that is not there: it may be given, and not looked at."""

    def __init__(self, path: AnyPath, stream: str) -> None:
        self._lacking = path, stream

    def __getattr__(self, name: str) -> Any:
        raise _lacks(*self._lacking)


@dataclass(frozen=True)
class _Unread:
    """The hook of a key that is not there: a call may read it without drawing."""

    path: AnyPath
    stream: str

    def __call__(self, variable: nnx.Variable, value: jax.Array) -> jax.Array:
        raise _lacks(self.path, self.stream)


def _lacks(path: AnyPath, stream: str) -> ValueError:
    return ValueError(
        f"{dotted(path.parts)} draws from the random stream {stream!r}, for which "
        f"there is not a key; give rngs=jax.random.key(0) or "
        f"rngs={{{stream!r}: jax.random.key(0)}}"
    )


def seed(module: nnx.Module, rngs: Keys) -> int:
    """Starts the random streams of a module anew.

    Streams of one name get keys of their own, by their order in the module: two
    dropouts draw differently.

    Args:
      module: the module, which this changes.
      rngs: the keys by name, or ``None``.

    Returns:
      The number of streams.
    """
    streams = _streams(module)
    if rngs is None:
        _let_linen_ask(module)
    for number, (path, stream) in enumerate(streams.items()):
        key, shape = _key_of(rngs, stream.tag), stream.key.get_value().shape
        if key is None:
            # Known only when it is drawn from, wherever that is: a class goes through
            # nnx.remat and nnx.scan, as a flag beside the module would not.
            object.__setattr__(stream, "__class__", _Missing)
            setattr(stream, "path", AnyPath(path))  # noqa: B010
            unread = _Unread(AnyPath(path), stream.tag)
            stream.key.set_metadata(on_get_value=unread)
            key = jax.random.key(0)
        key = jax.random.fold_in(key, number)
        stream.key.set_value(jax.random.split(key, shape) if shape else key)
        stream.count.set_value(jnp.zeros(shape, jnp.uint32))
    return len(streams)


def _let_linen_ask(module: nnx.Module) -> None:
    """Takes its random streams from a linen module that is held as one of nnx.

    It would draw from all of them in every call; linen says itself what it lacks.
    """
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.bridge.ToNNX):
            node.to_nnx__rngs = None


def shapes(module: nnx.Module) -> dict[Path, tuple[int, ...]]:
    """What of the values of random streams `seed` keeps: their shapes.

    Args:
      module: the module.

    Returns:
      The shape of each key and of each count, by its path.
    """
    return {
        (*path, name): getattr(stream, name).get_value().shape
        for path, stream in _streams(module).items()
        for name in ("key", "count")
    }


def loose(module: nnx.Module) -> str:
    """What is wrong with random state that no stream holds, if there is any.

    `seed` does not start it anew, nor is it carried from step to step.
    """
    streams = _streams(module).values()
    seeded = {id(part) for stream in streams for part in (stream.key, stream.count)}
    held = [
        f"{dotted(tuple(path))} ({type(node).__name__})"
        for path, node in nnx.iter_graph(module, graph=True)
        if isinstance(node, nnx.RngState) and id(node) not in seeded
    ]
    if not held:
        return ""
    return (
        f"{', '.join(held)} is held outside of a random stream, and would give the "
        f"same numbers in every step; hold nnx.Rngs(0), or rngs.fork(), and draw its "
        f"keys by calling it"
    )


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

"""The random streams that linen modules ask for by names of their own.

A single key serves every stream. Of one that it was not given Flax says that there is
none (``has_rng``), draws from another in its place, and leaves it whole where a
transformation is told to split it. So a trace in which a module asks for a further
stream is given up, and made anew with it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from flax import linen

from . import _rng, _skip
from ._layer import Layer

PyTree = Any


Traced = TypeVar("Traced")


class _Asked(BaseException):
    """A stream is asked for that was not given; no ``except Exception`` takes it."""

    def __init__(self, stream: str) -> None:
        self.stream = stream


# The streams that are given, where one key serves all.
_given: ContextVar[frozenset[str] | None] = ContextVar("jpipe_streams", default=None)
# A class is the same for all threads.
_lock = threading.RLock()


def applied(
    layer: Layer,
    variables: PyTree,
    x: PyTree,
    rngs: _rng.Rngs,
    numbers: tuple[jax.Array | int, jax.Array | int],
    train: bool,
    skips: dict[_skip.Key, PyTree],
    guess: PyTree = None,
    frames: list[_skip.Frame] | None = None,
) -> tuple[PyTree, dict[str, PyTree]]:
    """Applies a layer, inside of `retried`, with the random streams that it asks for.

    Args:
      layer: the layer.
      variables: what it holds.
      x: its input.
      rngs: the keys of the step.
      numbers: of the micro-batch and of the layer.
      train: whether this is training.
      skips: what it may pop; in the end what may be popped after it.
      guess: what an unknown name pops, while faults are collected.
      frames: to which is added what it does with skips, whatever comes of it.

    Returns:
      Its output, and what it changed.
    """
    frames = [] if frames is None else frames
    streams = layer.streams.setdefault(train, set())
    keys = _rng.layer_rngs(rngs, *numbers, streams=streams)
    single = rngs is not None and not isinstance(rngs, Mapping)
    try:
        with (
            _noticing(frozenset(keys) if single and keys else None),
            _skip.applying(skips, layer.namespace, guess=guess) as frame,
        ):
            frames.append(frame)
            return layer.apply(variables, x, keys, train)
    except _Asked as asked:
        frames.pop()
        streams.add(asked.stream)
        raise


def retried(trace: Callable[[], Traced]) -> Traced:
    """What a trace gives, once its layers have all streams that they ask for."""
    while True:
        try:
            return trace()
        except _Asked:
            continue


@contextmanager
def _noticing(given: frozenset[str] | None) -> Iterator[None]:
    """The scope in which linen modules ask for no stream that is not given.

    Flax has no hook for that: its methods are others here, and do the same elsewhere.
    """
    if given is None:
        yield
        return
    plain: dict[str, Callable[..., Any]] = {
        name: getattr(linen.Module, name) for name in ("has_rng", "make_rng")
    }

    def noticed(method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(module: linen.Module, name: str = "params") -> Any:
            known = _given.get()
            if known is not None and name not in known:
                raise _Asked(name)
            return method(module, name)

        return ask

    with _lock:
        token = _given.set(given)
        try:
            for name, method in plain.items():
                setattr(linen.Module, name, noticed(method))
            yield
        finally:
            for name, method in plain.items():
                setattr(linen.Module, name, method)
            _given.reset(token)

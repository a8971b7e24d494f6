"""Long skip connections: values that go from one layer straight to a later one.

    layer 0   stash("a", y)     passes  x, {"a": y}
    layer 1                     passes  x, {"a": y}
    layer 2   pop("a")          passes  x, {}

A layer stashes a value under a name and a later layer pops it: between them it is an
entry of a dictionary that is passed along with the output. In the one trace of all
layers the stage that pops it reads a variable of the stage that computes it, as it
reads what an output hands on: see `_trace/_boundaries`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import get_opaque_trace_state

from .._messages import raise_all
from ..schedules._formats import format_type

PyTree = Any


class Key(NamedTuple):
    """The key of a value; its text is the name in messages and plans.

    Attributes:
      name: the name that was passed to `stash`.
      namespace: the namespace of the layer; ``None`` if it has none.
    """

    name: Hashable
    namespace: Hashable

    def __repr__(self) -> str:
        if self.namespace is None:
            return repr(self.name)
        return f"{self.name!r} of {self.namespace!r}"


class Passed(NamedTuple):
    """The values that a layer passes to later ones.

    Attributes:
      x: its output.
      stashed: the values that were stashed and not popped yet. The keys need no order.
    """

    x: PyTree
    stashed: OrderedDict[Key, PyTree]


@dataclass
class Skips:
    """The skip connections of the layers so far.

    Attributes:
      values: the values that were stashed and not popped yet.
      stashed: the layer that stashed each value.
      popped: the layer that popped each value.
    """

    values: OrderedDict[Key, PyTree] = field(default_factory=OrderedDict)
    stashed: dict[Key, str] = field(default_factory=dict)
    popped: dict[Key, str] = field(default_factory=dict)

    def check_popped(self) -> None:
        """Checks, once all layers were applied, that all values were popped.

        Raises:
          ValueError: with the values that no layer popped.
        """
        raise_all(
            "the skip connections do not fit",
            [
                f"{key} is stashed by {layer} and never popped"
                for key, layer in self.stashed.items()
                if key not in self.popped
            ],
        )


class _SkipFrame(NamedTuple):
    """The layer that is being applied, and its trace."""

    skips: Skips
    layer: str
    trace: Any


_current: ContextVar[_SkipFrame | None] = ContextVar("jpipe_skip_frame", default=None)
_namespace: ContextVar[Hashable] = ContextVar("jpipe_skip_namespace", default=None)


@contextmanager
def skip_scope(skips: Skips, layer: str) -> Iterator[None]:
    """The scope of the call of a layer, in which `stash` and `pop` work.

    Args:
      skips: the skip connections so far, which the layer changes.
      layer: its index and name, for messages.
    """
    trace = get_opaque_trace_state(convention="flax")
    token = _current.set(_SkipFrame(skips, layer, trace))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def namespace_scope(namespace: Hashable) -> Iterator[None]:
    """The scope in which the names of `stash` and `pop` are in a namespace."""
    outer = _namespace.get()
    token = _namespace.set(namespace if outer is None else (outer, namespace))
    try:
        yield
    finally:
        _namespace.reset(token)


def stash(name: Hashable, x: PyTree) -> None:
    """Puts a value aside for a later layer, which takes it with `pop`.

    Call it inside any layer: linen, nnx or a function. If the later layer is on
    another device, the value is sent there at once, past the layers in between, and its
    gradient comes back the same way. `isolate` lets one class of blocks use a name many
    times.

    Args:
      name: any hashable name, which is stashed once and popped once.
      x: any pytree of arrays, or ``None``.

    Raises:
      RuntimeError: outside of a pipeline's layer, or inside a transformation of JAX
        within one.
      TypeError: if the name is not hashable.
      ValueError: if another layer stashed under the name, or none pops it.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> def down(x):
      ...     jpipe.stash("skip", x)
      ...     return x[:, ::2]
      >>> def up(x):
      ...     return jnp.repeat(x, 2, axis=1) + jpipe.pop("skip")
      >>> pipe = jpipe.sequential([down, jnp.sin, up], num_microbatches=2)
      >>> pipe.apply(({}, {}, {}), jnp.ones((4, 6))).shape
      (4, 6)

    References:
      Kim et al., `torchgpipe <https://arxiv.org/abs/2004.09910>`_ (2020), section 3.3.
    """
    frame = _frame("stash", name, "return the value from it and stash it outside")
    skips = frame.skips
    key = Key(name, _namespace.get())
    if key in skips.stashed:
        raise ValueError(
            f"{key} is stashed twice: by {skips.stashed[key]} and {frame.layer}"
        )
    skips.stashed[key] = frame.layer
    skips.values[key] = x


def pop(name: Hashable) -> PyTree:
    """Takes the value that an earlier layer put aside with `stash`.

    Args:
      name: the name under which it was stashed.

    Returns:
      The value.

    Raises:
      RuntimeError: as `stash`.
      ValueError: if no layer before stashed under the name, or another popped it.
    """
    frame = _frame("pop", name, "pop it outside and pass it in")
    skips = frame.skips
    key = Key(name, _namespace.get())
    if key not in skips.values:
        popper = skips.popped.get(key)
        reason = f"popped by {popper} before" if popper else "not stashed before"
        raise ValueError(f"{key} is popped by {frame.layer}, and was {reason}")
    skips.popped[key] = frame.layer
    return skips.values.pop(key)


def _frame(function: str, name: Hashable, advice: str) -> _SkipFrame:
    """The frame of the layer that calls `stash` or `pop`.

    Args:
      function: the name of the function, for errors.
      name: the name that it was passed.
      advice: the text for a call inside of a transformation.
    """
    try:
        hash(name)
    except TypeError:
        raise TypeError(
            f"{function}: the name comes first and must be hashable, such as a str; it "
            f"is {format_type(name)}"
        ) from None
    frame = _current.get()
    if frame is None:
        raise RuntimeError(
            f"{function}({name!r}) is for the layers of a pipeline: call it while "
            f"jpipe.pipeline or jpipe.sequential applies the layer"
        )
    if frame.trace != get_opaque_trace_state(convention="flax"):
        raise RuntimeError(
            f"{function}({name!r}) is called inside a transformation within the layer, "
            f"such as jax.jit, jax.checkpoint, vmap, scan or nn.remat; {advice}"
        )
    return frame


@dataclass(frozen=True)
class Isolated:
    """A layer whose names have a namespace: see `isolate`."""

    layer: Any
    namespace: Hashable


def isolate(layer: Any, namespace: Hashable) -> Isolated:
    """Puts the names that a layer stashes and pops into a namespace.

    Args:
      layer: any layer that `jpipe.pipeline` takes.
      namespace: any hashable; pass it for the layer that stashes and for the layer
        that pops.

    Returns:
      The layer, to be listed in its place.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> def keep(x):
      ...     jpipe.stash("x", x)
      ...     return jnp.sin(x)
      >>> def add(x):
      ...     return x + jpipe.pop("x")
      >>> nested = [(keep, "outer"), (keep, "inner"), (add, "inner"), (add, "outer")]
      >>> pipe = jpipe.sequential([jpipe.isolate(f, name) for f, name in nested])
      >>> pipe.apply(({},) * 4, jnp.zeros(2)).shape
      (2,)
    """
    return Isolated(layer, namespace)

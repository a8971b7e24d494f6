"""Long skip connections: values that go from one layer straight to a later one.

A layer stashes a value under a name and a later layer pops it. In the one trace of all
layers that is a dictionary: the stage that pops a value reads a variable of the stage
that stashes it, with nothing in between. Routes are for errors, marks and plans.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import get_opaque_trace_state

from .._messages import raise_all

PyTree = Any
# The namespace of the layer and the name of the value.
Key = tuple[Hashable, Hashable]


class SkipLayer(NamedTuple):
    """A layer that stashes or pops.

    Attributes:
      layer_index: its index in the list.
      name: its name, for messages.
      stage: the index of its stage.
    """

    layer_index: int
    name: str
    stage: int

    def __str__(self) -> str:
        return f"layer {self.layer_index} ({self.name})"


class SkipRoute(NamedTuple):
    """A value that goes from one stage to another.

    Attributes:
      key: its namespace and name.
      source: the index of the stage that stashes it.
      target: the index of the stage that pops it.
    """

    key: Key
    source: int
    target: int


@dataclass
class Skips:
    """The skip connections of the layers so far.

    Attributes:
      values: the values that were stashed and not popped yet.
      stashed: the layer that stashed each value.
      popped: the layer that popped each value.
    """

    values: dict[Key, PyTree] = field(default_factory=dict)
    stashed: dict[Key, SkipLayer] = field(default_factory=dict)
    popped: dict[Key, SkipLayer] = field(default_factory=dict)

    def routes(self) -> tuple[SkipRoute, ...]:
        """The values that go to another stage, once all layers were applied.

        Raises:
          ValueError: with the values that no layer popped.
        """
        raise_all(
            "the skip connections do not fit",
            [
                f"{skip_name(key)} is stashed by {layer} and never popped"
                for key, layer in self.stashed.items()
                if key not in self.popped
            ],
        )
        return tuple(
            SkipRoute(key, layer.stage, self.popped[key].stage)
            for key, layer in self.stashed.items()
            if layer.stage != self.popped[key].stage
        )


class _SkipFrame(NamedTuple):
    """The layer that is being applied: its namespace, and its trace."""

    skips: Skips
    layer: SkipLayer
    namespace: Hashable
    trace: Any


_current: ContextVar[_SkipFrame | None] = ContextVar("jpipe_skip_frame", default=None)


@contextmanager
def skip_scope(skips: Skips, layer: SkipLayer, namespace: Hashable) -> Iterator[None]:
    """The scope of the call of a layer, in which `stash` and `pop` work.

    Args:
      skips: the skip connections so far, which the layer changes.
      layer: the layer.
      namespace: its namespace.
    """
    trace = get_opaque_trace_state(convention="flax")
    token = _current.set(_SkipFrame(skips, layer, namespace, trace))
    try:
        yield
    finally:
        _current.reset(token)


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
    key = (frame.namespace, name)
    if key in skips.stashed:
        raise ValueError(
            f"{skip_name(key)} is stashed twice: by {skips.stashed[key]} and "
            f"{frame.layer}"
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
    key = (frame.namespace, name)
    if key not in skips.values:
        popper = skips.popped.get(key)
        reason = f"popped by {popper} before" if popper else "not stashed before"
        raise ValueError(
            f"{skip_name(key)} is popped by {frame.layer}, and was {reason}"
        )
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
            f"is a {type(name).__name__}"
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


def skip_name(key: Key) -> str:
    """The name of a value in messages and plans."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"

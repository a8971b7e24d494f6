"""Long skip connections: values that go from one layer straight to a later one.

A layer stashes a value under a name and a later layer pops it. In the one trace of all
layers that is a dictionary: the stage that pops a value reads what another stage made,
with nothing in between. The routes by name are for errors, marks and plans.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import get_opaque_trace_state

from .._faults import refuse

PyTree = Any
# The namespace of the layer, then the name: what a value is known by.
Key = tuple[Hashable, Hashable]


@dataclass
class Frame:
    """What the layer that is being applied may pop, and what it does.

    Attributes:
      values: what was stashed and not popped yet; the layer changes it.
      namespace: that of the layer.
      guess: what an unknown name pops, while faults are collected; else ``None``.
      trace: the trace of the layer, to notice inner ones; ``None``: do not look.
      stashed: the keys that the layer stashed, in order.
      popped: the keys that it popped.
      unknown: the keys that it popped though they were not there.
    """

    values: dict[Key, PyTree]
    namespace: Hashable
    guess: PyTree = None
    trace: Any = None
    stashed: list[Key] = field(default_factory=list)
    popped: list[Key] = field(default_factory=list)
    unknown: list[Key] = field(default_factory=list)


_current: ContextVar[Frame | None] = ContextVar("jpipe_skip_frame", default=None)


@contextmanager
def applying(
    values: dict[Key, PyTree],
    namespace: Hashable,
    *,
    guess: PyTree = None,
    watch: bool = True,
) -> Iterator[Frame]:
    """The scope of one layer's call: here `stash` and `pop` know what is meant."""
    trace = get_opaque_trace_state(convention="flax") if watch else None
    frame = Frame(values, namespace, guess, trace)
    token = _current.set(frame)
    try:
        yield frame
    finally:
        _current.reset(token)
        # Its keys may outlive the trace of the layer, its values may not.
        frame.values, frame.guess, frame.trace = {}, None, None


def stash(name: Hashable, x: PyTree) -> None:
    """Puts a value aside for a later layer, which takes it with `pop`.

    Call it inside any layer: linen, nnx or a function. If the later layer is on
    another device, the value goes there at once and by itself, and its gradient comes
    back the same way. `isolate` lets one class of blocks use a name many times.

    Args:
      name: any hashable name; each is stashed once and popped once.
      x: any pytree of arrays, or ``None``.

    Raises:
      RuntimeError: outside of a pipeline's layer, or inside a transformation of JAX
        within one.
      TypeError: if the name is not hashable.

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
    key = frame.namespace, name
    frame.stashed.append(key)
    frame.values[key] = x


def pop(name: Hashable) -> PyTree:
    """Takes what an earlier layer put aside with `stash`.

    Args:
      name: the name that it was given.

    Returns:
      The value.

    Raises:
      RuntimeError: as `stash`.
      ValueError: when a pipeline first sees its input, if a name is popped and not
        stashed, stashed and not popped, or stashed twice; the message lists all.
    """
    frame = _frame("pop", name, "pop it outside and pass it in")
    key = frame.namespace, name
    frame.popped.append(key)
    if key in frame.values:
        return frame.values.pop(key)
    frame.unknown.append(key)
    if frame.guess is None:
        raise ValueError(f"pop({name!r}): nothing was stashed under this name before")
    return frame.guess


def _frame(function: str, name: Hashable, instead: str) -> Frame:
    _check_hashable(f"{function}({name!r})", name, "name")
    frame = _current.get()
    if frame is None:
        raise RuntimeError(
            f"{function}({name!r}) is for the layers of a pipeline: call it while "
            f"jpipe.pipeline or jpipe.sequential applies the layer"
        )
    if frame.trace is not None and (
        frame.trace != get_opaque_trace_state(convention="flax")
    ):
        raise RuntimeError(
            f"{function}({name!r}) is called inside a transformation within the layer, "
            f"such as jax.jit, jax.checkpoint, vmap, scan or nn.remat; {instead}"
        )
    return frame


def _check_hashable(call: str, value: Any, what: str) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{call}: needs a hashable {what}, such as a string; this is a "
            f"{type(value).__name__}"
        ) from None


@dataclass(frozen=True)
class Isolated:
    """A layer whose names are its own: see `isolate`."""

    layer: Any
    namespace: Hashable


def isolate(layer: Any, namespace: Hashable) -> Isolated:
    """Gives the names that a layer stashes and pops a namespace.

    Args:
      layer: whatever `jpipe.pipeline` takes as a layer.
      namespace: any hashable; give it to the layer that stashes and to the one that
        pops.

    Returns:
      The layer, to be listed in its place.

    Raises:
      TypeError: if the namespace is not hashable.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> def keep(x):
      ...     jpipe.stash("x", x)
      ...     return jnp.sin(x)
      >>> def add(x):
      ...     return x + jpipe.pop("x")
      >>> nested = [(keep, "outer"), (keep, "inner"), (add, "inner"), (add, "outer")]
      >>> pipe = jpipe.sequential([jpipe.isolate(f, at) for f, at in nested])
      >>> pipe.apply(({},) * 4, jnp.zeros(2)).shape
      (2,)
    """
    _check_hashable(f"isolate(..., {namespace!r})", namespace, "namespace")
    return Isolated(layer, namespace)


class Route(NamedTuple):
    """A value that goes from one stage to another.

    Attributes:
      key: what it is known by.
      source: the stage that stashes it.
      target: the stage that pops it.
    """

    key: Key
    source: int
    target: int


class Use(NamedTuple):
    """What one layer does with the skip connections.

    Attributes:
      layer: its number.
      name: its name, for messages.
      stage: the stage that it is in.
      frame: what it stashed and popped.
    """

    layer: int
    name: str
    stage: int
    frame: Frame


def routes(uses: Sequence[Use], *, complete: bool = True) -> tuple[Route, ...]:
    """Where every value goes.

    Args:
      uses: those of all layers, in order.
      complete: whether all layers are there: else what is not popped yet may be later.

    Returns:
      The values that go to another stage, in the order in which they were stashed.

    Raises:
      ValueError: with every fault.
    """
    stashed: dict[Key, Use] = {}
    popped: dict[Key, Use] = {}
    faults = []
    for use in uses:
        for key in use.frame.stashed:
            if key in stashed:
                faults.append(
                    f"{label(key)} is stashed twice: by {_by(stashed[key], use)}"
                )
            stashed.setdefault(key, use)
        for key in use.frame.popped:
            if key in popped:
                faults.append(
                    f"{label(key)} is popped twice: by {_by(popped[key], use)}"
                )
            popped.setdefault(key, use)
    for key, use in popped.items():
        if key not in stashed:
            faults.append(f"{label(key)} is popped by {_by(use)} and never stashed")
        elif stashed[key].layer > use.layer or key in use.frame.unknown:
            faults.append(
                f"{label(key)} is popped by {_by(use)} before it is stashed by "
                f"{_by(stashed[key])}"
            )
    for key, use in stashed.items():
        if complete and key not in popped:
            faults.append(f"{label(key)} is stashed by {_by(use)} and never popped")
    refuse("the skip connections do not fit", faults)
    return tuple(
        Route(key, use.stage, popped[key].stage)
        for key, use in stashed.items()
        if use.stage != popped[key].stage
    )


def label(key: Key) -> str:
    """How messages and plans call a value."""
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"


def _by(*uses: Use) -> str:
    return " and ".join(f"layer {use.layer} ({use.name})" for use in uses)

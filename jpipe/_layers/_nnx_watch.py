"""What of nnx modules is seen while a layer is traced: see `_watch`.

An nnx module may be of a class of the user's own, which stays what it is. Flax's own
dropouts and attentions are given a class that notes what they do; a batch norm is told
by its running mean, which it reads, and writes if it is trained.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from . import _batchnorm, _watch
from ._nnx_rngs import dotted

_SWITCHES = ("deterministic", "use_running_average")
# A class is the same for all threads.
_lock = threading.RLock()


def is_frozen(node: Any) -> bool:
    """Whether the user set a node to evaluation, as `nnx.Module.eval` does."""
    return any(getattr(node, name, None) is True for name in _SWITCHES)


def holds_frozen(module: nnx.Module) -> bool:
    """Whether the user set a part of a module to evaluation."""
    return any(is_frozen(node) for _, node in nnx.iter_graph(module, graph=True))


def train(module: nnx.Module) -> None:
    """Sets a module to training, but for what the user set.

    Args:
      module: the module, which this changes.
    """
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.Module):
            for name in _SWITCHES:
                if name in vars(node) and getattr(node, name) is None:
                    setattr(node, name, False)


# Of the classes that are watched what they are called, and where their rate is.
_WATCHED = {
    nnx.Dropout: ("dropout", "rate"),
    nnx.MultiHeadAttention: ("attention", "dropout_rate"),
}


@functools.cache
def _noting(kind: type) -> type | None:
    """A class that does what the given one does and notes it; else ``None``."""
    found = next((_WATCHED[base] for base in kind.__mro__ if base in _WATCHED), None)
    if found is None:
        return None
    called, rate = found
    plain: Any = kind.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        _note(self, called, options.get("deterministic"), getattr(self, rate))
        return plain(self, *args, **options)

    names = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__qualname__": kind.__qualname__})


def _note(node: Any, kind: str, switch: bool | None, rate: float) -> None:
    if record := _watch.current():
        switch = node.deterministic if switch is None else switch
        _watch.note(record, node.path, kind, switch, rate, node.frozen)


def watch(module: nnx.Module, train: bool) -> None:
    """Lets the parts of a module note what they do.

    In training batch norms leave the statistics of the micro-batch: see `_batchnorm`.

    Args:
      module: the module, which this changes.
      train: whether it is trained.
    """
    for path, node in nnx.iter_graph(module, graph=True):
        if noting := _noting(type(node)):
            # A class goes through nnx.remat and nnx.scan.
            object.__setattr__(node, "__class__", noting)
            setattr(node, "path", tuple(path))  # noqa: B010
            setattr(node, "frozen", is_frozen(node))  # noqa: B010
        elif isinstance(node, nnx.BatchNorm):
            mark = None
            if train:
                called = dotted(path) or type(node).__name__
                mark = _batchnorm.meet(called, node.momentum)
            if mark:
                node.momentum = 0.0
            _watch_norm(node, tuple(path), mark)


def _watch_norm(
    norm: nnx.BatchNorm,
    path: tuple[Any, ...],
    mark: Callable[[jax.Array], jax.Array] | None,
) -> None:
    """Lets a batch norm tell when its running mean is read, and when it is written."""
    frozen = is_frozen(norm)

    def read(variable: nnx.Variable, value: jax.Array) -> jax.Array:
        del variable
        record = _watch.current()
        if record and (*path, 0) not in record.met:
            _watch.note(record, path, "batch norm", True, 1, frozen)
        return value

    def write(variable: nnx.Variable, value: jax.Array) -> jax.Array:
        del variable
        if record := _watch.current():
            record.met[*path, 0].trained = True
        return mark(value) if mark else value

    for hook, ours in (("on_get_value", read), ("on_set_value", write)):
        own = norm.mean.get_metadata().get(hook, ())
        own = own if isinstance(own, tuple) else (own,)
        norm.mean.set_metadata(**{hook: (*own, ours)})


def leaves_open(module: nnx.Module) -> bool:
    """Whether a method of a class in a module has a parameter that may be a switch."""
    return any(
        isinstance(parameter.default, bool)
        for kind, _, method in _methods(module)
        if not _watch.is_flax(kind)
        for parameter in inspect.signature(method).parameters.values()
    )


@contextmanager
def looking(module: nnx.Module) -> Iterator[None]:
    """The scope in which all calls of methods inside a module are seen.

    nnx has nothing like `flax.linen.intercept_methods`: the methods of its classes are
    others here, and do the same where nobody looks.
    """
    with _lock:
        found = _methods(module)
        try:
            for kind, name, method in found:
                setattr(kind, name, _seen(kind, method))
            yield
        finally:
            for kind, name, method in found:
                setattr(kind, name, method)


def _methods(module: nnx.Module) -> list[tuple[type, str, Callable[..., Any]]]:
    """The methods of the classes of a module and its parts; of Flax's, the call."""
    classes = {
        kind
        for _, node in nnx.iter_graph(module, graph=True)
        if isinstance(node, nnx.Module)
        for kind in type(node).__mro__
        if issubclass(kind, nnx.Module) and kind is not nnx.Module
    }
    return [
        (kind, name, method)
        for kind in classes
        for name, method in vars(kind).items()
        if isinstance(method, types.FunctionType)
        and (name == "__call__" or not (name.startswith("__") or _watch.is_flax(kind)))
    ]


def _seen(kind: type, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        record = _watch.current()
        if record is None:
            return method(self, *args, **keywords)
        chosen = [False] if is_frozen(self) else []
        own = types.MethodType(method, self)
        return _watch.enter(
            record,
            (None, kind.__name__, method.__name__),
            chosen,
            method,
            _watch.bind(own, args, keywords),
            lambda args, keywords: own(*args, **keywords),
            (args, keywords),
        )

    return call

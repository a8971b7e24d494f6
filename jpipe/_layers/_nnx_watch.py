"""What of nnx modules is seen while a layer is traced: see `_watch`.

A module, its class and its attributes stay what they are: the calls of Flax's own
dropouts, attentions and batch norms are others while a layer is traced, and do the same
where nobody looks. A batch norm is told by its running mean too, which it reads, and
writes if it is trained.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from . import _batchnorm, _switches, _watch
from ._nnx_rngs import AnyPath, dotted
from ._others import may_switch

SWITCHES = ("deterministic", "use_running_average")
_HOOKS = ("on_get_value", "on_set_value")
# A class is the same for all threads.
_lock = threading.RLock()


def is_frozen(node: Any) -> bool:
    """Whether the user set a node to evaluation, as `nnx.Module.eval` does."""
    return any(getattr(node, name, None) is True for name in SWITCHES)


def frozen_by(module: nnx.Module) -> set[str]:
    """By which attributes the user set parts of a module to evaluation."""
    nodes = [node for _, node in nnx.iter_graph(module, graph=True)]
    return {n for n in SWITCHES if any(getattr(x, n, None) is True for x in nodes)}


def prepare(module: nnx.Module, train: bool, place: tuple[Any, ...] = ()) -> None:
    """Sets a module to training or to evaluation, and lets its parts note what they do.

    What the user set stays in training. There batch norms leave the statistics of the
    micro-batch: see `_batchnorm`.

    Args:
      module: the module, which this changes.
      train: whether it is trained.
      place: where in the layer it is.
    """
    _train(module) if train else _evaluate(module)
    momenta: dict[int, Any] = {}  # by whose statistics a norm moves
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, tuple(_WATCHED)):
            # Attributes go through nnx.remat and nnx.scan; no user's have such names.
            setattr(node, "_jpipe_path", AnyPath((*place, *path)))  # noqa: B010
            setattr(node, "_jpipe_frozen", is_frozen(node))  # noqa: B010
        elif isinstance(node, nnx.BatchNorm):
            known = id(node.mean)
            if known not in momenta:
                momenta[known] = node.momentum
                _watch_norm(node, (*place, *path), train)
            elif momenta[known] != node.momentum:
                raise _batchnorm.not_left_alone(dotted((*place, *path)))


def _evaluate(module: nnx.Module) -> None:
    """Sets all of a module to evaluation, as `nnx.Module.eval` and `nnx.view` do.

    The one sets attributes, the other calls what a class of the user says for it.
    """
    evaluate = inspect.signature(module.eval)
    takes_more = any(
        parameter.default is parameter.empty and parameter.kind not in _switches.VARIOUS
        for parameter in evaluate.parameters.values()
    )  # then it is not that of Flax, but say a polynomial's
    nnx.Module.eval(module) if takes_more else module.eval()
    for _, node in nnx.iter_graph(module, graph=True):
        view = getattr(type(node), "set_view", None)
        if view is None or getattr(view, "__module__", "").startswith("flax."):
            continue
        taken = inspect.signature(view).parameters
        view(node, **{name: True for name in SWITCHES if name in taken})


def _train(module: nnx.Module) -> None:
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.Module):
            for name in SWITCHES:
                if name in vars(node) and getattr(node, name) is None:
                    setattr(node, name, False)


# Of the classes that are watched what they are called, and where their rate is.
_WATCHED = {
    nnx.Dropout: ("dropout", "rate"),
    nnx.MultiHeadAttention: ("attention", "dropout_rate"),
}


_NOTING = (*_WATCHED, nnx.BatchNorm)


class _Running(NamedTuple):
    """A call of Flax's batch norm: its momentum, and whether it is masked."""

    momentum: Any
    masked: bool


_running: ContextVar[_Running | None] = ContextVar("jpipe_nnx_norm", default=None)


@contextmanager
def noting() -> Iterator[None]:
    """The scope in which Flax's own calls note what they do.

    Those of batch norms leave the statistics of the micro-batch.
    """
    with _lock:
        plain = {kind: kind.__call__ for kind in _NOTING}
        try:
            for kind, call in plain.items():
                made = _norm_call(call) if kind is nnx.BatchNorm else _call(kind, call)
                setattr(kind, "__call__", made)  # noqa: B010
            yield
        finally:
            for kind, call in plain.items():
                setattr(kind, "__call__", call)  # noqa: B010


def _call(kind: type, plain: Callable[..., Any]) -> Callable[..., Any]:
    called, rate = _WATCHED[kind]

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        record, path = _watch.current(), getattr(self, "_jpipe_path", None)
        if record and path is not None:
            switch = options.get("deterministic")
            switch = self.deterministic if switch is None else switch
            how_much, frozen = getattr(self, rate), self._jpipe_frozen
            _watch.note(record, path.parts, called, switch, how_much, frozen)
        return plain(self, *args, **options)

    return call


def _norm_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        # One that the call made itself has statistics of its own.
        if not any(map(_is_ours, _hooks(self.mean, "on_set_value"))):
            return plain(self, *args, **options)
        momentum = self.momentum
        token = _running.set(_Running(momentum, options.get("mask") is not None))
        # As itself nnx would refuse to be changed inside of its transformations.
        merged = _batchnorm.is_recording()
        object.__setattr__(self, "momentum", 0.0 if merged else momentum)
        try:
            y = plain(self, *args, **options)
            return _batchnorm.returned(y, *args[:1] or [options["x"]])
        finally:
            object.__setattr__(self, "momentum", momentum)
            _running.reset(token)

    return call


def _watch_norm(norm: nnx.BatchNorm, path: tuple[Any, ...], train: bool) -> None:
    """Lets a batch norm tell when its statistics are read, and when written."""
    called, frozen = dotted(path) or type(norm).__name__, is_frozen(norm)
    momentum = norm.momentum
    mark = _batchnorm.meet(called, momentum) if train else None
    # What a user's own hook would be given is not the running statistics.
    hooked = any(_hooks(x, hook) for x in (norm.mean, norm.var) for hook in _HOOKS)

    def read(variable: nnx.Variable, value: jax.Array) -> jax.Array:
        del variable
        record = _watch.current()
        if record and (*path, 0) not in record.met:
            _watch.note(record, path, "batch norm", True, 1, frozen)
        return value

    def write(variable: nnx.Variable, value: jax.Array) -> jax.Array:
        if record := _watch.current():
            record.met[*path, 0].trained = True
        running = _running.get()
        if running and not train:
            raise _batchnorm.in_evaluation(called)
        dtype = variable.get_raw_value().dtype
        if not _batchnorm.is_recording():
            return value.astype(dtype) if running else value
        if hooked or running is None or running.momentum is not momentum:
            raise _batchnorm.not_left_alone(called)
        if running.masked:
            raise _batchnorm.masked(called)
        if jnp.iscomplexobj(value) and not jnp.iscomplexobj(variable.get_raw_value()):
            raise _batchnorm.not_real(called)
        # Of another dtype, nnx would scatter it into what there is.
        return mark(value.astype(dtype)) if mark else value

    for statistic in (norm.mean, norm.var):
        for hook, ours in zip(_HOOKS, (read, write), strict=True):
            statistic.set_metadata(**{hook: (*_hooks(statistic, hook), ours)})


def unwatch(variable: nnx.Variable) -> None:
    """Takes from a variable what `prepare` has given it."""
    for hook in _HOOKS:
        hooks = _hooks(variable, hook)
        own = tuple(each for each in hooks if not _is_ours(each))
        if own:
            variable.set_metadata(**{hook: own})
        elif hooks:
            variable.del_metadata(hook)


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == __name__


def _hooks(variable: nnx.Variable, hook: str) -> tuple[Callable[..., Any], ...]:
    own = variable.get_metadata().get(hook, ())
    return own if isinstance(own, tuple) else (own,)


def leaves_open(module: nnx.Module, train: bool) -> bool:
    """Whether a method of a class in a module has a parameter that may be a switch."""
    return any(
        (train and may_switch(parameter.default))
        or _switches.is_amiss(parameter.name, parameter.default, train)
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
                setattr(kind, name, _seen(kind, name, method))
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
        if issubclass(kind, nnx.Module) and kind not in (nnx.Module, *_NOTING)
    }
    return [
        (kind, name, method)
        for kind in classes
        for name, method in vars(kind).items()
        if _is_method(method)
        and (name == "__call__" or not (name.startswith("__") or _watch.is_flax(kind)))
    ]


def _is_method(value: Any) -> bool:
    """Whether a class gives it itself; it may be what `flax.nnx.jit` made of one."""
    binds = hasattr(type(value), "__get__")
    unbound = isinstance(value, staticmethod | classmethod)
    return binds and not unbound and inspect.isfunction(inspect.unwrap(value))


def _seen(kind: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        record = _watch.current()
        if record is None:
            return method(self, *args, **keywords)
        chosen = [False] if is_frozen(self) else []
        own = types.MethodType(method, self)
        return _watch.enter(
            record,
            (None, kind.__name__, name),
            chosen,
            method,
            _watch.bind(own, args, keywords),
            lambda args, keywords: own(*args, **keywords),
            (args, keywords),
        )

    return call

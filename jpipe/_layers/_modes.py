"""A warning of a dropout or a norm of Flax that is off in training by a default.

A model whose blocks leave a switch of another name at its default would be trained
without dropout, and nothing would show it. While a layer is traced for training, the
calls of Flax's own dropouts, norms and attentions are seen: in linen by
`flax.linen.intercept_methods`, of nnx by its three classes. What the user set, by an
attribute or an argument of a known name, is the user's choice.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flax import linen, nnx

from .._warn import warn
from . import _switches
from ._patched import patched
from ._slots import inner

# Of each class how it is called, its switch, and the attribute that holds its rate.
_LINEN: dict[type, tuple[str, str, str]] = {
    linen.Dropout: ("dropout", "deterministic", "rate"),
    linen.BatchNorm: ("batch norm", "use_running_average", ""),
    linen.MultiHeadDotProductAttention: ("attention", "deterministic", "dropout_rate"),
}
_NNX: dict[type, tuple[str, str, str]] = {
    nnx.Dropout: ("dropout", "deterministic", "rate"),
    nnx.BatchNorm: ("batch norm", "use_running_average", ""),
    nnx.MultiHeadAttention: ("attention", "deterministic", "dropout_rate"),
}


@dataclass
class _Watch:
    """The calls around the one that runs.

    Attributes:
      calls: of each what the user set (training or not; ``None``: nothing), and which
        parameters were left at a default that may be a switch, as text.
      off: the parts that are off, and the defaults that may have decided it.
    """

    calls: list[tuple[bool | None, list[str]]] = field(default_factory=list)
    off: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, path: Sequence[Any]) -> None:
        """Notes a part that is off, if a default decided it."""
        found: list[str] = []
        for chosen, left in reversed(self.calls):
            if chosen is not None:
                found = found if chosen else []
                break
            found += left
        if found:
            self.off[" ".join([kind, "/".join(map(str, path))]).strip()] = found


_current: ContextVar[_Watch | None] = ContextVar("jpipe_modes", default=None)


@contextmanager
def watching(
    call: str, known: Sequence[str], asking: Sequence[inspect.Parameter], train: bool
) -> Iterator[None]:
    """The scope in which a layer is traced; one warning says which parts are off.

    Args:
      call: what the layer calls, for the message.
      known: the switches that it receives.
      asking: the parameters of the call.
      train: whether this is training; else nothing is watched.
    """
    if not train:
        yield
        return
    left = [_text(call, p) for p in asking if p.name not in known and _may_switch(p)]
    watch = _Watch([(True if known else None, left)])
    token = _current.set(watch)
    try:
        with linen.intercept_methods(_intercept), patched(_NNX, _seen):
            yield
    finally:
        _current.reset(token)
    if watch.off:
        lines = [f"  * {part}: {', '.join(by)}" for part, by in watch.off.items()]
        warn(
            "off in training, as a parameter was left at its default:\n"
            + "\n".join(lines)
            + "\nlist jpipe.layer(module, lambda module, x, train: module(x, "
            "name=train)) with the name of the parameter, call it train, or set the "
            "part itself, as nn.Dropout(rate, deterministic=True) does"
        )


def _text(call: str, parameter: inspect.Parameter) -> str:
    return f"{call} left {parameter.name}={parameter.default}"


def _may_switch(parameter: inspect.Parameter) -> bool:
    known = parameter.default is None and _switches.is_switch(parameter)
    return isinstance(parameter.default, bool | str) or known


def _is_off(
    module: Any, known: tuple[str, str, str], bound: inspect.BoundArguments | None
) -> bool:
    """Whether a part is evaluated, though it would drop or normalize in training."""
    _, switch, rate = known
    value = bound and bound.arguments.get(switch)
    value = getattr(module, switch, None) if value is None else value
    is_on = not rate or getattr(module, rate) != 0
    return is_on and isinstance(value, _switches.BOOL) and bool(value)


def _bind(call: Any, args: Any, keywords: Any) -> inspect.BoundArguments | None:
    try:
        return inspect.signature(call).bind(*args, **keywords)
    except (TypeError, ValueError):
        return None


def _intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: notes each call of a method."""
    watch, module = _current.get(), context.module
    bound = _bind(context.orig_method, args, keywords)
    if watch is None or bound is None or context.method_name == "setup":
        return call(*args, **keywords)
    if context.method_name == "__call__":
        for kind, known in _LINEN.items():
            if isinstance(module, kind) and _is_off(module, known, bound):
                watch.note(known[0], inner(module.path) if module.scope else ())
    chosen = _chosen(module, bound)
    own = inspect.unwrap(getattr(context.orig_method, "func", context.orig_method))
    left = []
    if not (getattr(own, "__module__", None) or "").startswith("flax."):
        name = f"{type(module).__name__}.{context.method_name}"
        left = [
            _text(name, p)
            for p in bound.signature.parameters.values()
            if p.name not in bound.arguments and _may_switch(p)
        ]
    watch.calls.append((chosen, left))
    try:
        return call(*args, **keywords)
    finally:
        watch.calls.pop()


def _chosen(module: Any, bound: inspect.BoundArguments) -> bool | None:
    """What the user set for a call, by an argument or by an attribute."""
    for name in _switches.switches(True):
        value = bound.arguments.get(name)
        if (
            value is None
            and _switches.is_set(module, name)
            and not _switches.is_default(module, name)
        ):
            value = getattr(module, name)
        if isinstance(value, _switches.BOOL):
            return _switches.means_training(name, value)
    return None


def _seen(
    kind: type, call: Callable[..., Any], module: Any, args: Any, keywords: Any
) -> Any:
    """Notes a call of a dropout, a norm or an attention of nnx."""
    watch, known = _current.get(), _NNX[kind]
    # `eval` sets the attribute: that is the user's choice.
    is_set = getattr(module, known[1], None) is True
    bound = _bind(call, (module, *args), keywords)
    if watch and not is_set and _is_off(module, known, bound):
        watch.note(known[0], [type(module).__name__])
    return call(module, *args, **keywords)

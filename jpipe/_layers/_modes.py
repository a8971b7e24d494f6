"""A warning of a dropout or a norm of Flax that is off in training by a default.

A model whose blocks leave a switch of another name at its default would be trained
without dropout, and nothing would show it. While a layer is traced for training, the
calls of Flax's own dropouts, norms and attentions are seen: in linen by
`flax.linen.intercept_methods`, of nnx by its three classes. What the user set, by an
attribute or an argument, is the user's choice.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flax import linen, nnx

from .._warn import warn
from . import _switches
from ._patched import patched
from ._slots import inner

# Of each class how it is called, its switch, and the attribute that holds its rate.
_DROPOUT = "dropout", "deterministic", "rate"
_NORM = "batch norm", "use_running_average", ""
_ATTENTION = "attention", "deterministic", "dropout_rate"
_LINEN: dict[type, tuple[str, str, str]] = {
    linen.Dropout: _DROPOUT,
    linen.BatchNorm: _NORM,
    linen.MultiHeadDotProductAttention: _ATTENTION,
}
_NNX: dict[type, tuple[str, str, str]] = {
    nnx.Dropout: _DROPOUT,
    nnx.BatchNorm: _NORM,
    nnx.MultiHeadAttention: _ATTENTION,
}


@contextmanager
def watching(
    call: str,
    asking: Sequence[inspect.Parameter],
    offered: Sequence[str],
    train: bool,
) -> Iterator[None]:
    """The scope in which a layer is traced; one warning says which parts are off.

    Args:
      call: what is called, for the message.
      asking: the parameters of the call that are open; of linen they are seen.
      offered: those that it receives.
      train: whether this is training; else nothing is watched.
    """
    if not train:
        yield
        return
    is_given = bool({*offered} - {"rngs"})
    # Of the calls around, whether each is given a switch, and which it leaves.
    calls = [(is_given, [] if is_given else _left(call, asking))]
    off: dict[str, list[str]] = {}

    def note(kind: str, path: Sequence[Any]) -> None:
        found: list[str] = []
        for is_given, left in reversed(calls):
            found += left
            if is_given:
                break
        if found:
            off[" ".join([kind, "/".join(map(str, path))]).strip()] = found

    def of_linen(call: Callable[..., Any], args: Any, keywords: Any, at: Any) -> Any:
        module, given = at.module, _bind(at.orig_method, args, keywords)
        for kind, (name, switch, rate) in _LINEN.items():
            if isinstance(module, kind) and at.method_name == "__call__":
                value = given.arguments.get(switch)
                value = getattr(module, switch) if value is None else value
                if _is_off(module, value, rate):
                    note(name, inner(module.path))
        open_ = [
            p
            for name, p in given.signature.parameters.items()
            if name not in given.arguments and not _switches.is_set(module, name)
        ]
        is_flaxs = type(module).__module__.startswith("flax.")
        is_given = any(isinstance(value, bool) for value in given.arguments.values())
        # Who is given a switch by its name leaves other options, not that.
        has_switch = any(
            isinstance(given.arguments.get(name), _switches.BOOL)
            for name in _switches.switches(True)
        )
        left = _left(f"{type(module).__name__}.{at.method_name}", open_)
        calls.append((is_given, [] if is_flaxs or has_switch else left))
        try:
            return call(*args, **keywords)
        finally:
            calls.pop()

    def of_nnx(kind: type, call: Any, module: Any, args: Any, keywords: Any) -> Any:
        name, switch, rate = _NNX[kind]
        value = _bind(call, (module, *args), keywords).arguments.get(switch)
        # `eval` sets the attribute: that is the user's choice.
        if getattr(module, switch) is not True and _is_off(module, value, rate):
            note(name, [type(module).__name__])
        return call(module, *args, **keywords)

    with linen.intercept_methods(of_linen), patched(_NNX, of_nnx):
        yield
    if off:
        parts = "".join(f"\n  * {part}: {', '.join(by)}" for part, by in off.items())
        warn(
            f"off in training, as a parameter was left at its default:{parts}\nlist "
            f"jpipe.layer(module, lambda module, x, train: module(x, name=train)) with "
            f"the name of the parameter, call it train, or set the part itself, as "
            f"nn.Dropout(rate, deterministic=True) does"
        )


def _left(call: str, asking: Sequence[inspect.Parameter]) -> list[str]:
    """The parameters with a default that may be a switch, as text."""
    may = (p for p in asking if isinstance(p.default, bool | str))
    return [f"{call} left {p.name}={p.default}" for p in may]


def _bind(call: Any, args: Any, keywords: Any) -> inspect.BoundArguments:
    return inspect.signature(call).bind_partial(*args, **keywords)


def _is_off(module: Any, value: Any, rate: str) -> bool:
    """Whether a part is evaluated, though it would drop or normalize in training."""
    is_on = not rate or getattr(module, rate) != 0
    return is_on and isinstance(value, _switches.BOOL) and bool(value)

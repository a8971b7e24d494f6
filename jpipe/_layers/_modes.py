"""Warnings of a layer that is trained without knowing it.

A model whose blocks leave a switch of another name at its default, or look for one in
``**kwargs``, would be trained without dropout, and nothing would show it. While a layer
is traced for training, the calls of Flax's own dropouts, norms and attentions are seen:
in linen by `flax.linen.intercept_methods`, of nnx by its three classes. What the user
set, by an attribute or an argument, is the user's choice.
"""

import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from flax import linen, nnx

from .._messages import warn
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


# Of parts of a name that tells a switch from another option.
_HINTS = "train", "eval", "infer", "test", "determ", "drop", "mode", "average"


class Default(NamedTuple):
    """A parameter that a call left at its default, which may be a switch.

    Attributes:
      call: what was called, such as ``"Block.__call__"``.
      name: the parameter; ``"**kwargs"`` of all that a call takes by name.
      value: its default.
      is_open: whether who calls the layer can set it.
    """

    call: str
    name: str
    value: bool | str
    is_open: bool = False

    def __str__(self) -> str:
        if self.is_of_keywords:
            return f"{self.call} takes {self.name}"
        return f"{self.call} left {self.name}={self.value}"

    @property
    def is_of_keywords(self) -> bool:
        """Whether it is no switch itself, and there may be one in it."""
        return self.name.startswith("**")

    @property
    def switch(self) -> str:
        """The argument that sets it in training, such as ``is_train=train``."""
        if isinstance(self.value, str):
            return f"{self.name}=... if train else {self.value!r}"
        return f"{self.name}={'not train' if self.value else 'train'}"

    @property
    def is_likely(self) -> bool:
        """Whether its name is that of a switch."""
        return any(hint in self.name.lower() for hint in _HINTS)


class Call(NamedTuple):
    """A call of a layer, and the switches that it takes.

    Attributes:
      name: what messages call it, such as ``"Block.__call__"``.
      asking: its parameters that are open.
      offered: the names of those that it is given.
      keywords: the name of its ``**kwargs``, in which it may look for a switch; else
        empty: see `_switches.keywords`.
      passing: how to set a parameter, with ``{}`` in its place; empty of a function.
      path: of linen that of the module which is called, whose defaults are seen there.
    """

    name: str
    asking: Sequence[inspect.Parameter]
    offered: Collection[str]
    keywords: str = ""
    passing: str = ""
    path: Sequence[Any] | None = None

    @property
    def is_given(self) -> bool:
        """Whether it receives a switch."""
        return bool({*self.offered} - {"rngs"})

    @property
    def defaults(self) -> list[Default]:
        """The parameters that it leaves at a default; of linen most are seen later."""
        left: list[Default] = []
        if not self.is_given and self.path is None:
            left = _defaults(self.name, self.asking, is_open=bool(self.passing))
        if not self.is_given and self.keywords:
            left.append(Default(self.name, f"**{self.keywords}", ""))
        return left


class Watch:
    """Watches the calls of one layer, and warns once of what it finds."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    @contextmanager
    def __call__(self, layer: Call, train: bool) -> Iterator[None]:
        """The scope in which a layer is traced; only training is watched."""
        if not train:
            yield
            return
        # Of the calls around, whether each is given a switch, and what it leaves.
        calls = [(layer.is_given, layer.defaults)]
        off: dict[str, list[Default]] = {}
        num_right = 0  # parts that are on, or off as the user chose

        def note(kind: str, path: Sequence[Any], is_off: bool) -> None:
            nonlocal num_right
            num_right += not is_off
            left: list[Default] = []
            for is_given, defaults in reversed(calls):
                left += defaults
                if is_given:
                    break
            if is_off and left:
                off[" ".join([kind, "/".join(map(str, path))]).strip()] = left

        def of_linen(call: Any, args: Any, keywords: Any, at: Any) -> Any:
            module, arguments = at.module, _bind(at.orig_method, args, keywords)
            for kind, (name, switch, rate) in _LINEN.items():
                if isinstance(module, kind) and at.method_name == "__call__":
                    value = arguments.arguments.get(switch)
                    value = getattr(module, switch) if value is None else value
                    note(name, inner(module.path), _is_off(module, value, rate))
            calls.append(_of_linen(layer, at, arguments))
            try:
                return call(*args, **keywords)
            finally:
                calls.pop()

        def of_nnx(kind: type, call: Any, module: Any, args: Any, keywords: Any) -> Any:
            name, switch, rate = _NNX[kind]
            value = _bind(call, (module, *args), keywords).arguments.get(switch)
            # `eval` sets the attribute: that is the user's choice.
            is_chosen = getattr(module, switch) is True
            is_off = not is_chosen and _is_off(module, value, rate)
            note(name, [type(module).__name__], is_off)
            return call(module, *args, **keywords)

        with linen.intercept_methods(of_linen), patched(_NNX, of_nnx):
            yield
        if off:
            self._warn(_of_parts(layer, off))
        elif layer.keywords and not layer.is_given and not num_right:
            self._warn(_of_keywords(layer))

    def _warn(self, text: str) -> None:
        if text not in self._texts:
            self._texts.add(text)
            warn(text)


def _of_linen(
    layer: Call, at: Any, arguments: inspect.BoundArguments
) -> tuple[bool, list[Default]]:
    """Whether a call of linen is given a switch, and what it leaves."""
    module, values = at.module, arguments.arguments
    parameters = [
        parameter
        for name, parameter in arguments.signature.parameters.items()
        if name not in values and not _switches.is_set(module, name)
    ]
    # Who is given a switch by its name leaves other options, not that.
    has_switch = any(
        isinstance(values.get(name), _switches.BOOL)
        for name in _switches.switches(True)
    )
    is_given = any(isinstance(value, bool) for value in values.values())
    if has_switch or type(module).__module__.startswith("flax."):
        return is_given, []
    name = f"{type(module).__name__}.{at.method_name}"
    is_open = name == layer.name and module.path == layer.path
    return is_given, _defaults(name, parameters, is_open=is_open)


def _of_parts(layer: Call, off: Mapping[str, Sequence[Default]]) -> str:
    """The warning of parts that are off."""
    parts = "".join(
        f"\n  * {part}: {', '.join(map(str, left))}" for part, left in off.items()
    )
    defaults = [
        default
        for default in dict.fromkeys(itertools.chain(*off.values()))
        if not default.is_of_keywords
    ]
    likely = [default for default in defaults if default.is_likely] or defaults
    advice = [] if likely else [_passed_on(layer)]
    for default in likely:
        if layer.passing and (default.is_open or layer.keywords):
            advice.append(_listed(layer, default.switch))
        else:
            first = f"{_passed_on(layer)}, and " if layer.keywords else ""
            advice.append(f"{first}pass {default.switch} on to {default.call}")
    return (
        f"off in training, as a parameter was left at its default:{parts}\n"
        f"{'; or '.join(dict.fromkeys(advice))}; or call the parameter train, or set "
        f"the part itself, as nn.Dropout(rate, deterministic=True) does"
    )


def _of_keywords(layer: Call) -> str:
    """The warning of a layer that may look for a switch where there is none."""
    return (
        f"{layer.name} takes **{layer.keywords}, which is empty: it is not told "
        f"whether it is trained, and a dropout in it stays off; {_passed_on(layer)}; "
        f"or call them **_ where it ignores them"
    )


def _passed_on(layer: Call) -> str:
    """Advice that tells a layer with ``**kwargs`` whether it is trained."""
    if layer.passing:
        return _listed(layer, "train=train")
    return f"name train before **{layer.keywords}"


def _listed(layer: Call, switch: str) -> str:
    """Advice on the layer to list in place of a module."""
    return f"list {layer.passing.format(switch)}, or make that the model"


def _defaults(
    call: str, parameters: Iterable[inspect.Parameter], is_open: bool
) -> list[Default]:
    """The parameters with a default that may be a switch."""
    return [
        Default(call, p.name, p.default, is_open)
        for p in parameters
        if isinstance(p.default, bool | str)
    ]


def _bind(call: Any, args: Any, keywords: Any) -> inspect.BoundArguments:
    return inspect.signature(call).bind_partial(*args, **keywords)


def _is_off(module: Any, value: Any, rate: str) -> bool:
    """Whether a part is evaluated, though it would drop or normalize in training."""
    is_on = not rate or getattr(module, rate) != 0
    return is_on and isinstance(value, _switches.BOOL) and bool(value)

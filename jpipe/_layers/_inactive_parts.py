"""Finds the dropouts, norms and attentions that a layer leaves off in training.

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, enable_dropout=False):
            return nn.Dropout(0.5)(x, deterministic=not enable_dropout)

A pipeline gives a layer ``train`` and what else a switch is commonly called, not
``enable_dropout``: such a block would be trained without dropout, and nothing would
show it. So `Pipeline.check` traces each layer in the scope of `collect_notes`. There
the calls of Flax's own dropouts, norms and attentions are seen: in linen by
`flax.linen.intercept_methods`, of nnx by its three classes. One that is off because a
call around it left a parameter at its default is noted. What the user set, by an
attribute or an argument, is the user's choice. Outside of that scope nothing is seen.
"""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx

from . import _switches
from ._patches import patched
from ._slots import path_in_layer


@dataclass(frozen=True)
class _SwitchedPart:
    """A class of Flax that does something else in training.

    Attributes:
      name: how notes call it.
      switch: the argument, and the attribute, that turns it off.
      rate: the attribute that holds its rate, which may be zero; empty if it has none.
    """

    name: str
    switch: str
    rate: str = ""


_DROPOUT = _SwitchedPart("dropout", "deterministic", "rate")
_NORM = _SwitchedPart("batch norm", "use_running_average")
_ATTENTION = _SwitchedPart("attention", "deterministic", "dropout_rate")
_LINEN: dict[type, _SwitchedPart] = {
    linen.Dropout: _DROPOUT,
    linen.BatchNorm: _NORM,
    linen.MultiHeadDotProductAttention: _ATTENTION,
}
_NNX: dict[type, _SwitchedPart] = {
    nnx.Dropout: _DROPOUT,
    nnx.BatchNorm: _NORM,
    nnx.MultiHeadAttention: _ATTENTION,
}
# The notes of the scope of `collect_notes`; ``None`` outside of one.
_notes: ContextVar[list[str] | None] = ContextVar("jpipe_notes", default=None)
# Its value is a part of the key by which JAX finds what it has traced.
_scope = jax.make_user_context()
_scopes = itertools.count(1)


# Parts of the names of switches.
_HINTS = "train", "eval", "infer", "test", "determ", "drop", "mode", "average"


@dataclass(frozen=True)
class Default:
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


@dataclass(frozen=True)
class LayerCall:
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
    def has_switch(self) -> bool:
        """Whether it receives a switch."""
        return bool({*self.offered} - {"rngs"})

    @property
    def defaults(self) -> list[Default]:
        """The parameters that it leaves at a default; of linen most are seen later."""
        left: list[Default] = []
        if not self.has_switch and self.path is None:
            left = _defaults(self.name, self.asking, is_open=bool(self.passing))
        if not self.has_switch and self.keywords:
            left.append(Default(self.name, f"**{self.keywords}", ""))
        return left


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """The scope in which layers that are traced for training are watched.

    Yields:
      A list that receives a note for each layer that leaves a part off.
    """
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        # `flax.linen.jit` would not run again what it has traced for an equal layer.
        with _scope(next(_scopes)):
            yield notes
    finally:
        _notes.reset(token)


@contextmanager
def watching(describe: Callable[[], LayerCall], *, train: bool) -> Iterator[None]:
    """The scope in which one layer is traced.

    Args:
      describe: gives the call of the layer, where it is watched.
      train: whether this is training; evaluation is not watched.
    """
    notes = _notes.get()
    if notes is None or not train:
        yield
        return
    watch = _CallWatch(describe())
    with linen.intercept_methods(watch.see_linen), patched(_NNX, watch.see_nnx):
        yield
    if note := watch.note:
        notes.append(note)


@dataclass(frozen=True)
class _CallFrame:
    """A call that is running.

    Attributes:
      has_switch: whether it was given a switch.
      defaults: the parameters that it left at their defaults.
    """

    has_switch: bool
    defaults: Sequence[Default]


class _CallWatch:
    """Sees the calls inside of one call of a layer.

    Args:
      layer: the call of the layer.
    """

    def __init__(self, layer: LayerCall) -> None:
        self._layer = layer
        # The calls that are running, the innermost last.
        self._frames = [_CallFrame(layer.has_switch, layer.defaults)]
        # part that is off -> the defaults that leave it so
        self._off: dict[str, list[Default]] = {}
        # Whether some part is on, or is off as the user chose.
        self._is_told = False

    @property
    def note(self) -> str:
        """The note of parts that are off, or may be; empty if there are none."""
        layer = self._layer
        if self._off:
            return _note_of_parts(layer, self._off)
        if layer.keywords and not layer.has_switch and not self._is_told:
            return _note_of_keywords(layer)
        return ""

    def _see(self, label: str, *, is_off: bool) -> None:
        """Looks for what leaves a part off: all calls up to one with a switch."""
        if not is_off:
            self._is_told = True
            return
        defaults: list[Default] = []
        for frame in reversed(self._frames):
            defaults += frame.defaults
            if frame.has_switch:
                break
        if defaults:
            self._off[label] = defaults

    def see_linen(self, call: Any, args: Any, keywords: Any, context: Any) -> Any:
        """For `flax.linen.intercept_methods`."""
        module = context.module
        arguments = _bind(context.orig_method, args, keywords)
        for flax_class, part in _LINEN.items():
            if isinstance(module, flax_class) and context.method_name == "__call__":
                value = arguments.arguments.get(part.switch)
                if value is None:
                    value = getattr(module, part.switch)
                path = "/".join(map(str, path_in_layer(module.path)))
                label = f"{part.name} {path}".strip()
                self._see(label, is_off=_is_off(module, value, part.rate))

        self._frames.append(_linen_frame(self._layer, context, arguments))
        try:
            return call(*args, **keywords)
        finally:
            self._frames.pop()

    def see_nnx(
        self, flax_class: type, call: Any, module: Any, args: Any, keywords: Any
    ) -> Any:
        """For `patched`."""
        part = _NNX[flax_class]
        value = _bind(call, (module, *args), keywords).arguments.get(part.switch)
        # `eval` sets the attribute: that is the user's choice.
        is_chosen = getattr(module, part.switch) is True
        is_off = not is_chosen and _is_off(module, value, part.rate)
        self._see(f"{part.name} {type(module).__name__}", is_off=is_off)
        return call(module, *args, **keywords)


def _linen_frame(
    layer: LayerCall, context: Any, arguments: inspect.BoundArguments
) -> _CallFrame:
    """A call of linen."""
    module = context.module
    values = arguments.arguments
    parameters = [
        parameter
        for name, parameter in arguments.signature.parameters.items()
        if name not in values and not _switches.has_switch(module, name)
    ]
    # Who is given a switch by its name leaves other options, not that.
    is_told = any(
        isinstance(values.get(name), _switches.BOOL_TYPES)
        for name in _switches.switches(True)
    )
    has_switch = any(isinstance(value, bool) for value in values.values())
    if is_told or type(module).__module__.startswith("flax."):
        return _CallFrame(has_switch, [])
    name = f"{type(module).__name__}.{context.method_name}"
    is_open = name == layer.name and module.path == layer.path
    return _CallFrame(has_switch, _defaults(name, parameters, is_open=is_open))


def _note_of_parts(layer: LayerCall, off: Mapping[str, Sequence[Default]]) -> str:
    """The note of parts that are off."""
    parts = "; ".join(
        f"{part}: {', '.join(map(str, left))}" for part, left in off.items()
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
        f"off in training, as a parameter was left at its default: {parts}; "
        f"{'; or '.join(dict.fromkeys(advice))}; or call the parameter train, or set "
        f"the part itself, as nn.Dropout(rate, deterministic=True) does"
    )


def _note_of_keywords(layer: LayerCall) -> str:
    """The note of a layer that may look for a switch where there is none."""
    return (
        f"{layer.name} takes **{layer.keywords}, which is empty: it is not told "
        f"whether it is trained, and a dropout in it stays off; {_passed_on(layer)}; "
        f"or call them **_ where it ignores them"
    )


def _passed_on(layer: LayerCall) -> str:
    """Advice that tells a layer with ``**kwargs`` whether it is trained."""
    if layer.passing:
        return _listed(layer, "train=train")
    return f"name train before **{layer.keywords}"


def _listed(layer: LayerCall, switch: str) -> str:
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
    return is_on and isinstance(value, _switches.BOOL_TYPES) and bool(value)

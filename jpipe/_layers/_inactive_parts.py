"""Finds the dropouts, norms and attentions that a layer leaves off in training.

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, enable_dropout=False):
            return nn.Dropout(0.5)(x, deterministic=not enable_dropout)

A pipeline passes ``train`` to a layer, or another common name of a switch, but not
``enable_dropout``: such a block would be trained without dropout, and nothing would
show it. So `Pipeline.check` traces each layer in the scope of `collect_notes`. There
calls of Flax's dropouts, norms and attentions are seen: those of linen by
`flax.linen.intercept_methods`, those of nnx by patches of the three classes. A note
tells of each that is off because a call around it left a parameter at its default. An
attribute or argument that the user set is the user's choice. Outside of that scope
nothing is seen.
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
from ._linen_parent import path_in_layer
from ._patches import patched


@dataclass(frozen=True)
class _SwitchedPart:
    """A class of Flax whose modules compute something else in training.

    Attributes:
      name: its name in notes.
      switch: the name of the argument, and of the attribute, that turns it off.
      rate: the name of the attribute with its rate, which may be zero; empty if it has
        none.
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
# Its value is a part of the key of JAX's cache of traces.
_scope = jax.make_user_context()
_scopes = itertools.count(1)


# Parts of the names of switches.
_HINTS = ("train", "eval", "infer", "test", "determ", "drop", "mode", "average")


@dataclass(frozen=True)
class Default:
    """A parameter that a call left at its default, which may be a switch.

    Attributes:
      call: the name of the call, such as ``"Block.__call__"``.
      name: the parameter; ``"**kwargs"`` for all arguments that a call takes by name.
      value: its default.
      is_open: True if the caller of the layer can set it.
    """

    call: str
    name: str
    value: bool | str
    is_open: bool = False

    def __str__(self) -> str:
        if self.is_of_kwargs:
            return f"{self.call} takes {self.name}"
        return f"{self.call} left {self.name}={self.value}"

    @property
    def is_of_kwargs(self) -> bool:
        """True for ``**kwargs``, which is no switch itself and may hold one."""
        return self.name.startswith("**")

    @property
    def switch(self) -> str:
        """The argument that sets it in training, such as ``is_train=train``."""
        if isinstance(self.value, str):
            return f"{self.name}=... if train else {self.value!r}"
        return f"{self.name}={'not train' if self.value else 'train'}"

    @property
    def is_likely(self) -> bool:
        """True if its name is like that of a switch."""
        return any(hint in self.name.lower() for hint in _HINTS)


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer, and the switches that it takes.

    Attributes:
      name: its name in messages, such as ``"Block.__call__"``.
      parameters: its open parameters, which the caller of the layer may set.
      passed: the names of the parameters that the pipeline sets.
      kwargs_name: the name of its ``**kwargs``, in which it may look for a switch;
        empty if it has none: see `_switches.kwargs_name`.
      form: the layer to list in its place, with ``{}`` for an argument; empty for a
        function.
      path: the path of the linen module that is called, whose defaults are seen in its
        own call; ``None`` if no linen module is called.
    """

    name: str
    parameters: Sequence[inspect.Parameter]
    passed: Collection[str]
    kwargs_name: str = ""
    form: str = ""
    path: Sequence[Any] | None = None

    @property
    def has_switch(self) -> bool:
        """True if it receives a switch."""
        return bool({*self.passed} - {"rngs"})

    @property
    def defaults(self) -> list[Default]:
        """The parameters that it leaves at a default; most of linen are seen later."""
        if self.has_switch:
            return []
        defaults: list[Default] = []
        if self.path is None:
            defaults = _defaults(self.name, self.parameters, is_open=bool(self.form))
        if self.kwargs_name:
            defaults.append(Default(self.name, f"**{self.kwargs_name}", ""))
        return defaults


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """The scope in which layers that are traced for training are watched.

    Yields:
      A list that receives a note for each layer that leaves a part off.
    """
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        # Else `flax.linen.jit` would take the trace of an equal layer from its cache.
        with _scope(next(_scopes)):
            yield notes
    finally:
        _notes.reset(token)


@contextmanager
def watching(describe: Callable[[], LayerCall], *, train: bool) -> Iterator[None]:
    """The scope in which one layer is traced.

    Args:
      describe: returns the call of the layer; called only if it is watched.
      train: True in training; evaluation is not watched.
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
      has_switch: True if it received a switch.
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
        # part that is off -> the defaults that leave it off
        self._inactive: dict[str, list[Default]] = {}
        # True if some part is on, or is off since the user chose so.
        self._has_active_part = False

    @property
    def note(self) -> str:
        """The note on parts that are off, or may be; empty if there are none."""
        layer = self._layer
        if self._inactive:
            return _note_on_parts(layer, self._inactive)
        if layer.kwargs_name and not layer.has_switch and not self._has_active_part:
            return _note_on_kwargs(layer)
        return ""

    def _note_part(self, label: str, *, is_off: bool) -> None:
        """Notes the defaults that leave a part off.

        They are those of the calls around it, up to the innermost with a switch.
        """
        if not is_off:
            self._has_active_part = True
            return
        defaults: list[Default] = []
        for frame in reversed(self._frames):
            defaults += frame.defaults
            if frame.has_switch:
                break
        if defaults:
            self._inactive[label] = defaults

    def see_linen(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Runs a method of linen: the interceptor of `flax.linen.intercept_methods`."""
        module = context.module
        arguments = _bind(context.orig_method, args, kwargs)
        for flax_class, part in _LINEN.items():
            if isinstance(module, flax_class) and context.method_name == "__call__":
                value = arguments.arguments.get(part.switch)
                if value is None:
                    value = getattr(module, part.switch)
                path = "/".join(map(str, path_in_layer(module.path)))
                label = f"{part.name} {path}".strip()
                self._note_part(label, is_off=_is_off(module, value, part.rate))

        self._frames.append(_linen_frame(self._layer, context, arguments))
        try:
            return call(*args, **kwargs)
        finally:
            self._frames.pop()

    def see_nnx(
        self, flax_class: type, call: Any, module: Any, args: Any, kwargs: Any
    ) -> Any:
        """Runs a call of an nnx module: the replacement for `patched`."""
        part = _NNX[flax_class]
        value = _bind(call, (module, *args), kwargs).arguments.get(part.switch)
        # `eval` sets the attribute: that is the user's choice.
        is_chosen = getattr(module, part.switch) is True
        is_off = not is_chosen and _is_off(module, value, part.rate)
        self._note_part(f"{part.name} {type(module).__name__}", is_off=is_off)
        return call(module, *args, **kwargs)


def _linen_frame(
    layer: LayerCall, context: Any, arguments: inspect.BoundArguments
) -> _CallFrame:
    """The frame of a call of a linen module."""
    module = context.module
    values = arguments.arguments
    parameters = [
        parameter
        for name, parameter in arguments.signature.parameters.items()
        if name not in values and not _switches.is_set_on_module(module, name)
    ]
    # A call that received a switch by its name leaves other options at their defaults.
    has_named_switch = any(
        isinstance(values.get(name), _switches.BOOL_TYPES)
        for name in _switches.switches(train=True)
    )
    has_switch = any(isinstance(value, bool) for value in values.values())
    if has_named_switch or type(module).__module__.startswith("flax."):
        return _CallFrame(has_switch, [])
    name = f"{type(module).__name__}.{context.method_name}"
    is_open = name == layer.name and module.path == layer.path
    return _CallFrame(has_switch, _defaults(name, parameters, is_open=is_open))


def _note_on_parts(layer: LayerCall, inactive: Mapping[str, Sequence[Default]]) -> str:
    """The note on parts that are off, with the defaults that leave each off."""
    parts = "; ".join(
        f"{part}: {', '.join(map(str, defaults))}"
        for part, defaults in inactive.items()
    )
    switches = [
        default
        for default in dict.fromkeys(itertools.chain(*inactive.values()))
        if not default.is_of_kwargs
    ]
    if any(default.is_likely for default in switches):
        switches = [default for default in switches if default.is_likely]

    advice = [] if switches else [_advice_to_tell(layer)]
    for default in switches:
        if layer.form and (default.is_open or layer.kwargs_name):
            advice.append(_advice_to_list(layer, default.switch))
        else:
            first = f"{_advice_to_tell(layer)}, and " if layer.kwargs_name else ""
            advice.append(f"{first}pass {default.switch} on to {default.call}")
    return (
        f"off in training, as a parameter was left at its default: {parts}; "
        f"{'; or '.join(dict.fromkeys(advice))}; or call the parameter train, or set "
        f"the part itself, as nn.Dropout(rate, deterministic=True) does"
    )


def _note_on_kwargs(layer: LayerCall) -> str:
    """The note on a layer that may look for a switch in ``**kwargs``, in vain."""
    return (
        f"{layer.name} takes **{layer.kwargs_name}, which is empty: it is not told "
        f"whether it is trained, and a dropout in it stays off; "
        f"{_advice_to_tell(layer)}; or call them **_ where it ignores them"
    )


def _advice_to_tell(layer: LayerCall) -> str:
    """Advice on how to tell a layer with ``**kwargs`` whether it is trained."""
    if layer.form:
        return _advice_to_list(layer, "train=train")
    return f"name train before **{layer.kwargs_name}"


def _advice_to_list(layer: LayerCall, switch: str) -> str:
    """Advice on the layer to list in place of a module."""
    return f"list {layer.form.format(switch)}, or make that the model"


def _defaults(
    call: str, parameters: Iterable[inspect.Parameter], *, is_open: bool
) -> list[Default]:
    """The parameters with a default that may be a switch."""
    return [
        Default(call, parameter.name, parameter.default, is_open=is_open)
        for parameter in parameters
        if isinstance(parameter.default, bool | str)
    ]


def _bind(call: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    return inspect.signature(call).bind_partial(*args, **kwargs)


def _is_off(module: Any, value: Any, rate: str) -> bool:
    """True if a part is evaluated that would drop or normalize in training.

    Args:
      module: the part.
      value: the value of its switch.
      rate: the name of the attribute with its rate; empty if it has none.
    """
    if rate and getattr(module, rate) == 0:
        return False
    return isinstance(value, _switches.BOOL_TYPES) and bool(value)

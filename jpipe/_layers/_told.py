"""Whether what is called of a layer can be told that it is trained: its parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen, nnx

from . import _switches
from ._libraries import is_of


class Called(NamedTuple):
    """What is called of an object that a user listed.

    Attributes:
      function: what is called.
      name: how errors call it.
      data: how many of its parameters are for what it is computed on.
      module: the module that is called, if one is.
      listed: how the layer calls its module, as ``"module"`` or ``"module.head"``;
        empty if it is not a method of a module.
    """

    function: Callable[..., Any]
    name: str
    data: int
    module: Any = None
    listed: str = ""


def of(module: Any, method: str | Callable[..., Any]) -> Called:
    """What is called of a module, by the name of a method or a function of it."""
    name = type(module).__name__
    if not isinstance(method, str):
        return Called(method, name, 2, module)
    listed = "module" if method == "__call__" else f"module.{method}"
    return Called(getattr(type(module), method), name, 2, module, listed)


def why_not(called: Called) -> str:
    """Why something cannot be told that it is trained; empty if it can."""
    called = first(called)
    return _various(called) or _held(called)


def misnamed(called: Called) -> str:
    """By which parameters it asks in vain whether it is trained, if it does."""
    called = first(called)
    names = _switches.misnamed(
        called.function,
        called.data,
        lambda field: getattr(called.module, field, None) is not None,
        bool(called.listed) or called.module is not None,
    )
    if not names:
        return ""
    takes = f"{called.name} takes {' and '.join(names)}"
    if not called.listed:
        return takes
    given = ", ".join(
        f"{name}={'not ' if name in _switches.MEAN_EVALUATION else ''}train"
        for name in names
    )
    return f"{takes}; list {_line(called, 'train', given)}"


def first(called: Called) -> Called:
    """What takes the switches: of a Sequential it is that with which it begins."""
    module: Any = called.module
    while called.listed == "module" and is_sequential(module):
        layers: Any = getattr(module, "layers", ())
        if not layers:
            break
        module = layers[0]
        name = getattr(module, "__name__", type(module).__name__)
        name = f"{name}, with which a Sequential begins,"
        if isinstance(module, linen.Module | nnx.Module):
            called = of(module, "__call__")._replace(name=name)
        else:
            called = Called(module, name, 1, None, "module")
    return called


def is_sequential(module: Any) -> bool:
    """Whether a module passes what it is called with to its first part alone."""
    calls = linen.Sequential.__call__, nnx.Sequential.__call__
    return callable(module) and type(module).__call__ in calls


def _various(called: Called) -> str:
    """Why it cannot be told, if a switch may be among any arguments."""
    function, name = called.function, called.name
    if called.module is None and is_of(getattr(function, "__module__", "")):
        return ""
    if isinstance(function, type) or not callable(function):
        return ""
    if not _switches.takes_any(function, called.data):
        return ""
    if called.listed:
        return (
            f"{name} is called with any arguments (* or **), which may say whether it "
            f"is trained; list {_line(called)} if it takes none that does, and "
            f"{_line(called, 'train', 'train=train')}, by the name that it has, if it "
            f"does"
        )
    if called.module is not None:
        return (
            f"the function of {name} takes any arguments (* or **), which may say "
            f"whether it is trained; list jpipe.layer(module, lambda module, x: ...) "
            f"if it takes none that does, and jpipe.layer(module, lambda module, x, "
            f"train: ...) if it does"
        )
    given = ("variables, x", "x")[called.data == 1]
    return (
        f"{name} takes any arguments (* or **), which may say whether it is trained; "
        f"list lambda {given}: f({given}) if it takes none that does, and lambda "
        f"{given}, train: f({given}, train=train), by the name that it has, if it does"
    )


def _held(called: Called) -> str:
    """Why it cannot be told, if a field of a linen module may say it by default."""
    module = called.module
    if not called.listed or not isinstance(module, linen.Module):
        return ""
    for parameter in _switches.parameters(called.function, called.data):
        name = parameter.name
        if name not in _switches.switches(True) or not _switches.is_set(module, name):
            continue
        required, value = parameter.default is parameter.empty, getattr(module, name)
        if required or _switches.is_default(module, name):
            told = f"{name}={'' if name == 'train' else 'not '}train"
            return (
                f"{called.name} holds {name}={value!r}, which may be a default, and "
                f"its call takes {name} too; list {_line(called, 'train', told)} if it "
                f"is to be trained, and {_line(called, '', f'{name}={value!r}')} to "
                f"leave it so"
            )
    return ""


def _line(called: Called, names: str = "", given: str = "") -> str:
    names, given = (f", {part}" if part else "" for part in (names, given))
    return f"jpipe.layer(module, lambda module, x{names}: {called.listed}(x{given}))"

"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable
from typing import Any

import chex
from flax import linen

from . import _batchnorm

PyTree = Any


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def name(module: linen.Module) -> str:
    """What to call a module: its own name or that of its class."""
    return module.name or type(module).__name__


def switches(train: bool) -> dict[str, bool]:
    """The names by which Flax layers ask whether they are being trained."""
    return {
        "train": train,
        "deterministic": not train,
        "use_running_average": not train,
    }


def init(
    module: linen.Module, method: str = "__call__"
) -> Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]]:
    """``(key, spec) -> variables`` of a module, from the shapes of its input alone.

    The values are those of ``module.init(key, x)``. A module whose parameters
    depend on the values of ``x`` raises Flax's ``LazyInitError``.
    """

    def run(key: chex.PRNGKey, spec: PyTree) -> dict[str, PyTree]:
        args, keywords = _asked(module, method, train=False)
        called = getattr(type(module), method)
        made = module.lazy_init(key, spec, *args, method=called, **keywords)
        return dict(made)

    return run


def apply(
    module: linen.Module, method: str = "__call__"
) -> Callable[..., tuple[PyTree, dict[str, PyTree]]]:
    """``(variables, x, rngs, train) -> (y, changed)`` of a module."""

    def run(variables, x, rngs, train):
        mutable = [key for key in variables if key != "params"] if train else []
        args, keywords = _asked(module, method, train)
        keywords |= {"rngs": rngs, "method": method}
        if not mutable:
            return module.apply(variables, x, *args, **keywords), {}
        with _batchnorm.meeting(mutable), linen.intercept_methods(_batchnorm.intercept):
            y, changed = module.apply(variables, x, *args, mutable=mutable, **keywords)
        return y, dict(changed)

    return run


def _asked(
    module: linen.Module, method: str, train: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The switches that a method names and the module has not set itself.

    They are passed by position where they can be: `flax.linen.remat` lets only such
    arguments be static.
    """
    signature = inspect.signature(getattr(type(module), method))
    _, _, *after_x = signature.parameters.values()
    values = {
        name: value
        for name, value in switches(train).items()
        if not _is_set(module, name)
    }
    asked = [parameter.name for parameter in after_x if parameter.name in values]
    args = []
    for parameter in after_x:
        by_position = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        value = values.get(parameter.name, parameter.default)
        if not by_position or value is inspect.Parameter.empty:
            break
        if not set(asked) - {p.name for p in after_x[: len(args)]}:
            break
        args.append(value)
    given = {parameter.name for parameter in after_x[: len(args)]}
    return args, {name: values[name] for name in asked if name not in given}


def _is_set(module: linen.Module, name: str) -> bool:
    """Whether the user chose a switch when making the module."""
    fields = type(module).__dataclass_fields__
    return name in fields and getattr(module, name) is not None

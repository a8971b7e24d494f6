"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable
from typing import Any

import chex
from flax import linen

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


def init(module: linen.Module) -> Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]]:
    """``(key, spec) -> variables`` of a module, from the shapes of its input alone.

    The values are those of ``module.init(key, x)``. A module whose parameters
    depend on the values of ``x`` raises Flax's ``LazyInitError``.
    """

    def run(key: chex.PRNGKey, spec: PyTree) -> dict[str, PyTree]:
        variables = module.lazy_init(key, spec, **_asked(module, train=False))
        return dict(variables)

    return run


def apply(
    module: linen.Module,
) -> Callable[..., tuple[PyTree, dict[str, PyTree]]]:
    """``(variables, x, rngs, train) -> (y, changed)`` of a module."""

    def run(variables, x, rngs, train):
        mutable = [key for key in variables if key != "params"] if train else []
        keywords = _asked(module, train)
        if not mutable:
            return module.apply(variables, x, rngs=rngs, **keywords), {}
        y, changed = module.apply(variables, x, rngs=rngs, mutable=mutable, **keywords)
        return y, dict(changed)

    return run


def _asked(module: linen.Module, train: bool) -> dict[str, Any]:
    """The switches that ``__call__`` names and the module has not set itself."""
    named = inspect.signature(type(module).__call__).parameters
    return {
        key: value
        for key, value in switches(train).items()
        if key in named and getattr(module, key, None) is None
    }

"""Flax linen modules as layers."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import chex
from flax import errors, linen

from . import _batchnorm

PyTree = Any


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def why_not(source: Any) -> str:
    """Why an object cannot be a layer, if linen is the reason; else empty."""
    function = source.func if isinstance(source, functools.partial) else source
    module = getattr(function, "__self__", None)
    if not is_module(module):
        return ""
    return (
        f"a function bound to a linen {type(module).__name__}, whose values would "
        f"become constants; list jpipe.layer(module, method={function.__name__!r})"
    )


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
        with _explained():
            made = module.lazy_init(key, spec, *args, method=called, **keywords)
        return dict(made)

    return run


def apply(
    module: linen.Module, method: str = "__call__"
) -> Callable[..., tuple[PyTree, dict[str, PyTree]]]:
    """``(variables, x, rngs, train) -> (y, changed)`` of a module."""

    def run(variables, x, rngs, train):
        args, keywords = _asked(module, method, train)
        keywords |= {"rngs": rngs, "method": method}
        if not train:
            # A batch norm that nobody tells to leave its statistics moves them in vain.
            mutable = [key for key in variables if key == "batch_stats"]
            with _explained():
                y, _ = module.apply(variables, x, *args, mutable=mutable, **keywords)
            return y, {}
        mutable = [key for key in variables if key != "params"]
        with _batchnorm.meeting(mutable), linen.intercept_methods(_batchnorm.intercept):
            y, changed = module.apply(variables, x, *args, mutable=mutable, **keywords)
        return y, dict(changed)

    return run


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to errors of Flax what to type instead, in a pipeline."""
    try:
        yield
    except errors.ModifyScopeVariableError as error:
        error.add_note(
            "where it is not trained a layer may not change what it holds: let its "
            "__call__ take train, and write only if that is true"
        )
        raise
    except errors.ScopeParamNotFoundError as error:
        error.add_note(
            "a module that is listed more than once holds what its first place makes: "
            "list its parts as modules of their own"
        )
        raise
    except errors.LazyInitError as error:
        error.add_note(
            "what a layer holds at the start follows from the shapes of its input "
            "alone; what it computes leaves it as a part of its output, not by sow"
        )
        raise


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

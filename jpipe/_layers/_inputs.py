"""A layer maps one pytree: what to type for a module that takes several arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flax import errors

from . import _switches

PyTree = Any


@contextmanager
def explained(
    module: Any, method: str | Callable[..., Any], x: PyTree
) -> Iterator[None]:
    """Adds to an error of a method of a module how to take its input apart.

    Args:
      module: the module.
      method: the name of the method; a function takes its input apart itself.
      x: the input.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TypeError) and "argument: 'rngs'" in str(error):
            error.add_note(
                "no keys were given: type rngs=key in the call of the pipeline, or let "
                "the layer do without them in evaluation (rngs=None)"
            )
        elif isinstance(error, errors.InvalidRngError):
            error.add_note(
                "give a key for each stream in the call of the pipeline, "
                "rngs=jax.random.key(0) for all, or for some by their names, "
                "rngs={'dropout': jax.random.key(0)}"
            )
        # Of keys that are missing in nnx see `_nnx_rngs`.
        elif isinstance(method, str) and "there is not a key" not in str(error):
            function = getattr(type(module), method)
            several = isinstance(x, Mapping | tuple | list)
            if several or len(_required(function)) > 1:
                given = f"a {type(x).__name__}" if several else "one array"
                names = ", ".join(inspect.signature(function).parameters)
                called = "module" if method == "__call__" else f"module.{method}"
                part = "'name'" if isinstance(x, Mapping) else "0"
                error.add_note(
                    f"a layer maps one pytree to one pytree: this "
                    f"{type(module).__name__} takes ({names}), and was "
                    f"given {given}; if that is meant to be taken apart, list "
                    f"jpipe.layer(module, lambda module, x: {called}(x[{part}], ...))"
                )
        raise


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of what a method has to be given of its input."""
    _, *after_self = inspect.signature(function).parameters.values()
    offered = {*_switches.switches(True), "rngs"}
    return [
        p.name
        for p in after_self
        if p.default is p.empty
        and p.kind not in _switches.VARIOUS
        and p.name not in offered
    ]

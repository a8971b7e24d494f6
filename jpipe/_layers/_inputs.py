"""A layer maps one pytree: what to type for a module that takes several arguments."""

import inspect
import reprlib
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
        elif (
            isinstance(method, str)
            and "there is not a key" not in str(error)  # of nnx: see `_nnx_rngs`
            and (line := _line(module, method, x))
        ):
            error.add_note(line)
        raise


def _line(module: Any, method: str, x: PyTree) -> str:
    """What to type; empty if the input is one array and the method takes one."""
    function = getattr(type(module), method)
    offered = {*_switches.switches(True), "rngs"}
    _, *after_self = inspect.signature(function).parameters.values()
    wanted = [
        p
        for p in after_self
        if p.default is inspect.Parameter.empty
        and p.kind not in _switches.VARIOUS
        and p.name not in offered
    ]
    several = isinstance(x, Mapping | tuple | list)
    if len(wanted) < 2 and not several:
        return ""
    called = "module" if method == "__call__" else f"module.{method}"
    if len(wanted) < 2:
        typed = _around(called, x)
    else:
        typed = f"{called}({', '.join(_pieces(wanted, x))})"
    switches = [p.name for p in after_self if p.name in offered]
    told = "".join(f", {name}" for name in switches)
    typed = typed.replace(")", "".join(f", {n}={n}" for n in switches) + ")", 1)
    names = " and ".join(p.name for p in wanted) or "nothing"
    given = f"a {type(x).__name__}" if several else "one array"
    return (
        f"a layer maps one pytree to one pytree: this {type(module).__name__} takes "
        f"{names}, and was given {given}; if that is meant to be taken apart, list "
        f"jpipe.layer(module, lambda module, x{told}: {typed})"
    )


def _pieces(wanted: list[inspect.Parameter], x: PyTree) -> list[str]:
    """The arguments of a call that takes several, out of a pytree."""
    if isinstance(x, tuple | list):
        keys = [repr(i) for i in range(len(x))]
    elif isinstance(x, Mapping):
        names = {p.name for p in wanted}
        others = iter([key for key in x if key not in names])
        keys = [repr(p.name if p.name in x else next(others, ...)) for p in wanted]
    else:
        keys = [repr(p.name) for p in wanted]
    keys += ["..."] * (len(wanted) - len(keys))
    pieces = []
    for i, (parameter, key) in enumerate(zip(wanted, keys, strict=False)):
        by_position = i == 0 or parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        key = key.replace("Ellipsis", "...")
        pieces.append(f"x[{key}]" if by_position else f"{parameter.name}=x[{key}]")
    return pieces


def _around(called: str, x: PyTree) -> str:
    """A call on one part of a pytree, with the others as they are."""
    if isinstance(x, Mapping):
        key = reprlib.repr(next(iter(x), ...))
        return f"{{**x, {key}: {called}(x[{key}])}}"
    return f"({called}(x[0]), *x[1:])"

"""Modules that a layer hides: their values would be constants, which nobody trains."""

import functools
from collections.abc import Iterable
from typing import Any

from flax import nnx

from . import _linen, _nnx
from ._reach import is_variable, reached


def why_not(
    source: Any, function: Any = None, method: str = "", explicit: bool = False
) -> str:
    """Why an object cannot be a layer, if it hides a module.

    Args:
      source: what is called: a module, a function, or the ``apply`` of a stage.
      function: the function of a module by which it is called, if there is one.
      method: its method by which it is called, if there is one.
      explicit: whether it is given variables beside its input.

    Returns:
      The reason; empty if it hides none.
    """
    module = source if _is_module(source) else None
    function = function if module is not None else source
    if function is not None:
        hidden, method_of = _bare(function)
        if explicit and _linen.is_module(hidden) and method_of == "apply":
            return ""  # it is given its values
        if _is_module(hidden):
            own = (
                "itself"
                if method_of == "__call__"
                else f"as jpipe.layer(module, {method_of!r})"
            )
            return (
                f"a function that calls a {type(hidden).__name__}, whose values would "
                f"become constants; list the module {own}"
            )
    for found, value in reached(function, module, method):
        place = found or "itself"
        kind = "function" if module is None else type(module).__name__
        return (
            f"a {kind} that takes {place}, a {type(value).__name__}, from outside, "
            f"whose values would be constants, which nobody trains; list that module, "
            f"or one that holds all that the function needs, as jpipe.layer(module, "
            f"function); for constants let it take the values (nnx.split, "
            f"module.unbind())"
        )
    return ""


def check_loss(loss_fn: Any, owners: Iterable[Any]) -> None:
    """Checks that what a loss reads is not trained, since it would not be.

    Args:
      loss_fn: the loss.
      owners: the objects whose parameters the layers use.

    Raises:
      TypeError: if it is a module with parameters, or takes some of a layer.
    """
    own, _ = _bare(loss_fn)
    faults, owners = [], list(enumerate(owners))
    for place, value in reached(loss_fn):
        numbers = [str(i) for i, owner in owners if _share(value, owner)]
        if numbers:
            which = f"layer{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"
            faults.append(f"{place or 'itself'}, a {type(value).__name__}, of {which}")
        elif _nnx.is_module(own) and _has_params(value) and _share(value, own):
            raise TypeError(
                f"loss_fn is a {type(own).__name__}, whose parameters would be "
                f"constants, which nobody trains; list it as the last layer, which "
                f"passes on what the loss needs; for constants give lambda outputs, "
                f"targets: module(outputs, targets)"
            )
    if faults:
        raise TypeError(
            "what loss_fn takes of layers would be constants, which nobody trains; "
            "compute it in the last layer (list the module there again, which ties "
            "them, or jpipe.layer(module, function)) and pass it on to the loss:\n"
            + "\n".join(f"  * it takes {fault}" for fault in faults)
        )


def _is_module(value: Any) -> bool:
    return _linen.is_module(value) or _nnx.is_module(value)


def _bare(function: Any) -> tuple[Any, str]:
    """What is called in the end, without what Python and JAX put around it."""
    while not _is_module(module := getattr(function, "__self__", function)):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):  # by `jax.jit`, say
            function = function.__wrapped__
        else:
            return function, ""
    return module, getattr(function, "__name__", "__call__")


def _variables(module: Any) -> dict[int, Any]:
    """The Variables of an nnx module, or one itself, by identity."""
    if isinstance(module, nnx.Variable):
        return {id(module): module}
    if not _nnx.is_module(module):
        return {}
    nodes = [node for _, node in nnx.iter_graph(module, graph=True)]
    return {id(node): node for node in nodes if isinstance(node, nnx.Variable)}


def _has_params(value: Any) -> bool:
    return any(isinstance(leaf, nnx.Param) for leaf in _variables(value).values())


def _share(value: Any, owner: Any) -> bool:
    """Whether what a loss takes is of a layer, or the layer of it."""
    if not is_variable(owner):
        return False
    if _linen.is_module(value) or _linen.is_module(owner):
        if not (_linen.is_module(value) and _linen.is_module(owner)):
            return False  # they have no variables in common
        length = min(len(value.path), len(owner.path))
        return (
            value.scope.root is owner.scope.root
            and value.path[:length] == owner.path[:length]
        )
    return not _variables(value).keys().isdisjoint(_variables(owner))

"""Advice on errors that a layer raises: a line to type, by the error and the layer."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from flax import errors, linen, nnx

from ._adapter import Layer, LayerAdapter
from ._method import MethodLayer

PyTree = Any

_MADE_IN_EVALUATION = (
    "init runs the layer in evaluation mode: use the same parameters in training, or "
    "create training-only parameters under if train or self.is_initializing()"
)
_ONE_PYTREE = (
    "a layer maps one pytree to one pytree; where a module takes several, list "
    "jpipe.layer(module, lambda module, x: module(x[0], mask=x[1])), or x['name']"
)
# (class of the error, a part of its message) -> the advice
_ADVICE: dict[tuple[type[Exception], str], str] = {
    (NameError, "axis name"): "a pipeline maps no axis: drop axis_name=, and "
    "collectives over it such as jax.lax.pmean; the loss and the running statistics of "
    "batch norms are those of the whole mini-batch without them",
    (RuntimeError, "non-empty mesh"): "layers are traced outside of any mesh: give "
    "NamedSharding(mesh, spec) in place of a spec, drop constraints on how activations "
    "lie, or type nn.with_logical_constraint",
    (errors.ModifyScopeVariableError, ""): "in evaluation a call changes what it holds "
    "only where that is returned: for a cache (decode=True) type y, state = "
    "pipe.apply(variables, x, mutable=['cache']); of a batch norm let its __call__ "
    "take train, and write (use_running_average=not train) only then",
    (errors.ScopeCollectionNotFound, ""): _MADE_IN_EVALUATION,
    (errors.ScopeParamNotFoundError, ""): _MADE_IN_EVALUATION,
    (errors.InvalidRngError, ""): "give a key for each stream in the call of the "
    "pipeline: rngs=jax.random.key(0), or rngs={'dropout': jax.random.key(0)}, as a "
    "lifted module with split_rngs={'dropout': True} needs it; of a train step in "
    "pipe.init_train_state(key, x, tx, rngs=...); type train=False where nothing is "
    "to be drawn, as in evaluation",
}


def missing_inputs(error: Exception, layer: LayerAdapter) -> list[str]:
    """The inputs that the call of a model lacks, if that is the error; else none."""
    function = _called_function(layer)
    name = getattr(inspect.unwrap(function), "__qualname__", "")
    if not isinstance(error, TypeError) or not str(error).startswith(f"{name}() miss"):
        return []
    return re.findall(r"'(\w+)'", str(error))


def argument_names(layer: LayerAdapter) -> list[str]:
    """The names of the arguments of the call of a model; none of some in C."""
    try:
        return [*inspect.signature(_called_function(layer)).parameters]
    except (TypeError, ValueError):
        return []


def _called_function(layer: LayerAdapter) -> Any:
    """The function that a layer runs: that of the user, or a method of a module."""
    function = layer.owner
    if isinstance(layer.source, MethodLayer):
        function = layer.source.method
    elif isinstance(layer.source, Layer):
        function = layer.source.apply

    if isinstance(function, linen.Module | nnx.Module):
        return type(function).__call__
    if isinstance(function, str):
        return getattr(type(layer.owner), function)
    return function


def advice(error: Exception) -> str:
    """The advice on an error that a layer or a model raised; may be empty."""
    for (error_class, message_part), text in _ADVICE.items():
        if isinstance(error, error_class) and message_part in str(error):
            return text
    return ""


def layer_advice(error: Exception, layer: LayerAdapter, x: PyTree) -> str:
    """The advice on an error that a layer of a list raised on an input."""
    if text := advice(error):
        return text
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return _ONE_PYTREE
    is_module = isinstance(layer.source, linen.Module | nnx.Module)
    return _ONE_PYTREE if is_module and isinstance(x, Mapping | tuple | list) else ""

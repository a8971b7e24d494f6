"""What to type after an error in a layer, by the error and by the layer."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from flax import errors, linen, nnx

from ._layer import Layer, LayerAdapter
from ._method import Method

PyTree = Any

_IN_EVALUATION = (
    "what a layer holds is what it needs in evaluation: let it use the same parameters "
    "in training, or make there what only training uses: if train or "
    "self.is_initializing()"
)
_SEVERAL = (
    "a layer maps one pytree to one pytree; where a module takes several, list "
    "jpipe.layer(module, lambda module, x: module(x[0], mask=x[1])), or x['name']"
)
# Kinds of errors with what they say, and what to type.
_KNOWN: dict[tuple[type[Exception], str], str] = {
    (NameError, "axis name"): "a pipeline maps no axis: drop axis_name, and "
    "collectives over it such as jax.lax.pmean; the loss and the running statistics of "
    "batch norms are those of the whole mini-batch without them",
    (RuntimeError, "non-empty mesh"): "layers are traced outside of any mesh: give "
    "NamedSharding(mesh, spec) in place of a spec, drop constraints on how activations "
    "lie, or type nn.with_logical_constraint",
    (errors.ModifyScopeVariableError, ""): "where it is not trained a layer may not "
    "change what it holds: let its __call__ take train, and write "
    "(use_running_average=not train) only then",
    (errors.ScopeCollectionNotFound, ""): _IN_EVALUATION,
    (errors.ScopeParamNotFoundError, ""): _IN_EVALUATION,
    (errors.InvalidRngError, ""): "give a key for each stream in the call of the "
    "pipeline: rngs=jax.random.key(0), or rngs={'dropout': jax.random.key(0)}",
    (TypeError, "argument: 'rngs'"): "no keys were given: type rngs=key in the call of "
    "the pipeline, or let the layer do without them in evaluation (rngs=None)",
    (TypeError, "required positional argument"): _SEVERAL,
}


def missing_inputs(error: Exception, layer: LayerAdapter) -> list[str]:
    """The inputs that the call of a model lacks, if that is the error; else none."""
    called, source = layer.owner, layer.source
    if isinstance(source, Method):
        called = source.method
    elif isinstance(source, Layer):
        called = source.apply
    if isinstance(called, linen.Module | nnx.Module):
        called = type(called).__call__
    elif isinstance(called, str):
        called = getattr(type(layer.owner), called)
    name = getattr(inspect.unwrap(called), "__qualname__", "")
    if not isinstance(error, TypeError) or not str(error).startswith(f"{name}() miss"):
        return []
    return re.findall(r"'(\w+)'", str(error))


def advice(error: Exception, layer: LayerAdapter, x: PyTree) -> str:
    """What to type after an error that a layer raised on an input; may be empty."""
    for (kind, says), text in _KNOWN.items():
        if isinstance(error, kind) and says in str(error):
            return text
    is_module = isinstance(layer.source, linen.Module | nnx.Module)
    return _SEVERAL if is_module and isinstance(x, Mapping | tuple | list) else ""

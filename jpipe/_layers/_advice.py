"""What to type after an error in a layer, by the error and by the layer."""

import inspect
from collections.abc import Mapping
from typing import Any

from flax import errors

from . import _linen, _nnx, _switches
from ._layer import Layer, split

PyTree = Any
_IN_EVALUATION = (
    "what a layer holds is what it needs in evaluation: let it use the same parameters "
    "in training, or make there what only training uses: if train or "
    "self.is_initializing()"
)
# Kinds of errors with what they say, and what to type.
_KNOWN: dict[tuple[type[Exception], str], str] = {
    (NameError, "axis name"): "a pipeline maps no axis: drop axis_name, and "
    "collectives over it such as jax.lax.pmean; the loss and the running statistics of "
    "batch norms are those of the whole mini-batch without them",
    (RuntimeError, "non-empty mesh"): "layers are traced outside of any mesh: drop "
    "constraints on how activations lie, or type nn.with_logical_constraint",
    (errors.ModifyScopeVariableError, ""): "where it is not trained a layer may not "
    "change what it holds: let its __call__ take train, and write "
    "(use_running_average=not train) only then",
    (errors.ScopeCollectionNotFound, ""): _IN_EVALUATION,
    (errors.ScopeParamNotFoundError, ""): _IN_EVALUATION,
    (errors.InvalidRngError, ""): "give a key for each stream in the call of the "
    "pipeline: rngs=jax.random.key(0), or rngs={'dropout': jax.random.key(0)}",
    (TypeError, "argument: 'rngs'"): "no keys were given: type rngs=key in the call of "
    "the pipeline, or let the layer do without them in evaluation (rngs=None)",
    (ValueError, "for which there is no key"): "",  # of nnx: it says what to type
}


def advice(error: Exception, layer: Layer, x: PyTree) -> str:
    """What to type after an error that a layer raised on an input; may be empty."""
    for (kind, says), text in _KNOWN.items():
        if isinstance(error, kind) and says in str(error):
            return text
    module, method = split(layer.source)
    is_module = _linen.is_module(module) or _nnx.is_module(module)
    if not is_module or not isinstance(method, str):
        return ""
    # A layer maps one pytree: this may be a module that takes several arguments.
    parameters = inspect.signature(getattr(type(module), method)).parameters
    offered = {*_switches.switches(True), "rngs"}
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind not in _switches.VARIOUS
        and name not in offered
    ]
    several = isinstance(x, Mapping | tuple | list)
    if not several and len(required) < 3:  # self, and the input
        return ""
    called = "module" if method == "__call__" else f"module.{method}"
    part = "'name'" if isinstance(x, Mapping) else "0"
    return (
        f"a layer maps one pytree to one pytree: this {type(module).__name__} takes "
        f"({', '.join(parameters)}), and was given "
        f"{f'a {type(x).__name__}' if several else 'one array'}; if that is meant to "
        f"be taken apart, list jpipe.layer(module, lambda module, x: "
        f"{called}(x[{part}], ...))"
    )

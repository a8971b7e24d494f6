"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
from flax import linen

from . import _batchnorm, _inputs, _modes, _switches

PyTree = Any
# The name of a method, or a function of a module and its input.
Method = str | Callable[..., PyTree]

OF_DATA = (
    "write them where the layer is trained alone (if not self.is_initializing()), and "
    "what is made in nn.cond, nn.switch or nn.custom_vjp outside of these first; give "
    "parameters that are made of data: pipe.init_train_state(key, x, tx, variables="
    "[None, module.init(key, data), None]), where None is initialized as ever; of one "
    "model variables=model.init(key, data)"
)
NOT_SOWN = "what it computes leaves it as a part of its output, not by sow"


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def is_box(node: Any) -> bool:
    """Whether a node of variables is a box, such as a `flax.linen.Partitioned`."""
    return isinstance(node, linen.meta.AxisMetadata)


def name(module: linen.Module) -> str:
    """What to call a module: its own name or that of its class."""
    return module.name or type(module).__name__


def streams(key: chex.PRNGKey) -> dict[str, chex.PRNGKey]:
    """The keys of an initialization, by stream name.

    Flax takes what linen asks for by another name from ``"params"``, and what an nnx
    module asks for, in `nnx.bridge.to_linen` wherever that is, from ``"default"``.
    """
    return {"params": key, "default": jax.random.fold_in(key, 1)}


def call(method: Method) -> Callable[..., PyTree]:
    """``(module, x, rngs, train) -> y`` of a bound module."""

    def run(module: Any, x: PyTree, rngs: PyTree, train: bool) -> PyTree:
        called, args, keywords = _called(module, method, x, rngs, train)
        data, named = _inputs.arguments(x)
        asking = _asking(module, method, x)
        known = [p.name for p in asking if _switches.is_switch(p)]
        changes = train and module.is_mutable_collection("batch_stats")
        with (
            _modes.watching("", known, [], train),
            _batchnorm.meeting(["batch_stats"] if changes else []),
        ):
            return called(module, *data, *args, **named, **keywords)

    return run


def _called(
    module: linen.Module, method: Method, x: PyTree, rngs: PyTree, train: bool
) -> tuple[Callable[..., PyTree], list[Any], dict[str, Any]]:
    """What to call with a module and its input, and its further arguments.

    A method receives what of the switches it names and the module has not set itself; a
    function what it names.
    """
    asking = _asking(module, method, x)
    offered = _switches.offered(asking, train, rngs)
    if isinstance(method, str):
        offered.pop("rngs", None)
        args, keywords = _switches.arguments(asking, offered)
        return getattr(type(module), method), args, keywords
    args, keywords = _switches.arguments(asking, offered)

    # Flax would take rngs for its own.
    def call(module: linen.Module, *data: PyTree, **named: PyTree) -> PyTree:
        return method(module, *data, *args, **named, **keywords)

    return call, [], {}


def _asking(module: linen.Module, method: Method, x: PyTree) -> list[inspect.Parameter]:
    """The parameters of a call after its input that the module has not set itself."""
    if not isinstance(method, str):
        return _switches.parameters(method, 1, x)
    receiver, function, before = _switches.receiver(module, method)
    return [
        parameter
        for parameter in _switches.parameters(function, before, x)
        if not _switches.is_set(receiver, parameter.name)
    ]

"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import chex
import jax
from flax import linen

from . import _batchnorm, _modes, _switches
from ._patched import patched

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
NOT_SOWN = (
    "what it computes leaves it as a part of its output, not by sow: give variables "
    "without what was sown or perturbed"
)


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def why_not(source: Any) -> str:
    """Why an object cannot be a layer, if linen is the reason; else empty."""
    if not is_module(source) or source.scope is None:
        return ""
    return (
        f"a {type(source).__name__} that is bound, of which others would not know what "
        f"they share with it; list the module that is not bound, or a function of it: "
        f"jpipe.layer(module, lambda module, x: module.part(x))"
    )


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


@contextmanager
def nothing_asked() -> Iterator[None]:
    """The scope in which variables are made without what is sown or perturbed.

    Linen makes such variables in ``init`` and does without them afterwards, unless it
    is asked for them: `sow` is no more than `False`, and `perturb` its value.
    """

    def sow(*_: Any) -> bool:
        return False

    def perturb(*call: Any) -> PyTree:
        _, _, _, args, keywords = call
        return keywords["value"] if "value" in keywords else args[1]

    with (
        patched([linen.Module], sow, "sow"),
        patched([linen.Module], perturb, "perturb"),
    ):
        yield


def call(method: Method) -> Callable[..., PyTree]:
    """``(module, x, rngs, train) -> y`` of a bound module."""
    watch = _modes.Watch()

    def run(module: Any, x: PyTree, rngs: PyTree, train: bool) -> PyTree:
        asking = _asking(module, method, x)
        offered = _switches.offered(asking, train, rngs)
        function: Any = method
        if isinstance(method, str):
            offered.pop("rngs", None)
            function = getattr(type(module), method)
        changes = train and module.is_mutable_collection("batch_stats")
        with (
            watch(_watched(module, method, x, asking, [*offered]), train),
            _batchnorm.meeting(changes),
        ):
            return _switches.bound(function, [module], x, asking, offered)()

    return run


def _watched(
    module: linen.Module,
    method: Method,
    x: PyTree,
    asking: Sequence[inspect.Parameter],
    offered: Sequence[str],
) -> _modes.Call:
    """A call of a bound module, for warnings."""
    if not isinstance(method, str):
        keywords = _switches.keywords(method, asking, x)
        name = getattr(method, "__name__", "a function")
        return _modes.Call(name, asking, offered, keywords, path=())
    receiver, function, _ = _switches.receiver(module, method)
    return _modes.Call(
        f"{type(receiver).__name__}.{method}",
        asking,
        offered,
        _switches.keywords(function, asking, x),
        _switches.passing(x, method),
        path=getattr(receiver, "path", ()),
    )


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

"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import chex
import jax
from flax import linen

from ..schedules._formats import format_type
from . import _batch_norm, _switches
from ._patches import patched

PyTree = Any

DATA_DEPENDENT_ADVICE = (
    "write them where the layer is trained alone (if not self.is_initializing()), and "
    "what is made in nn.cond, nn.switch or nn.custom_vjp outside of these first; give "
    "parameters that are made of data: pipe.init_train_state(key, x, tx, variables="
    "[None, module.init(key, data), None]), where None is initialized as ever; of one "
    "model variables=model.init(key, data)"
)
NOT_SOWN_ADVICE = (
    "what it computes leaves it as a part of its output, not by sow: give variables "
    "without what was sown or perturbed"
)


def is_module(source: Any) -> bool:
    """True if an object is a linen module."""
    return isinstance(source, linen.Module)


def rejection(source: Any) -> str:
    """The reason why a linen module cannot be a layer; empty if it can."""
    if not is_module(source) or source.scope is None:
        return ""
    return (
        f"{format_type(source)} that is bound, of which others would not know what "
        f"they share with it; list the module that is not bound, or a function of it: "
        f"jpipe.layer(module, lambda module, x: module.part(x))"
    )


def is_boxed(node: Any) -> bool:
    """True if a node of variables is a box, such as a `flax.linen.Partitioned`."""
    return isinstance(node, linen.meta.AxisMetadata)


def module_name(module: linen.Module) -> str:
    """The name that the user gave a module, or that of its class."""
    return module.name or type(module).__name__


def init_keys(key: chex.PRNGKey) -> dict[str, chex.PRNGKey]:
    """The keys of an initialization, by stream name.

    Linen asks for streams, and takes ``"params"`` for those that are missing. An nnx
    module in an `nnx.bridge.to_linen`, at any depth, takes ``"default"``.
    """
    return {"params": key, "default": jax.random.fold_in(key, 1)}


@contextmanager
def without_sown() -> Iterator[None]:
    """The scope in which ``init`` makes no variables for `sow` and `perturb`.

    Later calls have none of these variables, as nobody asks for them: then `sow`
    returns `False`, and `perturb` its value. So they do in this scope.
    """

    def sow(*_: Any) -> bool:
        return False

    def perturb(*call: Any) -> PyTree:
        _, _, _, args, kwargs = call
        return kwargs["value"] if "value" in kwargs else args[1]

    with (
        patched([linen.Module], sow, "sow"),
        patched([linen.Module], perturb, "perturb"),
    ):
        yield


@contextmanager
def tie_created(collections: Collection[str]) -> Iterator[None]:
    """The scope in which what a module makes follows from what it returns.

    What a module makes, such as zeros, follows from nothing. In a trace each variable
    becomes the result of an equation behind its module, and so of the stage that runs
    the end of it.

    Args:
      collections: the collections whose variables are made.
    """
    if not collections:
        yield
        return

    def tie(next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        before = _leaf_names(module, collections)
        y = next_function(*args, **kwargs)
        first, *_ = jax.tree.leaves(y) or [None]
        for collection, name in _leaf_names(module, collections) - before:
            value = module.get_variable(collection, name)
            tied, _ = jax.lax.optimization_barrier((value, first))
            module.put_variable(collection, name, tied)
        return y

    with linen.intercept_methods(tie):
        yield


def _leaf_names(
    module: linen.Module, collections: Collection[str]
) -> set[tuple[str, str]]:
    """The collection and the name of each variable of a module itself."""
    if module.scope is None:
        return set()
    names = set[tuple[str, str]]()
    for collection in collections:
        for name, value in module.variables.get(collection, {}).items():
            if not isinstance(value, Mapping):
                names.add((collection, name))
    return names


def adapt_method(method: _switches.Method) -> Callable[..., PyTree]:
    """Adapts a method to ``(module, x, rngs, *, train) -> y`` of a bound module."""

    def call(module: Any, x: PyTree, rngs: PyTree, *, train: bool) -> PyTree:
        parameters = _open_parameters(module, method, x)
        values = _switches.switch_values(parameters, train=train, rngs=rngs)
        if isinstance(method, str):
            # A method of linen has its keys in the scope.
            values.pop("rngs", None)
            function = getattr(type(module), method)
        else:
            function = method

        may_change = train and module.is_mutable_collection("batch_stats")
        with _batch_norm.intercept_batch_norms(may_change=may_change):
            bound = _switches.bind_call(
                function, [module], x, parameters=parameters, values=values
            )
            return bound()

    return call


def _open_parameters(
    module: linen.Module, method: _switches.Method, x: PyTree
) -> list[inspect.Parameter]:
    """The parameters of a call after its input that the module has not set itself."""
    if not isinstance(method, str):
        return _switches.open_parameters(method, 1, x)
    called = _switches.called_function(module, method)
    return [
        parameter
        for parameter in _switches.open_parameters(
            called.function, called.num_leading, x
        )
        if not _switches.is_set_on_module(called.module, parameter.name)
    ]

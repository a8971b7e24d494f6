"""Flax nnx modules as layers.

An nnx module holds its values itself. A pipeline keeps them outside, by collection and
path, and builds a new module from them in each trace: that of the user is only read.
"""

import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from . import _batch_norm, _nnx_rngs, _nnx_values, _switches

PyTree = Any
_ATTRIBUTES = ("deterministic", "use_running_average")


def is_module(source: Any) -> bool:
    """True if an object is an nnx module."""
    return isinstance(source, nnx.Module)


def module_name(module: nnx.Module) -> str:
    """The name of the class of a module."""
    return type(module).__name__


def rejection(source: Any) -> str:
    """The reason why an object of nnx cannot be a layer; empty if it can."""
    if is_module(source):
        return _module_fault(source)
    if isinstance(source, nnx.Pytree):
        return f"{type(source).__name__} is an nnx.Pytree; derive it from nnx.Module"
    return ""


def _module_fault(module: nnx.Module) -> str:
    name = module_name(module)
    try:
        for leaf in _nnx_values.split(module).leaves.values():
            _nnx_values.collection(leaf)
    except ValueError as error:
        return f"{name}: {error}"
    return "" if callable(module) else f"{name} is an nnx module without __call__"


def adapt_method(method: _switches.Method) -> Callable[..., PyTree]:
    """Adapts a method to ``(module, x, rngs, *, train) -> y``; it may change `module`.

    What the user set on the module, as by its ``eval``, stays in training; what is left
    open is trained. In evaluation it is evaluated. The call receives what it names of
    ``train``, ``deterministic``, ``use_running_average`` and ``rngs``.
    """

    def call(module: nnx.Module, x: PyTree, rngs: Any, *, train: bool) -> PyTree:
        module = _set_mode(module, train=train)
        missing_streams = _nnx_rngs.seed(module, rngs)
        call_rngs = None if rngs is None else _nnx_rngs.as_rngs(rngs, module)
        parameters = _open_parameters(module, method, x, keep_frozen=train)
        values = _switches.switch_values(parameters, train=train, rngs=call_rngs)
        graphdef = _nnx_values.split(module).graphdef

        with (
            _batch_norm.intercept_batch_norms(may_change=train and _has_norms(module)),
            _nnx_rngs.explain_missing_keys(missing_streams),
        ):
            # The scopes above may have replaced the method.
            function = (
                getattr(type(module), method) if isinstance(method, str) else method
            )
            bound = _switches.bind_call(
                function, [module], x, parameters=parameters, values=values
            )
            y = bound()

        nnx.pop(module, nnx.Intermediate)  # results that the call has sown
        if train and _nnx_values.split(module).graphdef != graphdef:
            raise ValueError(
                f"a call of this {module_name(module)} changes its structure or "
                f"attributes in training, which is lost when the call ends: every step "
                f"would start as the first one did; keep what a call changes in an "
                f"nnx.Variable that __init__ makes, and choose by its value with "
                f"jnp.where or jax.lax.cond"
            )
        return y

    return call


def _has_norms(module: nnx.Module) -> bool:
    nodes = (node for _, node in nnx.iter_graph(module, graph=True))
    return any(isinstance(node, nnx.BatchStat) for node in nodes)


def _can_be_viewed(path: Any, node: Any) -> bool:
    """True if a node can be viewed: a view of an nnx.Rngs would draw a key."""
    del path
    return not isinstance(node, nnx.Rngs)


def _set_mode(module: nnx.Module, *, train: bool) -> nnx.Module:
    """Sets a module to training, where the user left it open, or to evaluation."""
    if not train:
        nnx.Module.eval(module)
        attributes = dict.fromkeys(_ATTRIBUTES, True)
        return nnx.view(
            module, only=_can_be_viewed, raise_if_not_found=False, **attributes
        )
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.Module):
            for attribute in _ATTRIBUTES:
                if getattr(node, attribute, True) is None:
                    setattr(node, attribute, False)
    return module


def _open_parameters(
    module: nnx.Module, method: _switches.Method, x: PyTree, *, keep_frozen: bool
) -> list[inspect.Parameter]:
    """The parameters of a call after its input that are open.

    Args:
      module: the module, as the user set it.
      method: the name of its method, or a function of a module and its input.
      x: the input.
      keep_frozen: True if what the attributes freeze stays frozen: an argument would
        overrule the attributes.
    """
    if not isinstance(method, str):
        return _switches.open_parameters(method, 1, x)
    called = _switches.called_function(module, method)
    parameters = _switches.open_parameters(called.function, called.num_leading, x)
    if called.module is not module:  # an nnx.Sequential passes keys on
        parameters += [
            parameter
            for parameter in _switches.open_parameters(
                getattr(type(module), method), 0, x
            )
            if parameter.kind not in _switches.VARIADIC
        ]
    if not keep_frozen:
        return parameters

    frozen_names = set[str]()
    for _, node in nnx.iter_graph(module, graph=True):
        for name in _ATTRIBUTES:
            if getattr(node, name, None) is True:
                frozen_names.add(name)

    def is_open(parameter: inspect.Parameter) -> bool:
        if parameter.name not in frozen_names:
            return True
        # Without an argument the attributes decide, unless the parameter is required
        # or its default freezes all: then an unfrozen module needs the argument.
        is_frozen = getattr(called.module, parameter.name, None) is True
        return parameter.default not in (None, False) and not is_frozen

    return [parameter for parameter in parameters if is_open(parameter)]

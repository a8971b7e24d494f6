"""Adapts layers of any origin to one signature."""

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import numpy as np
from flax import nnx

from .._jaxprs._jaxpr import zeros
from .._messages import raise_all
from ..schedules._formats import format_type
from . import _inputs, _linen, _nnx, _skip, _switches
from ._method import MethodLayer

PyTree = Any
_PARTITION = "params, static = eqx.partition(module, eqx.is_inexact_array)"


@dataclass(frozen=True)
class Layer:
    """Two functions as a layer, for models that are not Flax: ``Layer(init, apply)``.

    Of a method of a Flax module `jpipe.layer` makes a layer.

    Attributes:
      init: ``(key, x) -> variables``: a mapping with the trainable pytree under
        ``"params"`` and constants under any other name. ``x`` has the shapes and
        dtypes of the layer's input; its values are zeros.
      apply: ``(variables, x) -> y``. It receives what its signature names of
        ``train``, ``deterministic``, ``use_running_average`` and ``rngs``.
      name: the name in pictures and errors.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> scale = jpipe.Layer(
      ...     init=lambda key, x: {"params": jnp.ones(x.shape[-1])},
      ...     apply=lambda variables, x: variables["params"] * x,
      ...     name="scale",
      ... )
      >>> pipe = jpipe.pipeline([scale], num_microbatches=2)
      >>> pipe.init(jax.random.key(0), jnp.ones((4, 3)))[0]["params"].shape
      (3,)
    """

    init: Callable[[chex.PRNGKey, PyTree], Mapping[str, PyTree]]
    apply: Callable[..., PyTree]
    name: str = "Layer"


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """A layer of any origin behind one signature: that of `call`.

    Attributes:
      name: the name in pictures and errors.
      source: the object that the user listed.
      call: ``(handle, x, rngs, *, train) -> y``: the handle is a bound module of linen,
        a module of nnx, or else the variables.
      init: ``(key, x) -> variables`` of a `Layer`; ``None`` of all others.
      module: the module whose method is called, where the source is a `MethodLayer`.
      graphdef: the `flax.nnx.graphdef` of an nnx module when it was listed.
    """

    name: str
    source: Any
    call: Callable[..., PyTree]
    init: Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]] | None = None
    module: Any = None
    graphdef: Any = None

    @property
    def owner(self) -> Any:
        """The object whose parameters it uses."""
        return self.source if self.module is None else self.module


def adapt_layers(layers: Sequence[Any]) -> tuple[LayerAdapter, ...]:
    """Adapts every object of the user's list.

    Args:
      layers: linen modules, nnx modules, `Layer` objects and functions of one pytree.

    Returns:
      One `LayerAdapter` per object, in order.

    Raises:
      TypeError: with every object that is none of these.
      ValueError: if the list is empty.
    """
    is_text_or_dict = isinstance(layers, str | bytes | Mapping)
    is_array = hasattr(layers, "shape")
    if is_text_or_dict or is_array or not isinstance(layers, Iterable):
        raise TypeError(
            f"layers is {format_type(layers)}; needs a Flax module, a function, or "
            f"a sequence of layers, such as [nn.Dense(8), nn.relu]"
        )
    sources = list(layers)
    if not sources:
        raise ValueError("layers=[]: a pipeline needs at least one layer")
    faults = [
        f"layer {i}: {reason}"
        for i, source in enumerate(sources)
        if (reason := _rejection(source))
    ]
    raise_all(
        "a layer is a flax.linen module, a flax.nnx module, a jpipe.Layer or a "
        "function x -> y",
        faults,
        error=TypeError,
    )
    return tuple(_adapt_layer(source) for source in sources)


def is_model(source: Any) -> bool:
    """True if an object is one model, and no list of layers."""
    is_layer = isinstance(source, Layer | MethodLayer | _skip.Isolated)
    return is_layer or is_module(source) or callable(source)


def _rejection(source: Any) -> str:
    """The reason why an object cannot be a layer; empty if it can."""
    if isinstance(source, _skip.Isolated):
        return _rejection(source.layer)
    if isinstance(source, type):
        return f"{source.__name__} is a class; write {source.__name__}(...)"

    module = source.module if isinstance(source, MethodLayer) else source
    reason = (
        _linen.rejection(module)
        or _nnx.rejection(source)
        or _bound_module_rejection(source)
        or _pytree_rejection(source)
    )
    if reason:
        return reason

    is_adaptable = isinstance(source, Layer | MethodLayer) or _linen.is_module(source)
    if is_adaptable or callable(source):
        return ""
    if isinstance(source, list | tuple):
        advice = "list its layers themselves, and type balance= for stages"
        return f"{format_type(source)}; {advice}"
    return f"{reprlib.repr(source)} is {format_type(source)}"


def _bound_module_rejection(source: Any) -> str:
    """The reason why a method of a module is no layer: its values would be constants.

    Empty if the object is none.
    """
    function = source
    while not is_module(module := getattr(function, "__self__", function)):
        # The function inside of a functools.partial or a jax.jit.
        is_partial = isinstance(function, functools.partial)
        inner = function.func if is_partial else getattr(function, "__wrapped__", None)
        if inner is None:
            return ""
        function = inner
    if module is source:
        return ""
    method = getattr(function, "__name__", "__call__")
    form = "itself" if method == "__call__" else f"as jpipe.layer(module, {method!r})"
    return (
        f"a function that calls {format_type(module)}, whose values would become "
        f"constants; list the module {form}"
    )


def _pytree_rejection(source: Any) -> str:
    """The reason why a callable pytree is no layer: its arrays would not be trained.

    Empty if the object is none.
    """
    if not callable(source) or is_module(source):
        return ""
    leaves = (leaf for leaf in jax.tree.leaves(source) if leaf is not source)
    are_arrays = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    if not any(are_arrays):
        return ""
    if all(are_arrays):
        partition = ""
        params = "module"
        call = "variables['params']"
    else:
        partition = f"take {_PARTITION} and "
        params = "params"
        call = "eqx.combine(variables['params'], static)"
    return (
        f"{type(source).__name__} is a pytree with arrays, which would be constants; "
        f"to train them {partition}list jpipe.Layer(lambda key, x: "
        f"{{'params': {params}}}, lambda variables, x: {call}(x)), else "
        f"lambda x: module(x)"
    )


def is_module(source: Any) -> bool:
    """True if an object is a module of linen or nnx."""
    return _linen.is_module(source) or _nnx.is_module(source)


def _adapt_layer(source: Any) -> LayerAdapter:
    """Adapts one object of the user's list, which was checked to be a layer."""
    if isinstance(source, _skip.Isolated):
        adapter = _adapt_layer(source.layer)
        in_namespace = _skip.namespace_scope(source.namespace)
        return replace(adapter, call=in_namespace(adapter.call))
    if isinstance(source, Layer):
        return _adapt_functions(source)
    if isinstance(source, MethodLayer):
        return _adapt_module(source, source.module, source.method)
    if is_module(source):
        return _adapt_module(source, source, "__call__")
    return _adapt_function(source)


def _adapt_module(
    source: Any, module: Any, method: str | Callable[..., PyTree]
) -> LayerAdapter:
    if _nnx.is_module(module):
        name = _nnx.module_name(module)
        call = _nnx.adapt_method(method)
        graphdef = nnx.graphdef(module)
    else:
        name = _linen.module_name(module)
        call = _linen.adapt_method(method)
        graphdef = None

    is_method = isinstance(source, MethodLayer)
    method_name = method if isinstance(method, str) else getattr(method, "__name__", "")
    if is_method and method_name not in ("", "<lambda>"):
        name = f"{name}.{method_name}"
    return LayerAdapter(
        name,
        source,
        call=call,
        module=module if is_method else None,
        graphdef=graphdef,
    )


def check_unchanged(
    layers: Sequence[LayerAdapter], name_form: str = "layer {}"
) -> None:
    """Checks that nnx modules are what they were when they were listed.

    Args:
      layers: all layers.
      name_form: the name of a layer in errors, with ``{}`` for its index.

    Raises:
      ValueError: with the first whose structure or attributes changed.
    """
    for index, layer in enumerate(layers):
        owner = layer.owner
        if _nnx.is_module(owner) and nnx.graphdef(owner) != layer.graphdef:
            raise ValueError(
                f"{name_form.format(index)} ({layer.name}) was changed after the "
                f"pipeline was made of it; make a new pipeline, which takes the same "
                f"variables and states; to evaluate change nothing: pipe.apply "
                f"evaluates all"
            )


def _adapt_functions(layer: Layer) -> LayerAdapter:
    """Adapts the two functions of a `Layer`."""

    def init(key: chex.PRNGKey, x: PyTree) -> dict[str, PyTree]:
        inputs, named_inputs = _inputs.call_arguments(zeros(x))
        variables = layer.init(key, *inputs, **named_inputs)
        _check_variables(variables)
        return dict(variables)

    def call(variables: PyTree, x: PyTree, rngs: Any, *, train: bool) -> PyTree:
        return _switches.call(layer.apply, [variables], x, rngs=rngs, train=train)

    return LayerAdapter(layer.name, layer, call=call, init=init)


def _check_variables(variables: Any) -> None:
    """Checks that the init of a `Layer` returned a mapping with arrays.

    Raises:
      TypeError: if it did not.
    """
    if not isinstance(variables, Mapping):
        is_array = isinstance(variables, jax.Array)
        class_name = "array" if is_array else type(variables).__name__
        raise TypeError(
            f"the init of a jpipe.Layer returns a mapping, such as "
            f"{{'params': ...}} or {{}}; this one returned: {class_name}"
        )
    faults = [
        f"{jax.tree_util.keystr(path)} is {leaf!r}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
        if callable(leaf)
    ]
    raise_all(
        f"the init of a jpipe.Layer returns arrays; of a model of Equinox take "
        f"{_PARTITION}, give params, and call eqx.combine(variables['params'], "
        f"static) in apply",
        faults,
        error=TypeError,
    )


def _adapt_function(function: Callable[..., PyTree]) -> LayerAdapter:
    def call(variables: PyTree, x: PyTree, rngs: Any, *, train: bool) -> PyTree:
        del variables
        return _switches.call(function, [], x, rngs=rngs, train=train)

    return LayerAdapter(_function_name(function), function, call=call)


def _function_name(function: Callable[..., PyTree]) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)

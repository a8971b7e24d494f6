"""Layers of any origin: what a user may list as one, adapted to one signature."""

import functools
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import numpy as np
from flax import nnx

from .._jaxprs._jaxpr import zeros
from .._messages import raise_all
from . import _inputs, _linen, _modes, _nnx, _skip, _switches
from ._method import Method

PyTree = Any
_PARTITION = "params, static = eqx.partition(module, eqx.is_inexact_array)"


@dataclass(frozen=True)
class Layer:
    """A layer made of two functions, for models that are not Flax.

    `jpipe.layer` makes a layer of a method of a Flax module.

    Attributes:
      init: ``init(key, x) -> variables``: a mapping with the trainable pytree under
        ``"params"`` and constants under any other name. ``x`` has the shapes and
        dtypes of the layer's input; its values are zeros.
      apply: ``apply(variables, x) -> y``. Where its signature names ``train``,
        ``deterministic``, ``use_running_average`` or ``rngs``, it receives them.
      name: how pictures and errors call it.

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
      name: how pictures and errors call it.
      source: the object that the user listed.
      call: ``(handle, x, rngs, train) -> y``: the handle is a bound module of linen, a
        module of nnx, or else the variables.
      init: ``(key, x) -> variables`` of a layer that is no module; ``None`` where it
        has none.
      module: the object whose parameters it uses, if it is not the source.
      namespace: that of the names which it stashes and pops.
      structure: of an nnx module its `flax.nnx.graphdef` when it was listed.
    """

    name: str
    source: Any
    call: Callable[..., PyTree]
    init: Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]] | None = None
    module: Any = None
    namespace: Hashable = None
    structure: Any = None

    @property
    def owner(self) -> Any:
        """The object whose parameters it uses."""
        return self.source if self.module is None else self.module


def adapt_layers(listed: Sequence[Any]) -> tuple[LayerAdapter, ...]:
    """Adapts every object of the user's list.

    Args:
      listed: linen modules, nnx modules, `Layer` objects and functions of one pytree.

    Returns:
      One `LayerAdapter` per object, in order.

    Raises:
      TypeError: with every object that is none of these.
      ValueError: if the list is empty.
    """
    is_text_or_dict = isinstance(listed, str | bytes | Mapping)
    is_array = hasattr(listed, "shape")
    if is_text_or_dict or is_array or not isinstance(listed, Iterable):
        raise TypeError(
            f"stages is a {type(listed).__name__}; needs a Flax module, a function, or "
            f"a sequence of layers, such as [nn.Dense(8), nn.relu]"
        )
    objects = list(listed)
    if not objects:
        raise ValueError("stages=[]: a pipeline needs at least one layer")
    faults = [
        f"layer {i}: {fault}"
        for i, source in enumerate(objects)
        if (fault := _why_not(source))
    ]
    raise_all(
        "a layer is a flax.linen module, a flax.nnx module, a jpipe.Layer or a "
        "function x -> y",
        faults,
        error=TypeError,
    )
    return tuple(adapt_layer(source) for source in objects)


def is_model(source: Any) -> bool:
    """Whether something is one model, and no list of layers."""
    is_listed = isinstance(source, Layer | Method | _skip.Isolated)
    return is_listed or is_module(source) or callable(source)


def _why_not(source: Any) -> str:
    if isinstance(source, _skip.Isolated):
        return _why_not(source.layer)
    if isinstance(source, type):
        return f"{source.__name__} is a class; write {source.__name__}(...)"
    module = source.module if isinstance(source, Method) else source
    if reason := _linen.why_not(module) or _nnx.why_not(source):
        return reason
    if reason := _binds_module(source) or _holds_arrays(source):
        return reason
    known = isinstance(source, Layer | Method) or _linen.is_module(source)
    if known or callable(source):
        return ""
    kind = type(source).__name__
    if isinstance(source, list | tuple):
        return f"a {kind}; list its layers themselves, and type balance= for stages"
    return f"{reprlib.repr(source)} is a {kind}"


def _binds_module(source: Any) -> str:
    """Why a method of a module cannot be a layer: the module would be a constant."""
    function = source
    while not is_module(module := getattr(function, "__self__", function)):
        # What a functools.partial or a jax.jit calls.
        is_partial = isinstance(function, functools.partial)
        inner = function.func if is_partial else getattr(function, "__wrapped__", None)
        if inner is None:
            return ""
        function = inner
    if module is source:
        return ""
    method = getattr(function, "__name__", "__call__")
    own = "itself" if method == "__call__" else f"as jpipe.layer(module, {method!r})"
    return (
        f"a function that calls a {type(module).__name__}, whose values would become "
        f"constants; list the module {own}"
    )


def _holds_arrays(source: Any) -> str:
    """Why a callable cannot be a layer, if it is a pytree that would not be trained."""
    if not callable(source) or is_module(source):
        return ""
    parts = (x for x in jax.tree.leaves(source) if x is not source)
    are_arrays = [isinstance(x, jax.Array | np.ndarray) for x in parts]
    if not any(are_arrays):
        return ""
    split, params, call = "", "module", "variables['params']"
    if not all(are_arrays):
        split, params = f"take {_PARTITION} and ", "params"
        call = "eqx.combine(variables['params'], static)"
    return (
        f"{type(source).__name__} is a pytree with arrays, which would be constants; "
        f"to train them {split}list jpipe.Layer(lambda key, x: {{'params': {params}}}, "
        f"lambda variables, x: {call}(x)), else lambda x: module(x)"
    )


def is_module(value: Any) -> bool:
    """Whether something is a module of linen or nnx."""
    return _linen.is_module(value) or _nnx.is_module(value)


def adapt_layer(source: Any) -> LayerAdapter:
    """Adapts one object of the user's list, which was checked to be a layer."""
    if isinstance(source, _skip.Isolated):
        inner, outer = adapt_layer(source.layer), source.namespace
        both = outer if inner.namespace is None else (outer, inner.namespace)
        return replace(inner, namespace=both)
    if isinstance(source, Layer):
        return _from_layer(source)
    if isinstance(source, Method):
        return _from_module(source, source.module, source.method)
    if is_module(source):
        return _from_module(source, source, "__call__")
    return _from_function(source)


def _from_module(source: Any, module: Any, method: Any) -> LayerAdapter:
    called = method if isinstance(method, str) else getattr(method, "__name__", "")
    structure = None
    if _nnx.is_module(module):
        name, call = _nnx.name(module), _nnx.call(method)
        structure = nnx.graphdef(module)
    else:
        name, call = _linen.name(module), _linen.call(method)
    if isinstance(source, Method) and called not in ("", "<lambda>"):
        name = f"{name}.{called}"
    owner = module if isinstance(source, Method) else None
    return LayerAdapter(name, source, call, None, owner, structure=structure)


def check_unchanged(layers: Sequence[LayerAdapter], called: str = "layer {}") -> None:
    """Checks that nnx modules are what they were when they were listed.

    Args:
      layers: all layers.
      called: what to call one, by its number.

    Raises:
      ValueError: with the first whose structure or attributes are others.
    """
    for number, layer in enumerate(layers):
        owner = layer.owner
        if _nnx.is_module(owner) and nnx.graphdef(owner) != layer.structure:
            raise ValueError(
                f"{called.format(number)} ({layer.name}) was changed after the "
                f"pipeline was made of it; make a new pipeline, which takes the same "
                f"variables and states; to evaluate change nothing: pipe.apply "
                f"evaluates all"
            )


def _from_layer(layer: Layer) -> LayerAdapter:

    def init(key: chex.PRNGKey, x: PyTree) -> dict[str, PyTree]:
        data, named = _inputs.arguments(zeros(x))
        made = layer.init(key, *data, **named)
        if not isinstance(made, Mapping):
            kind = "array" if isinstance(made, jax.Array) else type(made).__name__
            raise TypeError(
                f"the init of a jpipe.Layer returns a mapping, such as "
                f"{{'params': ...}} or {{}}; this one returned: {kind}"
            )
        faults = [
            f"{jax.tree_util.keystr(path)} is {leaf!r}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(made)
            if callable(leaf)
        ]
        raise_all(
            f"the init of a jpipe.Layer returns arrays; of a model of Equinox take "
            f"{_PARTITION}, give params, and call eqx.combine(variables['params'], "
            f"static) in apply",
            faults,
            error=TypeError,
        )
        return dict(made)

    watch = _modes.Watch()

    def call(variables, x, rngs, train):
        function, before = layer.apply, [variables]
        with watch(_watched(layer.name, function, before, x), train):
            return _switches.call(function, before, x, rngs, train)

    return LayerAdapter(layer.name, layer, call, init)


def _from_function(function: Callable[..., PyTree]) -> LayerAdapter:

    name, watch = _name(function), _modes.Watch()

    def call(variables, x, rngs, train):
        del variables
        with watch(_watched(name, function, [], x), train):
            return _switches.call(function, [], x, rngs, train)

    return LayerAdapter(name, function, call)


def _watched(
    name: str, function: Callable[..., PyTree], before: Sequence[Any], x: PyTree
) -> _modes.Call:
    """A call of a function, for warnings."""
    asking = _switches.parameters(function, len(before), x)
    offered = _switches.offered(asking, True, None)
    return _modes.Call(
        name, asking, [*offered], _switches.keywords(function, asking, x)
    )


def _name(function: Callable[..., PyTree]) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__name__", type(inner).__name__)

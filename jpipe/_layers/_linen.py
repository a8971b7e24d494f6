"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
from flax import linen
from flax.core import DenyList
from jax.extend import core

from .. import _compat
from .._jaxprs import _flow, _jaxpr
from .._jaxprs._jaxpr import zeros
from . import _batchnorm, _inputs, _modes, _switches
from ._tree import flat, nested

PyTree = Any
# The name of a method, or a function of a module and its input.
Method = str | Callable[..., PyTree]

_OF_DATA = (
    "write them where the layer is trained alone (if not self.is_initializing()), and "
    "what is made in nn.cond, nn.switch or nn.custom_vjp outside of these first; give "
    "parameters that are made of data: pipe.init_train_state(key, x, tx, variables="
    "[None, module.init(key, data), None]), where None is initialized as ever; of one "
    "model variables=model.init(key, data)"
)
_NOT_SOWN = "what it computes leaves it as a part of its output, not by sow"


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def is_box(node: Any) -> bool:
    """Whether a node of variables is a box, such as a `flax.linen.Partitioned`."""
    return isinstance(node, linen.meta.AxisMetadata)


def name(module: linen.Module) -> str:
    """What to call a module: its own name or that of its class."""
    return module.name or type(module).__name__


def init(
    module: linen.Module, method: Method = "__call__"
) -> Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]]:
    """``(key, spec) -> variables`` of a module, from the shapes of its input alone.

    The values are those of ``module.init(key, x)``. A module whose parameters depend on
    the values of ``x`` is refused.
    """

    def run(key: chex.PRNGKey, spec: PyTree) -> dict[str, PyTree]:
        rngs = _streams(key)
        called, args, keywords = _called(module, method, spec, rngs, train=False)

        def make(rngs: PyTree, x: PyTree) -> PyTree:
            data, named = _inputs.arguments(x)
            named |= keywords
            return module.init(rngs, *data, *args, method=called, **named)

        return dict(_made(make, rngs, spec))

    return run


def extend(
    module: linen.Module, method: Method = "__call__"
) -> Callable[[chex.PRNGKey, PyTree, PyTree], dict[str, PyTree]]:
    """``(key, spec, borrowed) -> variables``: what a method makes beside given ones."""

    def run(key: chex.PRNGKey, spec: PyTree, borrowed: PyTree) -> dict[str, PyTree]:
        rngs = _streams(key)
        called, args, keywords = _called(module, method, spec, rngs, train=False)
        given = flat(borrowed)

        def added(known: tuple[PyTree, PyTree], x: PyTree) -> PyTree:
            borrowed, rngs = known
            data, named = _inputs.arguments(x)
            _, made = module.apply(
                borrowed,
                *data,
                *args,
                rngs=rngs,
                method=called,
                mutable=DenyList("intermediates"),
                **named,
                **keywords,
            )
            made = flat(made)
            return nested({name: made[name] for name in made if name not in given})

        return _made(added, (borrowed, rngs), spec)

    return run


def _streams(key: chex.PRNGKey) -> dict[str, chex.PRNGKey]:
    """The keys of an initialization, by stream name.

    Flax takes what linen asks for by another name from ``"params"``, and what an nnx
    module asks for, in `nnx.bridge.to_linen` wherever that is, from ``"default"``.
    """
    return {"params": key, "default": jax.random.fold_in(key, 1)}


def _made(
    make: Callable[[PyTree, PyTree], PyTree], known: PyTree, spec: PyTree
) -> PyTree:
    """What an initialization makes for an input of which only the shapes are known.

    Args:
      make: ``(known, x) -> variables``.
      known: what it may read.
      spec: the input.

    Raises:
      ValueError: with what would depend on the values of the input.
    """
    closed, made = _jaxpr.trace(make, known, spec)
    given = jax.tree.leaves(known)
    paths = jax.tree_util.tree_leaves_with_path(made)
    of_input = [number >= len(given) for number in range(len(closed.jaxpr.invars))]
    reached = _flow.reached(closed, of_input)
    faults = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, _), is_reached in zip(paths, reached, strict=True)
        if is_reached
    ]
    if faults:
        raise ValueError(
            f"what a layer holds at the start follows from the shapes of its input "
            f"alone, and not from its values, as {', '.join(faults)} would; "
            f"{_OF_DATA}; {_NOT_SOWN}"
        )
    values = _jaxpr.rest(closed, closed.jaxpr.outvars, [])
    leaves = core.jaxpr_as_fun(values)(*given, *jax.tree.leaves(zeros(spec)))
    return jax.tree.unflatten(jax.tree.structure(made), leaves)


@dataclass
class Adopted:
    """What modules took in from outside.

    Attributes:
      modules: by their identities, the paths of what they became.
      in_place: whether one took the place of what it is in: `flax.linen.share_scope`.
    """

    modules: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    in_place: bool = False


@contextmanager
def adopting() -> Iterator[Adopted]:
    """The scope in which it is noted what modules take in."""
    found = Adopted()

    def note(call: Any, args: Any, keywords: Any, context: Any) -> Any:
        y = call(*args, **keywords)
        module = context.module
        found.modules.update(_compat.adopted(module.scope.root))
        outer = module.parent
        found.in_place |= is_module(outer) and outer.scope is module.scope
        return y

    with linen.intercept_methods(note):
        yield found


def apply(
    module: linen.Module, method: Method = "__call__"
) -> Callable[..., tuple[PyTree, dict[str, PyTree]]]:
    """``(variables, x, rngs, train) -> (y, changed)`` of a module."""

    def run(variables, x, rngs, train):
        called, args, keywords = _called(module, method, x, rngs, train)
        data, named = _inputs.arguments(x)
        args = [*data, *args]
        mutable = [key for key in variables if key != "params"] if train else []
        keywords |= {**named, "rngs": rngs, "method": called}
        asking = _asking(module, method, x)
        known = [p.name for p in asking if _switches.is_switch(p)]
        with _modes.watching("", known, [], train):
            if not mutable:
                return module.apply(variables, *args, **keywords), {}
            with _batchnorm.meeting(mutable):
                y, changed = module.apply(variables, *args, mutable=mutable, **keywords)
        _check_none_made(module, variables, changed)
        return y, dict(changed)

    return run


def _check_none_made(
    module: linen.Module, before: Mapping[str, PyTree], after: Mapping[str, PyTree]
) -> None:
    """Checks that a call only changed what there was, and there only arrays.

    Raises:
      ValueError: with what it made, or what it made something else of.
    """
    old = flat({name: before[name] for name in after})
    was, now = (
        {n: jax.tree.structure(x) for n, x in t.items()} for t in (old, flat(after))
    )
    faults = [
        f"{'/'.join(map(str, names))} was {was.get(names, 'not there')} and became "
        f"{now.get(names, 'nothing')}"
        for names in {**was, **now}
        if was.get(names) != now.get(names)
    ]
    if faults:
        raise ValueError(
            f"a call of this {type(module).__name__} changes which variables there "
            f"are, or their structure: {'; '.join(faults)}. A pipeline keeps arrays in "
            f"the structure that they were made in; {_NOT_SOWN}"
        )


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

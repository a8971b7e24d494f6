"""Flax nnx modules as layers.

An nnx module holds its values itself. A pipeline keeps them outside, by collection and
path, and makes a new module of them inside of each trace: the user's is only read.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from . import _batchnorm, _modes, _nnx_rngs, _nnx_values, _switches

PyTree = Any
_ATTRIBUTES = ("deterministic", "use_running_average")


def is_module(source: Any) -> bool:
    """Whether an object is an nnx module."""
    return isinstance(source, nnx.Module)


def name(module: nnx.Module) -> str:
    """What to call a module: its class."""
    return type(module).__name__


def why_not(source: Any) -> str:
    """Why an object cannot be a layer, if nnx is the reason; else empty."""
    if is_module(source):
        return _unfit(source)
    if isinstance(source, nnx.Pytree):
        return f"{type(source).__name__} is an nnx.Pytree; derive it from nnx.Module"
    return ""


def _unfit(module: nnx.Module) -> str:
    try:
        for leaf in _nnx_values.flat(module)[1].values():
            _nnx_values.collection(leaf)
    except ValueError as error:
        return f"{name(module)}: {error}"
    return (
        "" if callable(module) else f"{name(module)} is an nnx module without __call__"
    )


def call(method: str | Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``(module, x, rngs, train) -> y`` of a method of a module, which may change it.

    What the user set on the module, as by its ``eval``, stays in training; what is left
    open is trained. In evaluation it is evaluated. The call is passed what it names of
    ``train``, ``deterministic``, ``use_running_average`` and ``rngs``.
    """
    watch = _modes.Watch()

    def run(module: nnx.Module, x: PyTree, rngs: Any, train: bool) -> PyTree:
        own = _set_mode(module, train)
        lacking = _nnx_rngs.seed(own, rngs)
        keys = None if rngs is None else _nnx_rngs.as_rngs(rngs, own)
        asking = _asking(own, method, x, frozen=train)
        offered = _switches.offered(asking, train, keys)
        graphdef, _ = _nnx_values.flat(own)
        nodes = (node for _, node in nnx.iter_graph(own, graph=True))
        has_norms = train and any(isinstance(x, nnx.BatchStat) for x in nodes)
        with (
            watch(_watched(own, method, x, asking, [*offered]), train),
            _batchnorm.meeting(has_norms),
            _nnx_rngs.needed(lacking),
        ):
            # Which the scopes above may have replaced.
            function = getattr(type(own), method) if isinstance(method, str) else method
            y = _switches.bound(function, [own], x, asking, offered)()
        nnx.pop(own, nnx.Intermediate)  # results that the call has sown
        if train and _nnx_values.flat(own)[0] != graphdef:
            raise ValueError(
                f"a call of this {name(own)} changes its structure or attributes in "
                f"training, which is lost when the call ends: every step would start "
                f"as the first one did; keep what a call changes in an nnx.Variable "
                f"that __init__ makes, and choose by its value with jnp.where or "
                f"jax.lax.cond"
            )
        return y

    return run


def _watched(
    own: nnx.Module,
    method: str | Callable[..., PyTree],
    x: PyTree,
    asking: Sequence[inspect.Parameter],
    offered: Sequence[str],
) -> _modes.Call:
    """A call of a module, for warnings."""
    if not isinstance(method, str):
        keywords = _switches.keywords(method, asking, x)
        return _modes.Call(name(own), asking, offered, keywords)
    _, function, _ = _switches.receiver(own, method)
    return _modes.Call(
        name(own),
        asking,
        offered,
        _switches.keywords(function, asking, x),
        _switches.passing(x, method),
    )


def _has_mode(path: Any, node: Any) -> bool:
    """Whether a node can be viewed; of an nnx.Rngs, that would draw a key."""
    del path
    return not isinstance(node, nnx.Rngs)


def _set_mode(own: nnx.Module, train: bool) -> nnx.Module:
    """Sets a module to training, where the user left it open, or to evaluation."""
    if not train:
        nnx.Module.eval(own)
        modes = dict.fromkeys(_ATTRIBUTES, True)
        return nnx.view(own, only=_has_mode, raise_if_not_found=False, **modes)
    for _, node in nnx.iter_graph(own, graph=True):
        if isinstance(node, nnx.Module):
            for attribute in _ATTRIBUTES:
                if getattr(node, attribute, True) is None:
                    setattr(node, attribute, False)
    return own


def _asking(
    own: nnx.Module, method: str | Callable[..., PyTree], x: PyTree, frozen: bool
) -> list[inspect.Parameter]:
    """The parameters of a call after its input that are open.

    Args:
      own: the module, as the user set it.
      method: the name of its method, or a function of a module and its input.
      x: its input.
      frozen: whether what is frozen stays so: it says so by its attributes, and an
        argument would overrule them.
    """
    if not isinstance(method, str):
        return _switches.parameters(method, 1, x)
    module, function, before = _switches.receiver(own, method)
    asking = _switches.parameters(function, before, x)
    if module is not own:  # nnx.Sequential passes keys on
        asking += [
            parameter
            for parameter in _switches.parameters(getattr(type(own), method), 0, x)
            if parameter.kind not in _switches.VARIOUS
        ]
    if not frozen:
        return asking
    nodes = [node for _, node in nnx.iter_graph(own, graph=True)]
    switched = {
        n for n in _ATTRIBUTES if any(getattr(x, n, None) is True for x in nodes)
    }
    # An argument would overrule the attributes; without it they decide.
    return [
        p
        for p in asking
        if p.name not in switched
        or (
            p.default not in (None, False) and getattr(module, p.name, None) is not True
        )
    ]

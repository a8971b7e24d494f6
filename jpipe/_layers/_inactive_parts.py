"""Finds the dropouts, norms and attentions of Flax that are off in training.

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, enable_dropout=False):
            return nn.Dropout(0.5)(x, deterministic=not enable_dropout)

A pipeline passes ``train`` to a layer, or another common name of a switch, but not
``enable_dropout``: such a block would be trained without dropout, and nothing would
show it. So `Pipeline.check` traces each layer in the scope of `collect_notes`, which
sees the calls of these classes: those of linen by `flax.linen.intercept_methods`, those
of nnx by patches. Whoever wants a dropout off sets it as an attribute, of the part or
of a linen module around it; one that an argument turned off is noted by its name. A
norm of linen inside of a layer is noted too: `nn.BatchNorm(use_running_average=not
train)` makes an attribute of an argument.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import linen, nnx

from . import _switches
from ._linen_parent import path_in_layer
from ._patches import patched


class _SwitchedPart(NamedTuple):
    """A class of Flax whose modules compute something else in training.

    Attributes:
      name: its name in notes.
      switch: the name of the argument, and of the attribute, that turns it off.
      rate: the name of the attribute with its rate, which may be zero; empty if it has
        none.
    """

    name: str
    switch: str
    rate: str = ""


_DROPOUT = _SwitchedPart("dropout", "deterministic", "rate")
_NORM = _SwitchedPart("batch norm", "use_running_average")
_ATTENTION = _SwitchedPart("attention", "deterministic", "dropout_rate")
_LINEN: dict[type, _SwitchedPart] = {
    linen.Dropout: _DROPOUT,
    linen.BatchNorm: _NORM,
    linen.MultiHeadDotProductAttention: _ATTENTION,
}
_NNX: dict[type, _SwitchedPart] = {
    nnx.Dropout: _DROPOUT,
    nnx.BatchNorm: _NORM,
    nnx.MultiHeadAttention: _ATTENTION,
}
# Its value is a part of the key of JAX's cache of traces.
_scope = jax.make_user_context()
_scopes = itertools.count(1)


@contextmanager
def collect_notes(*, train: bool) -> Iterator[list[str]]:
    """The scope in which a layer is traced and watched.

    Args:
      train: True in training; in evaluation all parts are off.

    Yields:
      A list that receives, at the end, a note if parts are off.
    """
    notes: list[str] = []
    if not train:
        yield notes
        return

    # name of a part that is off -> None: a set in the order of the calls
    inactive: dict[str, None] = {}

    def see_linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        for flax_class, part in _LINEN.items():
            if context.method_name != "__call__" or not isinstance(module, flax_class):
                continue
            is_off = _is_off(part, module, context.orig_method, args, kwargs)
            path = "/".join(map(str, path_in_layer(module.path)))
            # Flax's own form of a norm sets what an argument says as its attribute.
            is_inner_norm = part is _NORM and bool(path)
            if is_off and (is_inner_norm or not _is_set_to_evaluate(module)):
                inactive[f"{part.name} {path}".strip()] = None
        return call(*args, **kwargs)

    def see_nnx(
        flax_class: type, call: Any, module: Any, args: Any, kwargs: Any
    ) -> Any:
        part = _NNX[flax_class]
        is_chosen = getattr(module, part.switch) is True  # as its `eval` sets it
        if not is_chosen and _is_off(part, module, call, (module, *args), kwargs):
            inactive[f"{part.name} {type(module).__name__}"] = None
        return call(module, *args, **kwargs)

    # Without a context of its own, `flax.linen.jit` would take the trace of an equal
    # layer from JAX's cache.
    with (
        _scope(next(_scopes)),
        linen.intercept_methods(see_linen),
        patched(_NNX, see_nnx),
    ):
        yield notes
    if inactive:
        notes.append(
            f"off in training: {', '.join(inactive)}; let each call around it take "
            f"train and pass it on, or list jpipe.layer(module, lambda module, x, "
            f"train: module(x, enable_dropout=train)); where that is meant, set the "
            f"part itself, as nn.Dropout(rate, deterministic=True) does"
        )


def _is_off(
    part: _SwitchedPart,
    module: Any,
    method: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> bool:
    """True if a part is off that would drop or normalize in training."""
    if part.rate and getattr(module, part.rate) == 0:
        return False
    arguments = inspect.signature(method).bind_partial(*args, **kwargs).arguments
    value = arguments.get(part.switch)
    if value is None:
        value = getattr(module, part.switch, None)
    return isinstance(value, _switches.BOOL_TYPES) and bool(value)


def _is_set_to_evaluate(module: Any) -> bool:
    """True if an attribute of a linen module, or of one around it, says evaluation."""
    evaluation = _switches.switches(train=False)
    while isinstance(module, linen.Module):
        set_names = {
            name for name in evaluation if _switches.is_set_on_module(module, name)
        }
        if any(getattr(module, name) == evaluation[name] for name in set_names):
            return True
        module = module.parent
    return False

"""Modules of nnx inside those of linen, by `flax.nnx.bridge.ToLinen`.

Such a module is made anew in each call. It is then set, and seen, as one that is a
layer of its own: what is left open is trained, and evaluation evaluates all. The other
way round, `flax.nnx.bridge.ToNNX`, calls a linen module, which is seen as any other.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from flax import nnx

from . import _nnx_watch, _watch


def intercept(call: Callable[..., Any], args: Any, keywords: Any, context: Any) -> Any:
    """For `flax.linen.intercept_methods`: lets nnx modules note what they do."""
    module: Any = context.module
    record = _watch.current()
    bridged = isinstance(module, nnx.bridge.ToLinen)
    if record is None or not bridged or context.method_name != "__call__":
        return call(*args, **keywords)
    kind: Any = module.nnx_class
    convert: Any = module.metadata_fn  # it may be None
    with ExitStack() as stack:

        def make(*args: Any, **keywords: Any) -> nnx.Module:
            own = kind(*args, **keywords)
            _nnx_watch.prepare(own, record.train, tuple(module.path))
            stack.enter_context(_nnx_watch.looking(own))
            stack.enter_context(_nnx_watch.noting())
            return own

        def convert_plain(variable: nnx.Variable) -> Any:
            _nnx_watch.unwatch(variable)
            return convert(variable)

        # A bound module cannot be cloned in place, and refuses to be changed.
        object.__setattr__(module, "nnx_class", make)
        object.__setattr__(module, "metadata_fn", convert and convert_plain)
        try:
            return call(*args, **keywords)
        finally:
            object.__setattr__(module, "nnx_class", kind)
            object.__setattr__(module, "metadata_fn", convert)

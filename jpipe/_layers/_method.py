"""A method of a module, or a function that calls it, as a layer."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _linen, _nnx

PyTree = Any


@dataclass(frozen=True)
class MethodLayer:
    """A method of a module, or a function that calls it, as a layer: see `layer`."""

    module: Any
    method: str | Callable[..., PyTree]


def layer(module: Any, method: str | Callable[..., PyTree] = "__call__") -> MethodLayer:
    """A method of a Flax module as a layer, or a function that calls the module.

    `jpipe.Layer` makes a layer of two functions, without Flax. Layers with the same
    module share its parameters.

    Args:
      module: a linen or nnx module.
      method: the name of the method, which maps one pytree to one pytree; or, as
        ``method=`` of Flax itself, a function ``(module, x) -> y``, which unpacks the
        input and calls any method of the module. It receives what it names of
        ``train``, ``deterministic``, ``use_running_average`` and ``rngs``, and passes
        them on itself.

    Returns:
      The layer, to be listed.

    Raises:
      ValueError: if the module has no such method.
      TypeError: if it is not a module.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> from flax import linen as nn
      >>> embed = nn.Embed(256, 32)
      >>> head = jpipe.layer(embed, method="attend")
      >>> pipe = jpipe.pipeline([embed, nn.Dense(32), head], 2, balance=[3])
      >>> variables = pipe.init(jax.random.key(0), jnp.ones((4, 8), int))
      >>> jax.tree.map(jnp.shape, variables[0]), variables[2]
      ({'params': {'embedding': (256, 32)}}, {})

      Attention takes a mask beside its input; both come in one dictionary, and the
      mask goes on.

      >>> def masked(attention, x, train):
      ...     h = attention(x["h"], mask=x["mask"], deterministic=not train)
      ...     return {**x, "h": x["h"] + h}
      >>> blocks = [
      ...     jpipe.layer(nn.MultiHeadAttention(2, dropout_rate=0.1), masked)
      ...     for _ in range(2)
      ... ]
      >>> pipe = jpipe.pipeline(blocks, num_microbatches=2)
      >>> x = {"h": jnp.ones((4, 8, 6)), "mask": jnp.ones((4, 1, 8, 8), bool)}
      >>> variables = pipe.init(jax.random.key(0), x)
      >>> pipe.apply(variables, x)["h"].shape
      (4, 8, 6)
    """
    class_name = type(module).__name__
    if not (_linen.is_module(module) or _nnx.is_module(module)):
        advice = f"; write {module.__name__}(...)" if isinstance(module, type) else ""
        raise TypeError(
            f"layer({reprlib.repr(module)}): needs a flax module, this is a "
            f"{class_name}{advice}"
        )
    if isinstance(method, str):
        if not callable(getattr(type(module), method, None)):
            raise ValueError(f"{class_name} has no method {method!r}")
    elif not callable(method):
        raise ValueError(
            f"layer({class_name}, {reprlib.repr(method)}): needs the name of a method, "
            f"or a function such as lambda module, x: module(x)"
        )
    return MethodLayer(module, method)

"""A method of a module, or a function that calls it, as a layer."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _linen, _nnx

PyTree = Any


@dataclass(frozen=True)
class Method:
    """A method of a module, or a function that calls it, as a layer: see `layer`."""

    module: Any
    method: str | Callable[..., PyTree]


def layer(module: Any, method: str | Callable[..., PyTree] = "__call__") -> Method:
    """A layer that calls a method of a module, or a function of it.

    With the same module elsewhere in the list, the two share parameters.

    Args:
      module: a linen or nnx module.
      method: the name of the method; it maps one pytree to one pytree. Or, as Flax's
        own ``method=``, a function ``(module, x) -> y``, which takes the input apart
        and calls what it likes of the module. What of ``train``, ``deterministic``,
        ``use_running_average`` and ``rngs`` it names it is given, and passes on itself.

    Returns:
      What to list as a layer.

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
    kind = type(module).__name__
    if not (_linen.is_module(module) or _nnx.is_module(module)):
        instead = ""
        if isinstance(module, type):
            instead = f"; write {module.__name__}(...)"
        raise TypeError(
            f"layer({reprlib.repr(module)}): needs a flax module, this is a {kind}"
            f"{instead}"
        )
    if isinstance(method, str):
        if not callable(getattr(type(module), method, None)):
            raise ValueError(f"{kind} has no method {method!r}")
    elif not callable(method):
        raise ValueError(
            f"layer({kind}, {reprlib.repr(method)}): needs the name of a method, or a "
            f"function such as lambda module, x: module(x)"
        )
    return Method(module, method)

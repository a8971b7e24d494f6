"""What a `jax.custom_vjp` makes of cotangents, which need not be a derivative.

No forward tells of it, so it is measured: see `_measured`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr
from ._made import Made
from ._measured import differs, magnitude, measured, mixes
from ._pairs import Numbers, axes_along

MIXES = "has a backward that makes something of the cotangents of several examples"
BENDS = (
    "has a backward that is not linear in cotangents, as one that clips them; with "
    "reduction='weighted' they are those of the total, and divided by the weight after "
    "the last micro-batch: on one device they are divided before"
)
# What cuts cotangents off does so with large ones; what adds to them is seen beside
# small ones.
_SCALES = (1e3, 1e-3)


class Found(NamedTuple):
    """What gradients of random numbers are.

    Attributes:
      mixed: whether those of all examples are others than those of parts of them.
      bent: whether they do not grow as cotangents do.
    """

    mixed: bool = False
    bent: bool = False


def is_free(closed: core.ClosedJaxpr) -> bool:
    """Whether a backward may be anything."""
    names = ("custom_vjp_call", "custom_vjp_call_jaxpr")
    return any(_jaxpr.contains(closed, name) for name in names)


def found(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    cotangents: Mapping[int, Made],
    numbers: Numbers,
) -> Found:
    """What the gradients of a function are, of random numbers.

    Args:
      one: its jaxpr with some number of examples.
      other: with more, of which they are a part.
      given: how each input is made of the examples.
      cotangents: of some results how that of each is made.
      numbers: of the examples.
    """
    given = [*given, *cotangents.values()]
    try:
        one, other = (_backward(closed, [*cotangents]) for closed in (one, other))
    except Exception:  # whatever a backward does with another number of examples
        return Found()
    results = measured(one, other, given, numbers)
    if results is None:
        return Found()
    axes = axes_along(one.jaxpr.outvars, other.jaxpr.outvars, numbers)
    mixed = any(
        mixes(whole, parts, along, numbers)
        if any(along)
        else differs(whole, np.sum(parts, axis=0), magnitude(parts))
        for whole, parts, along in zip(*results, axes, strict=True)
    )
    half = len(axes) // len(_SCALES)
    pairs = zip(results.whole[:half], results.whole[half:], strict=True)
    return Found(mixed, any(differs(*pair) for pair in pairs))


def _backward(closed: core.ClosedJaxpr, chosen: Sequence[int]) -> core.ClosedJaxpr:
    """The gradients of some results, by all inputs that have one, for each scale.

    Returns:
      ``(*inputs, *cotangents) -> gradients``.
    """
    count = len(closed.in_avals)
    free = [i for i, aval in enumerate(closed.in_avals) if _is_differentiable(aval)]

    def backward(*args: Any) -> Any:
        given = list(args[:count])

        def forward(*floats: Any) -> list[Any]:
            for i, value in zip(free, floats, strict=True):
                given[i] = value
            results = core.jaxpr_as_fun(closed)(*given)
            return [results[i] for i in chosen]

        _, pull = jax.vjp(forward, *(given[i] for i in free))
        return [
            gradient / scale
            for scale in _SCALES
            for gradient in pull([ct * scale for ct in args[count:]])
        ]

    avals = [*closed.in_avals, *(closed.out_avals[i] for i in chosen)]
    return jax.make_jaxpr(backward)(*map(_jaxpr.spec, avals))


def _is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)

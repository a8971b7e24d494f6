"""What cannot be followed is measured: random examples, all of them and in parts.

That results differ proves that a function makes something of several examples; that
they do not proves nothing. So this is asked last, of what its jaxpr does not tell.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr
from ._equation import holds_apart
from ._made import EACH, SAME, WHOLE, Made
from ._pairs import Numbers, axes_along

Values = list[np.ndarray[Any, Any]]

TOLD = "gives other results for examples together than for parts of them"
# More elements are not made up for a check.
_LARGEST = 1 << 26
# The bits of all that is drawn, so that the parts draw what all examples do.
_BITS = 0x5A5A5A5A
_CALLS = ("closed_call", "jit", "pjit")


class Results(NamedTuple):
    """What a function gives.

    Attributes:
      whole: its results for all examples.
      parts: of each result those for the parts of them.
    """

    whole: Values
    parts: list[Values]


def measured(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    numbers: Numbers,
) -> Results | None:
    """What a function gives for all examples, and for the parts of them.

    Args:
      one: the jaxpr of a function with some number of examples.
      other: with more, of which they are a part.
      given: how each input is made of the examples.
      numbers: of the examples.

    Returns:
      Its results; ``None`` where nobody knows which numbers it takes, or what their
      parts are.
    """
    if any(closed.effects or holds_apart(closed) for closed in (one, other)):
        return None
    if sum(math.prod(aval.shape) for aval in other.in_avals) > _LARGEST:
        return None
    axes = axes_along(one.jaxpr.invars, other.jaxpr.invars, numbers)
    draw = np.random.default_rng(0)
    try:
        with jax.transfer_guard("allow"), jax.debug_nans(False):
            whole, split = [], []
            for aval, made, along in zip(other.in_avals, given, axes, strict=True):
                whole.append(_random(draw, aval, along))
                split.append(_parts(whole[-1], made, along, numbers))
            parts = map(_compiled(one), zip(*split, strict=True))
            return Results(
                _compiled(other)(whole), [*map(list, zip(*parts, strict=True))]
            )
    except Exception:  # whatever a function does that is given random numbers
        return None


def mixes(whole: np.ndarray[Any, Any], parts: Values) -> bool:
    """Whether values along the examples are not those of the parts, in any order."""
    together = np.concatenate([part.ravel() for part in parts])
    if together.size != whole.size:
        return True
    return differs(np.sort(whole.ravel()), np.sort(together))


def differs(a: Any, b: Any, size: float = 0) -> bool:
    """Whether two results are apart by more than rounding explains.

    Args:
      a: an array.
      b: another of the same shape.
      size: that of numbers of which they are made, if that is more than their own.
    """
    floating = jnp.issubdtype(a.dtype, jnp.inexact)
    rounding = float(jnp.finfo(a.dtype).eps) ** 0.5 if floating else 0
    few, many = (x.astype(np.complex128) for x in (a, b))
    size = max(np.abs(few).mean(), np.abs(many).mean(), size)
    return bool(np.abs(few - many).mean() > max(rounding, 1e-3) * size)


def _random(draw: np.random.Generator, aval: Any, along: Sequence[bool]) -> Any:
    """Numbers of a dtype; of integers such as any table has, or any mask."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0), max(math.prod(shape), 1))
        return keys.reshape(shape) if shape else keys[0]
    if not jnp.issubdtype(dtype, jnp.inexact):
        return draw.integers(0, 2, shape).astype(dtype)
    if any(along):
        return draw.normal(size=shape).astype(dtype)
    if len(shape) < 2:  # such as a scale, or a variance
        return draw.uniform(0.5, 1.5, size=shape).astype(dtype)
    inputs = math.prod(shape[:-1])  # of a kernel
    return (draw.normal(size=shape) * inputs**-0.5).astype(dtype)


def _parts(x: Any, made: Made, along: Sequence[bool], numbers: Numbers) -> list[Any]:
    """An input of all examples, cut into those of the parts.

    Raises:
      ValueError: if nobody knows how.
    """
    count = numbers.growth
    if made.kind == SAME or (made.kind == WHOLE and made.degree in (0, None)):
        return [x] * count
    if made.kind == WHOLE and made.degree == 1:
        return [x / count] * count
    axis = along.index(True)
    lengths = x.shape[axis] // count, x.shape[axis]
    if made.orders and made.orders.are_known:
        placed = made.orders.are_in_place(axis, lengths, numbers.counts)
    else:
        placed = lengths == numbers.counts
    if made.kind != EACH or sum(along) != 1 or not placed:
        raise ValueError("nobody knows where the examples are")
    before = (slice(None),) * axis
    starts = range(0, x.shape[axis], lengths[0])
    return [x[(*before, slice(start, start + lengths[0]))] for start in starts]


def _compiled(closed: core.ClosedJaxpr) -> Callable[[Sequence[Any]], Values]:
    run = jax.jit(functools.partial(_jaxpr.evaluate, closed, rule=_rule))
    return lambda args: [*map(np.asarray, run(args))]


def _rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
    if eqn.primitive.name in _CALLS:
        (inner,) = _jaxpr.inside(eqn)
        return lambda operands: _jaxpr.evaluate(inner, operands, _rule)
    if eqn.primitive.name == "random_bits":
        drawn: Any = eqn.outvars[0].aval
        return lambda _: [jnp.full(drawn.shape, _BITS, jnp.uint32).astype(drawn.dtype)]
    inner = _jaxpr.inside(eqn)
    within = any(_jaxpr.contains(one, "random_bits") for one in inner)
    if within or eqn.primitive.name == "random_gamma":
        raise ValueError("all examples draw other numbers than the parts of them")
    return None

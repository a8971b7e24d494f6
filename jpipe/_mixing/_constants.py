"""How what two jaxprs hold in one place follows from the number of examples."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _known
from ._made import BY_PLACE, EACH, MOVED, SAME, UNCLEAR, UNKNOWN, Made


def constant(one: Any, other: Any, growth: int) -> Made:
    """How it is made, and what is known of it.

    Args:
      one: what is there with some number of examples.
      other: with so many times as many.
      growth: how many.
    """
    known = _known.constant(one, other)
    made = _held(one, other, growth)
    if np.shape(one) == np.shape(other):
        return made._replace(known=known)
    if known is None:
        return Made(UNKNOWN, why=BY_PLACE)
    return made._replace(known=known, numbered=True)


def _held(one: Any, other: Any, growth: int) -> Made:
    """How what two jaxprs hold in one place follows from the number of examples."""
    if one is other and np.size(one) != 1:
        return Made(SAME)
    if np.shape(one) != np.shape(other):
        return Made(UNKNOWN, why=MOVED) if _is_permutation(one) else Made(EACH)
    if any(isinstance(x, jax.Array) for x in (one, other)):
        return Made(SAME if one is other else UNKNOWN)
    if np.size(one) != 1 or not all(map(is_number, (one, other))):
        return Made(SAME, 0 if np.array_equal(one, other) else UNCLEAR)
    few, many = (np.real(np.asarray(x)).item() for x in (one, other))
    return Made(SAME, degree_of(few, many, growth))


def is_number(x: Any) -> bool:
    """Whether it may be how many examples there are, of whatever dtype."""
    return jnp.issubdtype(jnp.result_type(x), jnp.number) and not np.any(np.imag(x))


def degree_of(few: Any, many: Any, growth: int) -> float | None:
    """To which power of their number something grows, by its value in two jaxprs."""
    a, b = float(few), float(many)
    if a == b or not (math.isfinite(a) and math.isfinite(b)):
        return 0 if a else None
    degree = math.log(b / a) / math.log(growth) if a * b > 0 else math.inf
    # A number of examples in bfloat16 has eight bits.
    if abs(degree) > 3 or abs(degree - round(degree)) > 0.02:
        return UNCLEAR
    return round(degree)


def _is_permutation(places: Any) -> bool:
    """Whether these are the places of all examples in another order."""
    if not isinstance(places, np.ndarray) or places.ndim != 1:
        return False
    natural = np.arange(places.size)
    return np.array_equal(np.sort(places), natural) and (places != natural).any()

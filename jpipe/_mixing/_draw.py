"""Random numbers that tell examples apart, and with which a function can do something.

Examples of one kind hide what is done with all of them: the mean of quotients is nearly
the quotient of sums, and what overflows does so nowhere.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr

Array = np.ndarray[Any, Any]
# Numbers that stand for something else, such as -100 for a label that does not count.
Marks = tuple[float, ...]

_COMPARES = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
# More are not tried.
_MOST = 8


def marks_of(closed: core.ClosedJaxpr) -> list[Marks]:
    """With which numbers a function compares what it is given, to try it with them.

    Returns:
      Those that are negative, thus no places; all; and NaN, if it is asked for.
    """
    found, asks = set[int](), False
    for eqn in _all(closed):
        name = eqn.primitive.name
        literals = [atom for atom in eqn.invars if isinstance(atom, core.Literal)]
        if name in _COMPARES:
            numbers = [n for each in literals if (n := _whole(each)) is not None]
            for number in numbers:
                # What is not -100 may be a place; what is less than zero is none.
                beside = () if name in ("eq", "ne") else (number - 1, number + 1)
                found |= {number, *beside}
            asks |= len(eqn.invars) == 2 and eqn.invars[0] is eqn.invars[1]
        asks |= name == "is_finite"
    marks = sorted(found - {0, 1}, key=abs)
    negative = tuple(mark for mark in marks if mark < 0)
    cases = [negative[:_MOST], tuple(marks[:_MOST]), (math.nan,) if asks else ()]
    return [case for case in dict.fromkeys(cases) if case]


def _all(closed: core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for inner in _jaxpr.inside(eqn):
            yield from _all(inner)


def _whole(literal: core.Literal) -> int | None:
    value = np.asarray(literal.val)
    is_one = value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return int(value) if is_one else None


class Draw:
    """Random numbers of a seed.

    Args:
      seed: any number.
      count: how many examples there are.
      shares: whether all are more than zero and less than one, and add up to one along
        the last axis, as of a function that takes logarithms.
      marks: numbers of which some are, too: whole ones, or NaN.
      scale: how large floating numbers are; where it is large, whole ones are, too.
    """

    def __init__(
        self,
        seed: int,
        count: int,
        shares: bool = False,
        marks: Marks = (),
        scale: float = 1,
    ) -> None:
        self._draw = np.random.default_rng(seed)
        # From the first example to the last, so that those of parts differ most.
        self._trait = np.linspace(-1, 1, count) * (-1) ** seed
        self._shares = shares
        self._marks = marks
        self._scale = scale

    def values(self, aval: Any, along: Sequence[bool]) -> jax.Array:
        """Numbers of a dtype; of integers such as any table has, or any mask.

        Args:
          aval: of how many, and which.
          along: which axes go along the examples.
        """
        shape, dtype = aval.shape, aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(0), max(math.prod(shape), 1))
            return keys.reshape(shape) if shape else keys[0]
        trait = self._traits(shape, along)
        floating = jnp.issubdtype(dtype, jnp.inexact)
        made = (
            self._floats(shape, along, trait)
            if floating
            else self._integers(shape, along, trait, dtype)
        )
        if any(along) and (floating or jnp.issubdtype(dtype, jnp.integer)):
            made = self._marked(made, trait, floating, dtype)
        return jnp.asarray(made.astype(dtype))

    def shaken(self, x: jax.Array, eps: float) -> jax.Array:
        """Numbers, each a rounding error off."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return (x * (1 + eps * self._draw.choice([-1, 1], x.shape))).astype(x.dtype)

    def _traits(self, shape: Sequence[int], along: Sequence[bool]) -> Array:
        """From -1 to 1, from the first example to the last, along their axis."""
        if sum(along) != 1:
            return np.zeros(())
        axis = along.index(True)
        places = np.arange(shape[axis]) * self._trait.size // shape[axis]
        lengths = [1] * len(shape)
        lengths[axis] = -1
        return self._trait[places].reshape(lengths)

    def _floats(
        self, shape: Sequence[int], along: Sequence[bool], trait: Array
    ) -> Array:
        if self._shares or (len(shape) < 2 and not any(along)):  # such as a variance
            made = self._draw.uniform(0.5, 1.5, shape)
            one = self._shares and len(shape) > 1
            made = made ** (1 + trait) if one else made
            return made / made.sum(-1, keepdims=True) if one else made * 0.6
        inputs = 1 if any(along) else math.prod(shape[:-1])  # of a kernel
        made = self._draw.normal(size=shape) * inputs**-0.5
        made = made * (1 + trait / 2) + trait
        return made * self._scale if any(along) else made

    def _integers(
        self, shape: Sequence[int], along: Sequence[bool], trait: Array, dtype: Any
    ) -> Array:
        bits = self._draw.uniform(size=shape) < 0.5 + 0.4 * trait
        if not any(along) or not jnp.issubdtype(dtype, jnp.integer):
            return bits
        if self._scale > 1:
            return self._draw.integers(0, int(self._scale), shape) + bits
        return bits + 1 if self._shares else bits

    def _marked(self, made: Array, trait: Array, floating: bool, dtype: Any) -> Array:
        """Some of the numbers are marks, of some examples more than of others."""
        marks = [mark for mark in self._marks if math.isnan(mark) == floating]
        if not floating:
            info = jnp.iinfo(dtype)
            marks = [mark for mark in marks if info.min <= mark <= info.max]
        if not marks:
            return made
        some = self._draw.uniform(size=made.shape) < 0.4 + 0.3 * trait
        return np.where(some, self._draw.choice(marks, made.shape), made)

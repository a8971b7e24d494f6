"""What cannot be followed is measured: random examples, all of them and in parts.

That results differ proves that a function makes something of several examples; that
they do not proves nothing. So this is asked last, of what its jaxpr does not tell.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr, _precise
from ._draw import Draw, marks_of
from ._made import EACH, SAME, UNCLEAR, UNKNOWN, Made
from ._pairs import Numbers, axes_along

Array = np.ndarray[Any, Any]
Values = list[Array]

TOLD = "gives other results for examples together than for parts of them"
UNTRIED = (
    "is another computation with more examples, so that nobody knows whether they come "
    "together in it, and cannot be computed on random numbers to see it"
)
# More elements are not made up, and computed, for a check.
_LARGEST = 1 << 28
# A threshold, such as a margin, may lie beyond all numbers of one size, and be passed
# by others in few places. Of many numbers one draw is made.
_SCALES, _DRAWS, _SMALL = (1, 1 / 32, 32), 3, 1 << 20
# The bits of all that is drawn, so that the parts draw what all examples do.
_BITS = 0x5A5A5A5A
_CALLS = (
    *("closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"),
    *_jaxpr.CHECKPOINTS,
)
_SHOWS = ("debug_callback", "debug_print")
# What draws by a key of its own, and what is not of JAX: no function of the user's is
# called with random numbers.
_OTHERS = ("ffi_call", "io_callback", "pure_callback", "random_gamma")
# So many steps a loop may take that goes on until something is small.
_STEPS = 1000
# Longer functions, such as loops of Python over pairs, compile for half a minute; and
# shorter ones in a moment.
_LONG, _SHORT = 2500, 300
# This is compiled to run a few times: XLA leaves out most of its optimizations.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# So many times as far as rounding moves a result are two apart that are equal.
_FAR = 10


class Result(NamedTuple):
    """What a function gives, one of its results.

    Attributes:
      whole: for all examples.
      parts: for the parts of them.
      rounding: how far apart two are, beside their size, that are computed in other
        orders.
      noise: how far rounding errors of the inputs move it. What is nothing but such
        errors, as the gradient of the bias of an attention's keys, has no size.
    """

    whole: Array
    parts: Values
    rounding: float
    noise: float

    def differs(self, made: Any, size: float = 0) -> bool:
        """Whether that of all examples is another than what was made of the parts.

        Args:
          made: an array of its shape.
          size: that of numbers of which it is made, if that is more than its own.
        """
        a, b = _wide(self.whole), _wide(made)
        apart, known = _apart(a, b)
        if not known.any():
            return False
        size = max(np.abs(a)[known].mean(), np.abs(b)[known].mean(), size)
        within = max(self.rounding * size, _FAR * self.noise)
        return bool(apart[known].mean() > within)


def measured(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    numbers: Numbers,
) -> list[list[Result]]:
    """What a function gives for all examples, and for the parts of them.

    Args:
      one: the jaxpr of a function with some number of examples.
      other: with more, of which they are a part.
      given: how each input is made of the examples.
      numbers: of the examples.

    Returns:
      Its results for several draws, all finite if it has such; nothing where nobody
      knows which numbers it takes, or what their parts are.
    """
    size = _elements(other)
    if size > _LARGEST:
        return []
    few_draws = size >= _SMALL or len(other.jaxpr.eqns) >= _LONG
    cases = [(seed, scale) for scale in _SCALES for seed in range(_DRAWS)]
    cases = cases[:1] if few_draws else cases
    axes = axes_along(one.jaxpr.invars, other.jaxpr.invars, numbers)
    of = functools.partial(Draw, count=numbers.counts[-1])

    def drawn(draw: Draw) -> list[Result]:
        whole = [
            draw.values(aval, along)
            for aval, along in zip(two.in_avals, axes, strict=True)
        ]
        inputs = zip(whole, given, axes, strict=True)
        split = [_parts(*each, numbers) for each in inputs]
        parts = zip(*(few(part) for part in zip(*split, strict=True)), strict=True)
        made, moved = many(whole), many([draw.shaken(x, eps) for x in whole])
        return [
            Result(made, [*parts], eps**0.6, _noise(made, moved))
            for made, parts, moved in zip(made, parts, moved, strict=True)
        ]

    found = list[list[Result]]()
    # Whatever a function does that is given random numbers.
    with suppress(Exception), jax.transfer_guard("allow"), jax.debug_nans(False):
        first, two = (_precise.precise(closed, _rule) for closed in (one, other))
        eps = max(map(_eps, _dtypes(two)), default=0.0)
        few, many = _function(first), _function(two)
        found = [drawn(of(0))]
        if not _are_finite(found[0]):
            found = [drawn(of(seed, shares=True)) for seed, _ in cases[:_DRAWS]]
        more = [
            *(of(seed, scale=scale) for seed, scale in cases[1:]),
            *(of(0, marks=marks) for marks in marks_of(other)[: len(cases)]),
        ]
        found += filter(_are_finite, map(drawn, more))
    return found


def _are_finite(found: Sequence[Result]) -> bool:
    return all(np.isfinite(result.whole).all() for result in found)


def is_small(closed: core.ClosedJaxpr) -> bool:
    """Whether a function is computed in a moment."""
    return len(closed.jaxpr.eqns) < _SHORT and _elements(closed) < _SMALL


def _elements(closed: core.ClosedJaxpr) -> int:
    made = (var for eqn in closed.jaxpr.eqns for var in eqn.outvars)
    avals: Any = [*closed.in_avals, *(var.aval for var in made)]
    return sum(math.prod(getattr(aval, "shape", ())) for aval in avals)


def mixes(result: Result, along: Sequence[bool], numbers: Numbers) -> bool:
    """Whether a result of all examples is not that of the parts.

    Args:
      result: of all examples, and of the parts of them.
      along: which axes go along the examples: what does not is of all of them a
        constant, a mean or a sum.
      numbers: of the examples.
    """
    whole, parts = result.whole, result.parts
    if not any(along):
        total: Any = sum(map(_wide, parts))
        size = magnitude(parts)
        mean, each = total / len(parts), size / len(parts)
        cases = (parts[0], each), (mean, each), (total, size)
        return all(result.differs(made, size) for made, size in cases)
    axis = along.index(True)
    if sum(along) > 1 or sum(part.shape[axis] for part in parts) != whole.shape[axis]:
        return True
    together = np.concatenate(parts, axis)
    if (parts[0].shape[axis], whole.shape[axis]) == numbers.counts:
        return result.differs(together)
    # In which order more is merged with the examples is not known.
    weights = np.random.default_rng(0).normal(size=whole.size // whole.shape[axis])
    few, many = (
        np.sort(np.moveaxis(_wide(made), axis, 0).reshape(-1, weights.size) @ weights)
        for made in (whole, together)
    )
    return result._replace(whole=few).differs(many)


def magnitude(parts: Values) -> float:
    """That of the elements of which a sum is made of the parts."""
    return sum(float(np.abs(_wide(part)).mean()) for part in parts if part.size)


def _noise(made: Array, moved: Array) -> float:
    apart, known = _apart(_wide(made), _wide(moved))
    return float(apart[known].mean()) if known.any() else 0.0


def _apart(a: Array, b: Array) -> tuple[Array, Array]:
    """How far apart two arrays are, and where that is known."""
    with np.errstate(invalid="ignore"):  # of infinite ones
        apart = np.abs(a - b)
    return apart, np.isfinite(apart)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _dtypes(closed: core.ClosedJaxpr) -> set[Any]:
    """Those of all numbers that are computed with, beside whole ones."""
    made = [var.aval for eqn in closed.jaxpr.eqns for var in eqn.outvars]
    avals: Any = [*closed.in_avals, *closed.out_avals, *made]
    inner = (each for eqn in closed.jaxpr.eqns for each in _jaxpr.inside(eqn))
    own = {getattr(aval, "dtype", None) for aval in avals}
    own = {dtype for dtype in own if dtype and jnp.issubdtype(dtype, jnp.inexact)}
    return own.union(*map(_dtypes, inner))


def _wide(made: Any) -> Array:
    return np.asarray(made).astype(np.complex128)


def _parts(x: Any, made: Made, along: Sequence[bool], numbers: Numbers) -> list[Any]:
    """An input of all examples, cut into those of the parts.

    Raises:
      ValueError: if nobody knows how.
    """
    count = numbers.growth
    if made.kind != EACH and not any(along):
        return _beside(x, made, count)
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


def _beside(x: Any, made: Made, count: int) -> list[Any]:
    """What is of all examples, and of each part: such as a sum, or a share of one.

    Raises:
      ValueError: if nobody knows how it grows with them.
    """
    degree = made.degree or 0
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    if made.kind == UNKNOWN or degree == UNCLEAR or (degree and not inexact):
        raise ValueError("nobody knows what it is of a part")
    shares = np.full(count, 1.0 * count**-degree)
    if made.kind != SAME and not degree:
        # Each part has another, which are that of all on average: of a mean that is
        # so, and of anything it is enough for what adds it to a loss.
        shares = np.linspace(0.5, 1.5, count)
    return [(x * share).astype(x.dtype) if inexact else x for share in shares]


def _function(closed: core.ClosedJaxpr) -> Callable[[Sequence[Any]], Values]:
    """A function that computes the results of a jaxpr."""
    run: Any = core.jaxpr_as_fun(closed)
    if len(closed.jaxpr.eqns) < _LONG:
        # Elsewhere these are not known, and nothing would be measured.
        known = jax.default_backend() in ("cpu", "gpu")
        run = jax.jit(run, compiler_options=_QUICK if known else None)
    return lambda args: [*map(np.asarray, run(*args))]


def _rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
    """What takes the place of an equation.

    Raises:
      ValueError: of one that is not computed for a check.
    """
    name, inside = eqn.primitive.name, _jaxpr.inside(eqn)
    if name in _CALLS and len(inside) == 1:
        return lambda operands: _precise.evaluate(inside[0], operands, _rule)
    if name in _SHOWS:
        return lambda _: []
    if name == "while":
        return functools.partial(_ended, eqn)
    if name == "random_bits":
        drawn: Any = eqn.outvars[0].aval
        return lambda _: [jnp.full(drawn.shape, _BITS, jnp.uint32).astype(drawn.dtype)]
    as_it_is = name == "shard_map" and any(
        _jaxpr.contains(one, each)
        for one in inside
        for each in ("random_bits", "while", *_OTHERS)
    )
    if as_it_is or name in _OTHERS or (eqn.effects and not inside):
        raise ValueError(f"{name} draws other numbers, or calls what is not of JAX")
    return None


def _ended(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """A `jax.lax.while_loop` that ends: with NaN, where it would take many steps."""
    ends, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    first: Any = eqn.params["cond_nconsts"]
    second: Any = first + eqn.params["body_nconsts"]
    of_ends, of_body = operands[:first], operands[first:second]

    def goes_on(carried: Any) -> jax.Array:
        count, values = carried
        (more,) = _precise.evaluate(ends, [*of_ends, *values], _rule)
        return jnp.logical_and(more, count < _STEPS)

    def step(carried: Any) -> Any:
        count, values = carried
        return count + 1, _precise.evaluate(body, [*of_body, *values], _rule)

    count, values = jax.lax.while_loop(goes_on, step, (0, list(operands[second:])))
    return [
        jnp.where(count < _STEPS, value, jnp.nan)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for value in values
    ]

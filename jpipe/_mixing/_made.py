"""How one value is made of examples, and what follows for what is computed of some."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ._known import Known
from ._order import Orders, natural
from ._pairs import Numbers

SAME, EACH, WHOLE, OTHER, UNSURE, UNKNOWN = range(6)
OF_ALL = (WHOLE, OTHER, UNSURE)
# The degree of what is not linear and may grow in any way.
UNCLEAR = math.inf
ADDS = "adds what is made of all examples"
FOLLOWS = "computes with what is made of all examples"
LARGEST = "takes the largest or the smallest of all examples"
SHIFTED = "shifts by the largest or the smallest of all examples"
# A factor of an exponential, which a quotient may lose; and what has lost it for good.
BEYOND = "computes with what is shifted by the largest or the smallest of all examples"
SHIFTS = (SHIFTED, BEYOND)
MOVED = "puts examples in the places of others"
CHOSEN = "chooses some of the examples"
BY_PLACE = "tells examples apart by their place in the batch"
GIVEN = "takes or writes examples at places that are given"
RANKED = "ranks the examples among one another"
MULTIPLIED = "multiplies all examples"
AFTER = "goes along the examples, one after the other"
DRAWN = (
    "draws random numbers by a key that is not of this step (of make_rng of linen, or "
    "nnx.Rngs), so each micro-batch draws the same"
)
CALLS = (
    "gives several examples to what is not of JAX (a callback, or a foreign function), "
    "which may make something of them together"
)
GROWS = "adds what grows with the number of examples to what does not"
LITTLE = "adds a little to what grows with the number of examples"
# Less than this, known before anything runs, is there against a division by zero.
_LITTLE = 1e-3
# Of what is `UNSURE` for none but these it may yet be linear: of a mean, say, that is
# at most something, but not of a root that is.
VAGUE = ("", FOLLOWS, SHIFTED, GROWS, LITTLE)


class Made(NamedTuple):
    """How a value follows from the examples.

    Attributes:
      kind: `SAME`: not at all. `EACH`: along them, each by itself. `WHOLE`: linear in
        all. `OTHER`: of all, and not linear. `UNSURE`: of all, by a maximum, say.
      degree: to which power of their number it grows; ``None``: it is zero; of `OTHER`
        perhaps `UNCLEAR`.
      why: of `OTHER`, what made it so; of others, why that cannot be said.
      single: whether it holds values of single examples, and not what is made of all.
      orders: of which example each element is; ``None`` where nobody knows.
      known: its elements; ``None`` where they are known when it runs.
      drawn: whether it follows from the key of the step.
      numbered: whether it follows from places in the batch.
      pieced: whether it is of examples that were taken apart, into halves, say: nobody
        knows what was done with each of them.
      sized: whether it is times the number of examples.
      square: how its square is made, of a root.
      factors: of what is `SHIFTED`, by which exponentials it is multiplied, each with
        the power.
    """

    kind: int
    degree: float | None = 0
    why: str = ""
    single: bool = False
    orders: Orders | None = None
    known: Known | None = None
    drawn: bool = False
    numbered: bool = False
    pieced: bool = False
    sized: bool = False
    square: "Made | None" = None
    factors: tuple[tuple[int, float], ...] = ()


def taken_in(ndim: int, axis: int | None, counts: Sequence[int]) -> Made:
    """What is given from outside, with the examples along an axis, or of none.

    Args:
      ndim: how many axes it has.
      axis: that of the examples.
      counts: how many there are in each jaxpr.
    """
    if axis is None:
        return Made(SAME)
    orders = natural(ndim, axis, counts) if len(counts) > 1 else None
    return Made(EACH, single=True, orders=orders)


def by_shapes(
    few: Sequence[Any], many: Sequence[Any], numbers: Numbers, beside: Made
) -> list[Made]:
    """Values of which only shapes are known, as one of each example if they can be.

    Args:
      few: abstract values, with some number of examples.
      many: with more.
      numbers: of the examples.
      beside: how those are made that do not go along them.
    """
    found = []
    for one, other in zip(few, many, strict=True):
        along = numbers.along(one.shape, other.shape)
        axis = along.index(True) if sum(along) == 1 else None
        fits = axis is not None and (one.shape[axis], other.shape[axis])
        if fits == numbers.counts:
            found.append(taken_in(one.ndim, axis, numbers.counts))
        else:
            found.append(Made(EACH) if any(along) else beside)
    return found


def placed(made: Made, few: Any, many: Any, numbers: Numbers) -> Made:
    """What is one of each example, nobody knows where, as lying in their order.

    Args:
      made: how a value is made.
      few: its abstract value, with some number of examples.
      many: with more.
      numbers: of the examples.
    """
    if made.kind != EACH or made.why or made.orders or made.known:
        return made
    (taken,) = by_shapes([few], [many], numbers, made)
    return made._replace(orders=taken.orders)


def joined(operands: Sequence[Made]) -> Made:
    """A sum, or one of these: linear in all."""
    kinds = {made.kind for made in operands}
    degrees = {made.degree for made in operands} - {None}
    if OTHER in kinds:  # which nothing beside it makes linear
        other = one_of(OTHER, operands)
        return other._replace(degree=UNCLEAR) if len(degrees) > 1 else other
    if UNKNOWN in kinds:
        return one_of(UNKNOWN, operands)
    if UNSURE in kinds:
        made = one_of(UNSURE, operands)
        shifts = EACH in kinds and made.why == LARGEST
        return made._replace(why=SHIFTED) if shifts else made
    if len(degrees) > 1:  # such as a sum and a small number
        if kinds == {SAME}:
            return Made(SAME, UNCLEAR, GROWS)
        if _are_several(made.degree for made in operands if made.kind == WHOLE):
            return Made(OTHER, UNCLEAR, "adds a sum over the examples to a mean")
        if WHOLE not in kinds or EACH in kinds:
            return Made(UNKNOWN, why=GROWS)
        beside = [m.known for m in operands if m.kind == SAME]
        little = all(known and known.is_below(_LITTLE) for known in beside)
        return Made(UNSURE, UNCLEAR, LITTLE if beside and little else GROWS)
    whys = [m.why for m in operands if m.why and (kinds == {SAME} or m.why in SHIFTS)]
    why = whys[0] if whys else ""
    made = Made(max(kinds, default=SAME), next(iter(degrees), None), why)
    factors = {m.factors for m in operands if m.degree is not None}
    if made.why == SHIFTED and len(factors) == 1:
        return made._replace(factors=factors.pop())
    return made._replace(why=BEYOND) if made.why == SHIFTED else made


def _are_several(degrees: Iterable[float | None]) -> bool:
    known = {*degrees} - {None}
    return len(known) > 1 and UNCLEAR not in known


def one_of(kind: int, operands: Sequence[Made]) -> Made:
    """One of that kind, best one of which it is known why."""
    return max((m for m in operands if m.kind == kind), key=lambda m: bool(m.why))


def product(a: Made, b: Made) -> Made:
    """What a product is of two."""
    if None in (a.degree, b.degree):
        return Made(SAME, None)
    if a.kind == b.kind == EACH:
        return _scaled(a, b, 1)._replace(degree=times(a.degree, b.degree))
    if SAME in (a.kind, b.kind):
        by, made = (b, a) if b.kind == SAME else (a, b)
        sized = made.sized or by.degree == 1
        return made._replace(degree=times(a.degree, b.degree), sized=sized)
    if UNSURE in (a.kind, b.kind):
        certain = (m.why for m in (a, b) if m.kind in (UNSURE, OTHER))
        why = next((why for why in certain if why not in VAGUE), "")
        if why and UNKNOWN not in (a.kind, b.kind):
            return Made(UNSURE, UNCLEAR, why)
        return Made(UNKNOWN, why=a.why or b.why)
    made = first([a, b], "multiplies by what is made of all examples")
    return made._replace(degree=times(a.degree, b.degree))


def _scaled(a: Made, b: Made, power: float) -> Made:
    """One of each example, times a power of another."""
    factors = dict(a.factors)
    for factor, exponent in b.factors:
        factors[factor] = factors.get(factor, 0) + power * exponent
    left = tuple(sorted((key, value) for key, value in factors.items() if value))
    if BEYOND in (a.why, b.why):
        return Made(EACH, why=BEYOND)
    return Made(EACH, why=SHIFTED if left else "", factors=left)


def raised(made: Made, power: float) -> Made:
    """A power of what is of each example."""
    return _scaled(Made(EACH), made, power)


def times(a: float | None, b: float | None) -> float | None:
    """The degree of a product; what is zero stays zero."""
    if a is None or b is None:
        return None
    return UNCLEAR if UNCLEAR in (abs(a), abs(b)) else a + b


def quotient(a: Made, b: Made) -> Made:
    """What a quotient is of two."""
    if b.degree is None and a.kind in (SAME, EACH):  # infinite
        return a._replace(degree=0)
    if UNKNOWN in (a.kind, b.kind) or b.degree is None:
        return Made(UNKNOWN, why=DRAWN if DRAWN in (a.why, b.why) else "")
    if b.kind == SAME:
        sized = a.sized and not b.degree
        return a._replace(degree=times(a.degree, -b.degree), sized=sized)
    if b.kind == EACH and a.kind in (SAME, EACH):
        return _scaled(a, b, -1)._replace(degree=times(a.degree, -b.degree))
    made = first([a, b], "divides by what is made of all examples")
    return made._replace(degree=times(a.degree, -b.degree))


def chosen(which: Made, *cases: Made) -> Made:
    """One of several, as the first says."""
    made = joined(cases)
    if which.kind == UNKNOWN and which.why == DRAWN:
        return which
    if which.kind == SAME or UNKNOWN in (which.kind, made.kind):
        return made
    if made.kind in (SAME, EACH):
        if which.kind == EACH:
            by = made if which.why not in SHIFTS else Made(EACH, why=BEYOND)
            return made._replace(kind=EACH, why=by.why, factors=by.factors)
        if which.kind == UNSURE and not which.why:  # such as whether all are finite
            return made
    elif which.kind == EACH:
        if made.kind == UNSURE:
            return made
        return first([made], "is, for some examples, what is made of all")
    if made.kind == OTHER:  # and stays so where nothing is amiss
        return Made(UNSURE, UNCLEAR, made.why)
    # A place in the batch may be added to one that is of each: that is the least.
    of_place = which.why == BY_PLACE and made.why
    return Made(UNSURE, UNCLEAR, made.why if of_place else which.why or made.why)


def first(operands: Sequence[Made], why: str) -> Made:
    """Not linear: by what made it so first."""
    made = next((m for m in operands if m.kind == OTHER), Made(OTHER, why=why))
    return made._replace(degree=UNCLEAR)

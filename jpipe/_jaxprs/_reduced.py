"""How results are made of examples: of each by itself, as a sum, or otherwise.

A loss of a mini-batch is that of its micro-batches if it is linear in what it takes of
each example. Whether it is a mean or a sum is told by numbers that grow with the
examples, which two jaxprs of one function show that were traced with other numbers.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _jaxpr

SAME, EACH, WHOLE, OTHER, UNSURE, UNKNOWN = range(6)


class Made(NamedTuple):
    """How a value follows from the examples.

    Attributes:
      kind: `SAME`: not at all. `EACH`: along them, each by itself. `WHOLE`: linear in
        all. `OTHER`: of all, and not linear. `UNSURE`: of all, by a maximum, say.
      degree: to which power of their number it grows; ``None``: it is zero.
      why: of `OTHER`, what made it so.
    """

    kind: int
    degree: int | None = 0
    why: str = ""


class Differs(Exception):
    """The two jaxprs are not the same but for the number of examples."""


_OF_PLACES = """
    broadcast broadcast_in_dim concatenate conj copy copy_p expand_dims imag name neg
    real reduce_precision reshape rev slice split squeeze stop_gradient transpose
"""
_OF_SIZE = """
    abs and argmax argmin ceil clamp eq floor ge gt is_finite le lt max min ne not or
    reduce_and reduce_max reduce_min reduce_or rem round sign xor
"""
_OF_CURVES = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 integer_pow lgamma log log1p logistic pow rsqrt sin sinh sqrt square tan
    tanh
"""
_OF_ANSWERS = "and eq ge gt is_finite le lt ne not or xor"

_LINEAR = frozenset([*_OF_PLACES.split(), "add", "add_any", "sub"])
# What is of all examples stays so, and may be what it was.
_SOFT = frozenset(_OF_SIZE.split())
_CURVED = frozenset(_OF_CURVES.split())
_CALLED = {
    "exp": "the exponential",
    "integer_pow": "a power",
    "log": "the logarithm",
    "pow": "a power",
    "sqrt": "the root",
    "square": "the square",
}
# Whether, not how much.
_ANSWERS = frozenset(_OF_ANSWERS.split())
# Of what is at places that the other operands say.
_PLACED = frozenset(["dynamic_slice", "gather"])
_OF_ALL = (WHOLE, OTHER, UNSURE)
COMPARES = "compares examples with one another"


def results(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    growth: int,
) -> list[Made]:
    """How each result is made.

    Args:
      one: the jaxpr of a function with some number of examples.
      other: with ``growth`` times as many: its longer axes are those of examples, and
        what grows as their number does so in it.
      given: how each input is.
      growth: more than one.

    Raises:
      Differs: if the jaxprs do in more than numbers.
    """
    if _size(one) != _size(other):
        raise Differs
    values = dict(zip(one.jaxpr.invars, given, strict=True))
    for var, a, b in zip(one.jaxpr.constvars, one.consts, other.consts, strict=True):
        values[var] = _constant(a, b, growth)

    def read(atoms: Sequence[Any], twins: Sequence[Any]) -> list[Made]:
        return [
            _constant(atom.val, twin.val, growth)
            if isinstance(atom, core.Literal)
            else values[atom]
            for atom, twin in zip(atoms, twins, strict=True)
        ]

    for eqn, twin in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=True):
        pair = _Pair(eqn, twin)
        operands = read(eqn.invars, twin.invars)
        found = _within(pair, operands, growth)
        if found is None:
            found = [_made(pair, operands)] * len(eqn.outvars)
        for var, made, along in zip(eqn.outvars, found, pair.after, strict=True):
            values[var] = _lying(made, along)
    return read(one.jaxpr.outvars, other.jaxpr.outvars)


def _size(closed: core.ClosedJaxpr) -> tuple[int, int]:
    return len(closed.jaxpr.eqns), len(closed.consts)


class _Pair:
    """An equation, and what it is with more examples.

    Attributes:
      after: of each result which axes go along the examples.
      before: of each operand.
    """

    def __init__(self, eqn: core.JaxprEqn, twin: core.JaxprEqn) -> None:
        self.name = eqn.primitive.name
        if self.name != twin.primitive.name:
            raise Differs
        self.eqn, self.twin = eqn, twin
        self.before = _along(eqn.invars, twin.invars)
        self.after = _along(eqn.outvars, twin.outvars)


def _along(atoms: Sequence[Any], twins: Sequence[Any]) -> list[list[bool]]:
    """Which axes of each value go along the examples."""
    shapes, others = ([getattr(a.aval, "shape", ()) for a in x] for x in (atoms, twins))
    if [*map(len, shapes)] != [*map(len, others)]:
        raise Differs
    return [
        [m != n for m, n in zip(*pair, strict=True)]
        for pair in zip(shapes, others, strict=True)
    ]


def _lying(made: Made, along: Sequence[bool]) -> Made:
    """What is of each example lies along one axis of them."""
    if made.kind != EACH or sum(along) == 1:
        return made
    return Made(OTHER, why=COMPARES) if any(along) else Made(UNKNOWN)


def _constant(one: Any, other: Any, growth: int) -> Made:
    if one is other:
        return Made(SAME)
    if np.shape(one) != np.shape(other):
        return Made(EACH)
    if any(isinstance(x, jax.Array) for x in (one, other)):
        return Made(UNKNOWN)  # on a device, whose numbers would have to be waited for
    dtype = jnp.result_type(one)
    counts = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if np.size(one) != 1 or not counts:
        return Made(SAME)
    a, b = (float(np.asarray(x).item()) for x in (one, other))
    if a == b or not (math.isfinite(a) and math.isfinite(b)):
        return Made(SAME, 0 if a else None)
    degree = math.log(b / a) / math.log(growth) if a * b > 0 else math.inf
    # A number of examples in bfloat16 has eight bits.
    if abs(degree) > 3 or abs(degree - round(degree)) > 0.02:
        return Made(UNKNOWN)
    return Made(SAME, round(degree))


def _made(pair: _Pair, operands: list[Made]) -> Made:
    """How the results of an equation are, that holds no jaxpr."""
    name = pair.name
    if name in _PLACED:
        operands = [operands[0], *map(_place, operands[1:])]
    kinds = {made.kind for made in operands}
    if name in _LINEAR:
        return _joined(operands)
    if UNKNOWN in kinds:
        return Made(UNKNOWN)
    if not kinds - {SAME} and name in ("iota", "random_bits"):
        return Made(EACH if any(pair.after[0]) else SAME)
    if name == "convert_element_type":
        return _converted(pair.eqn, operands[0])
    if name == "reduce_sum":
        over = [pair.before[0][i] for i in pair.eqn.params["axes"]]
        return _summed(operands[0], over, pair.after[0])
    if name == "dot_general":
        (axes, _), _ = pair.eqn.params["dimension_numbers"]
        over = [pair.before[0][i] for i in axes]
        return _summed(_product(*operands), over, pair.after[0])
    if name == "mul":
        return _product(*operands)
    if name == "div":
        return _quotient(*operands)
    if name == "select_n":
        return _chosen(*operands)
    if not kinds.isdisjoint(_OF_ALL):
        if name in _CURVED:
            called = _CALLED.get(name, name)
            return _first(operands, f"takes {called} of what is made of all examples")
        return Made(UNSURE if name in _SOFT else UNKNOWN)
    if name in _ANSWERS and kinds == {SAME}:
        return Made(SAME)
    if any(made.degree for made in operands):
        return Made(UNKNOWN)
    if EACH in kinds and name.startswith(("reduce_", "arg")):
        return Made(EACH if any(pair.after[0]) else UNSURE)
    return Made(EACH if EACH in kinds else SAME)


def _place(made: Made) -> Made:
    """What says where something is: how large it is does not matter.

    Such as a place from the end, which the number of examples was added to.
    """
    return Made(EACH) if made.kind == UNKNOWN else made._replace(degree=0)


def _summed(made: Made, over: Sequence[bool], after: Sequence[bool]) -> Made:
    """A sum over axes, which go along the examples or not."""
    if not any(over) or made.kind == UNKNOWN:
        return made
    if made.kind == EACH and any(after):
        return Made(UNKNOWN)
    kind = WHOLE if made.kind == EACH else made.kind
    return Made(kind, _sum(made.degree, 1), made.why)


def _within(pair: _Pair, operands: list[Made], growth: int) -> list[Made] | None:
    """Of a call, of branches or of a loop; None of any other."""
    bodies = _jaxpr.bodies(pair.eqn), _jaxpr.bodies(pair.twin)
    if len(bodies[0]) != len(bodies[1]):
        raise Differs
    if not bodies[0]:
        return None
    carried = _jaxpr.carry(pair.eqn)
    given = list(operands)
    # Each round what is carried becomes something else, which each can a few times.
    for _ in range(2 + 3 * len(given[carried])):
        cases = []
        for one, other in zip(*bodies, strict=True):
            along = _along(one.jaxpr.invars, other.jaxpr.invars)
            own = given[len(given) - len(along) :]
            own = [_lying(made, axes) for made, axes in zip(own, along, strict=True)]
            cases.append(results(one, other, own, growth))
        found = [_joined(case) for case in zip(*cases, strict=True)]
        if pair.name == "cond" and operands[0].kind != SAME:
            return [Made(UNKNOWN)] * len(found)
        before = given[carried]
        after = [_joined(both) for both in zip(before, found, strict=False)]
        if after == before:
            return found
        given = [*given[: carried.start or 0], *after, *given[carried.stop :]]
    return [Made(UNKNOWN)] * len(pair.eqn.outvars)


def _joined(operands: Sequence[Made]) -> Made:
    """A sum, or one of these: linear in all."""
    kinds = {made.kind for made in operands}
    degrees = {made.degree for made in operands} - {None}
    if OTHER in kinds:  # which nothing beside it makes linear
        return next(made for made in operands if made.kind == OTHER)
    if UNKNOWN in kinds:
        return Made(UNKNOWN)
    if len(degrees) > 1:  # such as a sum and a small number
        return Made(UNSURE if WHOLE in kinds and EACH not in kinds else UNKNOWN)
    if UNSURE in kinds:
        return Made(UNSURE)
    return Made(max(kinds), next(iter(degrees), None))


def _product(a: Made, b: Made) -> Made:
    if a.kind == SAME or b.kind == SAME or a.kind == b.kind == EACH:
        made = a if b.kind == SAME else b
        return made._replace(degree=_sum(a.degree, b.degree))
    if UNSURE in (a.kind, b.kind):
        return Made(UNKNOWN)
    return _first([a, b], "multiplies by what is made of all examples")


def _sum(a: int | None, b: int | None) -> int | None:
    """The degree of a product; what is zero stays zero."""
    return None if a is None or b is None else a + b


def _quotient(a: Made, b: Made) -> Made:
    if UNKNOWN in (a.kind, b.kind) or b.degree is None:
        return Made(UNKNOWN)
    if b.kind == SAME:
        return a._replace(degree=_sum(a.degree, -b.degree))
    if b.kind == EACH and a.kind in (SAME, EACH):
        return Made(EACH, _sum(a.degree, -b.degree))
    return _first([a, b], "divides by what is made of all examples")


def _chosen(which: Made, *cases: Made) -> Made:
    joined = _joined(cases)
    if which.kind == SAME or UNKNOWN in (which.kind, joined.kind):
        return joined
    if which.kind == EACH:
        each = joined.kind in (SAME, EACH)
        return joined._replace(kind=EACH) if each else Made(UNKNOWN)
    return Made(UNSURE)


def _converted(eqn: core.JaxprEqn, made: Made) -> Made:
    given: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    floating = jnp.issubdtype(result.dtype, jnp.inexact)
    was = jnp.issubdtype(given.dtype, jnp.inexact)
    return Made(UNSURE) if was and not floating and made.kind in _OF_ALL else made


def _first(operands: Sequence[Made], why: str) -> Made:
    """Not linear: by what made it so first."""
    return next((made for made in operands if made.kind == OTHER), Made(OTHER, why=why))

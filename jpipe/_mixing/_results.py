"""How results are made of examples: of each by itself, as a sum, or otherwise.

A loss of a mini-batch is that of its micro-batches if it is linear in what it takes of
each example. Whether it is a mean or a sum is told by numbers that grow with the
examples, which two jaxprs of one function show that were traced with other numbers.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr, _marks
from ._made import (
    CHOSEN,
    EACH,
    FOLLOWS,
    LARGEST,
    MOVED,
    OF_ALL,
    OTHER,
    SAME,
    SHIFTED,
    UNCLEAR,
    UNKNOWN,
    UNSURE,
    WHOLE,
    Made,
    chosen,
    first,
    joined,
    one_of,
    product,
    quotient,
    times,
)
from ._moved import PLACED, moved, parts
from ._order import COMPARED, FREE, Orders, is_placed, merged
from ._ordered import follow
from ._pairs import Differs, Numbers, Pair, axes_along

_OF_PLACES = """
    broadcast broadcast_in_dim concatenate conj copy copy_p expand_dims imag name neg
    pad real reduce_precision reshape rev slice split squeeze stack stop_gradient
    transpose unstack
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
_OF_SELECTIONS = "concatenate dynamic_update_slice pad scatter slice split"

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
# What is less the largest of all becomes a quotient by it, which leaves a softmax.
_SHIFTED = frozenset(["exp", "exp2"])
# Whether, not how much.
_ANSWERS = frozenset(_OF_ANSWERS.split())
_LOGIC = frozenset(["and", "not", "or", "xor"])
_ALONG = frozenset(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"])
_WRITES = frozenset(["dynamic_update_slice", "scatter", "scatter-add"])
# What leaves out some examples, or tells one from another, as a sum of them does not.
_SELECTIONS = frozenset([*PLACED, *_OF_SELECTIONS.split()])
_APART = "jpipe apart"
_BESIDE = "cuts off, of each example, by what is made of all"


def apart(x: jax.Array) -> jax.Array:
    """The same array, which counts as one of each example by itself."""
    return _marks.mark(x, _APART)


def results(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    numbers: Numbers,
) -> list[Made]:
    """How each result is made.

    Args:
      one: the jaxpr of a function with some number of examples.
      other: with more.
      given: how each input is.
      numbers: of the examples.

    Raises:
      Differs: if the jaxprs do in more than numbers.
    """
    try:
        return _results(one, other, given, numbers)
    except Differs:
        raise
    except Exception as error:  # a fault of a check stops no training
        warnings.warn(
            f"jpipe cannot follow whether examples come together in a layer or in the "
            f"loss, and goes on as if they did not ({error!r}); please report it",
            stacklevel=2,
        )
        raise Differs from error


def _results(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    numbers: Numbers,
) -> list[Made]:
    if _size(one) != _size(other):
        raise Differs
    values = dict(zip(one.jaxpr.invars, given, strict=True))
    for var, a, b in zip(one.jaxpr.constvars, one.consts, other.consts, strict=True):
        values[var] = _constant(a, b, numbers.growth)

    def read(atoms: Sequence[Any], twins: Sequence[Any]) -> list[Made]:
        return [
            _constant(atom.val, twin.val, numbers.growth)
            if isinstance(atom, core.Literal)
            else values[atom]
            for atom, twin in zip(atoms, twins, strict=True)
        ]

    for eqn, twin in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=True):
        pair = Pair(eqn, twin, numbers)
        operands = read(eqn.invars, twin.invars)
        found = _within(pair, operands, numbers)
        if found is None:
            orders, together = follow(pair, [*map(_orders, operands)], numbers)
            if not together and _are_compared(operands, orders):
                together = COMPARED
            made = Made(OTHER, UNCLEAR, together) if together else _made(pair, operands)
            beside = zip(_singles(pair, operands), orders, strict=True)
            found = [made._replace(single=one, orders=own) for one, own in beside]
        for var, made, along in zip(eqn.outvars, found, pair.after, strict=True):
            values[var] = _lying(made, along)
    return read(one.jaxpr.outvars, other.jaxpr.outvars)


def _are_compared(operands: Sequence[Made], orders: Sequence[Orders | None]) -> bool:
    """Whether what was moved, nobody knows how, meets what stays in its place."""
    moved = any(made.why == MOVED and not is_placed(made.orders) for made in operands)
    return moved and any(map(is_placed, orders))


def _orders(made: Made) -> Orders | None:
    return FREE if made.kind == SAME else made.orders


def _size(closed: core.ClosedJaxpr) -> tuple[int, int]:
    return len(closed.jaxpr.eqns), len(closed.consts)


def _lying(made: Made, along: Sequence[bool], why: str = CHOSEN) -> Made:
    """What is of each example lies along one axis of them."""
    if made.kind != EACH or sum(along) == 1:
        return made
    if made.orders and made.orders.exact and made.orders.are_all_known:
        return made
    if not any(along):
        return made._replace(kind=UNKNOWN, why=why)
    return made._replace(kind=OTHER, why=COMPARED)


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
        return Made(SAME, 0 if np.array_equal(one, other) else UNCLEAR)
    a, b = (float(np.asarray(x).item()) for x in (one, other))
    if a == b or not (math.isfinite(a) and math.isfinite(b)):
        return Made(SAME, 0 if a else None)
    degree = math.log(b / a) / math.log(growth) if a * b > 0 else math.inf
    # A number of examples in bfloat16 has eight bits.
    if abs(degree) > 3 or abs(degree - round(degree)) > 0.02:
        return Made(SAME, UNCLEAR)
    return Made(SAME, round(degree))


def _made(pair: Pair, operands: list[Made]) -> Made:
    """How the results of an equation are, that holds no jaxpr."""
    name = pair.name
    if name == "name" and pair.eqn.params["name"] == _APART:
        return Made(EACH if any(pair.after[0]) else SAME)
    if elsewhere := moved(pair, operands):
        return elsewhere
    values, places = parts(name, operands)
    if name in PLACED and (at := _taken(values[0], places)):
        return at
    places = [*map(_place, places)]
    operands = [*values, *places]
    kinds = {made.kind for made in operands}
    if _goes_along(pair, values):
        return first(values, "goes along the examples, one after the other")
    if name in _LINEAR:
        return joined(operands)
    if name == "reduce_sum":
        over = [pair.before[0][i] for i in pair.eqn.params["axes"]]
        return _summed(operands[0], over, pair.after[0])
    if UNKNOWN in kinds:
        return one_of(UNKNOWN, operands)
    if not kinds - {SAME} and name in ("iota", "random_bits"):
        return Made(EACH if any(pair.after[0]) else SAME)
    if name == "convert_element_type":
        return _converted(pair.eqn, operands[0])
    if name == "dot_general":
        (axes, _), _ = pair.eqn.params["dimension_numbers"]
        over = [pair.before[0][i] for i in axes]
        return _summed(product(*operands), over, pair.after[0])
    if name == "mul":
        return product(*operands)
    if name == "div":
        return quotient(*operands)
    if name == "select_n":
        return chosen(*operands)
    if name in _WRITES:
        return _written(pair, values, places)
    if not kinds.isdisjoint(OF_ALL):
        beside = operands[0].kind == UNSURE and operands[0].why == SHIFTED
        if name in _SHIFTED and beside and any(pair.after[0]):
            return Made(EACH)
        if name in _CURVED:
            called = _CALLED.get(name, name)
            made = first(operands, f"takes {called} of what is made of all examples")
            grows = any(operand.degree for operand in operands)
            return made._replace(degree=UNCLEAR if grows else 0)
        if name in _SOFT:
            return _soft(pair, operands)
        if name == "ragged_dot_general":  # of rows in groups, and how many each has
            return Made(UNKNOWN)
        return Made(UNKNOWN, why="" if kinds == {UNSURE} else FOLLOWS)
    if name in _ANSWERS and kinds == {SAME}:
        return Made(SAME)
    if any(made.degree for made in operands):
        return Made(SAME, UNCLEAR) if kinds == {SAME} else Made(UNKNOWN)
    if EACH in kinds and name.startswith(("reduce_", "arg")):
        over = [pair.before[0][i] for i in pair.eqn.params.get("axes", ())]
        why = "" if name in ("reduce_and", "reduce_or") else LARGEST
        apart = any(pair.after[0]) or not any(over)
        return Made(EACH) if apart else Made(UNSURE, UNCLEAR, why)
    return Made(EACH if EACH in kinds else SAME)


def _goes_along(pair: Pair, values: Sequence[Made]) -> bool:
    """Whether it adds up what stands before, along the examples."""
    if pair.name not in _ALONG or not pair.before[0][pair.eqn.params["axis"]]:
        return False
    given: Any = pair.eqn.invars[0].aval
    (made,) = values
    sorts = made.why == MOVED and jnp.issubdtype(given.dtype, jnp.floating)
    return made.kind != UNKNOWN or sorts


def _taken(value: Made, places: Sequence[Made]) -> Made | None:
    """What is taken of a value, where that follows from how the places are made."""
    kinds = {place.kind for place in places}
    if kinds <= {SAME}:
        return value
    if any(place.why == LARGEST for place in places) and value.kind == EACH:
        return Made(OTHER, UNCLEAR, LARGEST)
    if kinds <= {SAME, EACH} and value.kind in (WHOLE, OTHER):
        return first([value], "takes, for each example, what is made of all")
    return None


def _soft(pair: Pair, operands: Sequence[Made]) -> Made:
    """A size, or an answer, of what is of all: linear only if it is what it was."""
    why, along = _heard(pair, operands), any(pair.after[0])
    if along and why == COMPARED:
        return Made(OTHER, UNCLEAR, why)
    if along and why == FOLLOWS and pair.name not in _ANSWERS:
        why = _BESIDE  # which differs from one example to another
    return Made(UNSURE, UNCLEAR, why)


def _heard(pair: Pair, operands: Sequence[Made]) -> str:
    """Why a size, or an answer, is of all.

    Of an answer about one number of all, such as whether they are finite, nothing is
    told.
    """
    whole = any(pair.after[0]) and pair.name not in _LOGIC
    lying = operands if whole else itertools.compress(operands, map(any, pair.before))
    why = next((m.why or FOLLOWS for m in lying if m.kind in OF_ALL), "")
    if why or pair.name in _ANSWERS:
        return why
    return next((m.why for m in operands if m.kind in OF_ALL), "")


def _written(pair: Pair, values: Sequence[Made], places: Sequence[Made]) -> Made:
    """A value with others written in some of its places, or added there."""
    into, new = values
    added = pair.name == "scatter-add"
    each = {made.kind for made in (*places, new)}
    if added and EACH in each and each <= {SAME, EACH} and not any(pair.after[0]):
        return joined([into, Made(WHOLE, times(new.degree, 1))])
    made = joined([into, new])
    if made.kind != OTHER and any(place.kind != SAME for place in places):
        apart = any(pair.after[0]) and made.kind in (SAME, EACH)
        return made._replace(kind=EACH if apart else UNKNOWN, why="")
    return made


def _singles(pair: Pair, operands: Sequence[Made]) -> list[bool]:
    """Which results of an equation, that holds no jaxpr, hold single examples."""
    held = [made.single for made in operands]
    count = len(pair.after)
    if not any(held):
        return [False] * count
    if pair.name == "sort":
        # Examples in order, and not in that of something else, are not told apart.
        along = pair.after[0]
        alone = along[pair.eqn.params["dimension"]] and sum(along) == 1
        return [held[0] and not alone, *held[1:]]
    single = not all(any(a) for a in itertools.compress(pair.before, held))
    single |= pair.name in _SELECTIONS
    return [single or any(along) for along in pair.after]


def _place(made: Made) -> Made:
    """What says where something is: how large it is does not matter.

    Such as a place from the end, which the number of examples was added to.
    """
    return Made(EACH) if made.kind == UNKNOWN else made._replace(degree=0)


def _summed(made: Made, over: Sequence[bool], after: Sequence[bool]) -> Made:
    """A sum over axes, which go along the examples or not."""
    if any(over) and made.why == MOVED:
        return Made(UNKNOWN)
    if not any(over) or made.kind == UNKNOWN:
        return made
    if made.kind == EACH and any(after):
        return Made(UNKNOWN)
    kind = WHOLE if made.kind == EACH else made.kind
    return Made(kind, times(made.degree, sum(over)), made.why)


def _within(pair: Pair, operands: list[Made], numbers: Numbers) -> list[Made] | None:
    """Of a call, of branches or of a loop; None of any other."""
    bodies = _jaxpr.bodies(pair.eqn), _jaxpr.bodies(pair.twin)
    if len(bodies[0]) != len(bodies[1]):
        raise Differs
    if not bodies[0]:
        return None
    carried = _jaxpr.carry(pair.eqn)
    given, found = list(operands), list[Made]()
    # Each round what is carried becomes something else, which each can a few times.
    for _ in range(2 + 4 * len(given[carried])):
        cases = []
        for one, other in zip(*bodies, strict=True):
            axes = axes_along(one.jaxpr.invars, other.jaxpr.invars, numbers)
            own = given[len(given) - len(axes) :]
            # A loop may go along the examples, one by one.
            own = [_lying(*each, why="") for each in zip(own, axes, strict=True)]
            if pair.name == "scan":
                own[carried.stop :] = map(_unstacked, own[carried.stop :])
            cases.append(_results(one, other, own, numbers))
        found = [_either(case) for case in zip(*cases, strict=True)]
        if pair.name == "cond" and operands[0].kind != SAME:
            return [_lost(made, operands[0]) for made in found]
        before = given[carried]
        after = [_either(both) for both in zip(before, found, strict=False)]
        if after == before:
            scanned = len(before) if pair.name == "scan" else len(found)
            return [*found[:scanned], *map(_stacked, found[scanned:])]
        given = [*given[: carried.start or 0], *after, *given[carried.stop :]]
    return [*map(_lost, found)]


def _unstacked(made: Made) -> Made:
    """What each step of a loop finds: of which examples, if all steps find the same."""
    return made._replace(orders=made.orders and made.orders.inside)


def _stacked(made: Made) -> Made:
    """What all steps of a loop made: if each of one example, then of all again."""
    why = "" if made.why == CHOSEN else made.why
    return made._replace(why=why, orders=made.orders and made.orders.stacked)


def _lost(made: Made, which: Made | None = None) -> Made:
    """Of what nobody knows more, but that something of all may have chosen it."""
    by_all = which is not None and which.kind in OF_ALL and which.why
    return Made(UNKNOWN, why=FOLLOWS if by_all else "", single=made.single)


def _either(cases: Sequence[Made]) -> Made:
    """One of several."""
    single = any(made.single for made in cases)
    orders = merged([*map(_orders, cases)])
    return joined(cases)._replace(single=single, orders=orders)


def _converted(eqn: core.JaxprEqn, made: Made) -> Made:
    given: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    floating = jnp.issubdtype(result.dtype, jnp.inexact)
    was = jnp.issubdtype(given.dtype, jnp.inexact)
    counted = was and not floating and made.kind in OF_ALL
    return Made(UNSURE, UNCLEAR, made.why) if counted else made

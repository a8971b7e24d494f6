"""How the results of one equation are made of examples."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from ._made import (
    AFTER,
    BEYOND,
    BY_PLACE,
    CALLS,
    CHOSEN,
    DRAWN,
    EACH,
    FOLLOWS,
    GIVEN,
    GROWS,
    LARGEST,
    MOVED,
    MULTIPLIED,
    OF_ALL,
    OTHER,
    RANKED,
    SAME,
    SHIFTED,
    SHIFTS,
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
    raised,
    times,
)
from ._moved import moved, parts
from ._order import COMPARED
from ._pairs import PLACED, WRITES, Pair

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
_SCALED = "abs cumsum dynamic_slice gather reduce_max reduce_min sort"
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
# What is less the largest of all becomes a quotient by it, which leaves a softmax: it
# is of each example, once it is divided by another such.
_SHIFTED = frozenset(["exp", "exp2"])
# Of which the rules below tell what becomes of a factor; and what is multiplied by it
# where its operand is.
_FACTORED = frozenset(["div", "dot_general", "mul", "reduce_sum", "select_n", *_LINEAR])
_OF_NO_SCALE = frozenset(_SCALED.split())
# Whether, not how much.
_ANSWERS = frozenset(_OF_ANSWERS.split())
_COMPARISONS = frozenset(["ge", "gt", "le", "lt"])
_LOGIC = frozenset(["and", "not", "or", "xor"])
_ALONG = frozenset(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"])
_EXTREMES = frozenset(["scatter-max", "scatter-min"])
_DRAWS = frozenset(["random_bits", "random_gamma"])
# What makes keys: by a number that is known of nothing but what it is made of.
_KEYS = frozenset(["random_fold_in", "random_seed", "random_split", "random_wrap"])
# What is computed elsewhere, of which no jaxpr tells, nor random numbers.
_ELSEWHERE = frozenset(["ffi_call", "io_callback", "pure_callback"])
_OF_MATRICES = frozenset(["cholesky", "eig", "eigh", "lu", "qr", "svd"])
_ANSWERED = "asks whether one of all examples, or each, is so"
_BESIDE = "cuts off, of each example, by what is made of all"


def made_by(pair: Pair, operands: list[Made]) -> Made:
    """How the results of an equation are, that holds no jaxpr."""
    made = _made_by(pair, operands)
    shifted = [m for m in operands if m.kind == EACH and m.why in SHIFTS]
    if made.kind != EACH or not shifted or pair.name in _FACTORED:
        return made
    if pair.name in _OF_NO_SCALE:
        return made._replace(why=shifted[0].why, factors=shifted[0].factors)
    power = _power(pair)
    return raised(shifted[0], power) if power else made._replace(why=BEYOND, factors=())


def _power(pair: Pair) -> float:
    """To which an equation raises its operand; none is zero."""
    if pair.name == "integer_pow":
        return pair.eqn.params["y"]
    return {"rsqrt": -0.5, "sqrt": 0.5, "square": 2}.get(pair.name, 0)


def _made_by(pair: Pair, operands: list[Made]) -> Made:
    name = pair.name
    if name in _ELSEWHERE and any(map(any, (*pair.before, *pair.after))):
        return Made(UNKNOWN, why=CALLS)
    operands = _placing(name, operands)
    if name in _KEYS and all(map(_makes_keys, operands)):
        return Made(SAME)
    if _says_which(pair, operands):
        return Made(UNKNOWN, why=GIVEN)
    if elsewhere := moved(pair, operands):
        return elsewhere
    values, places = parts(name, operands)
    if name in PLACED and (at := _taken(values[0], places)):
        return at
    if any(place.why == DRAWN for place in places):
        return Made(UNKNOWN, why=DRAWN)
    places = [*map(_place, places)]
    operands = [*values, *places]
    kinds = {made.kind for made in operands}
    if _goes_along(pair, values):
        return first(values, AFTER)
    if name in _LINEAR:
        return joined(operands)
    if name == "reduce_sum":
        over = [pair.before[0][i] for i in pair.eqn.params["axes"]]
        return _summed(operands[0], over, pair.after[0])
    if UNKNOWN in kinds:
        return one_of(UNKNOWN, operands)
    if name in _DRAWS and kinds <= {SAME}:
        own = not any(made.drawn for made in operands)
        given = Made(UNKNOWN, why=DRAWN) if own else Made(EACH)
        return given if any(pair.after[0]) else Made(SAME)
    if name == "iota":
        return Made(EACH if any(pair.after[0]) else SAME)
    if name == "convert_element_type":
        return _converted(pair.eqn, operands[0])
    if name == "dot_general":
        (axes, _), _ = pair.eqn.params["dimension_numbers"]
        over = [pair.before[0][i] for i in axes]
        return _summed(product(*operands), over, pair.after[0])
    if name == "mul":
        square = operands[0].square
        return square if square and _is_square(pair) else product(*operands)
    if name == "div":
        return quotient(*operands)
    if name == "select_n":
        return chosen(*operands)
    if name in WRITES:
        return _written(pair, values, places)
    if not kinds.isdisjoint(OF_ALL):
        return _of_all(pair, operands)
    if kinds == {SAME}:
        grows = any(made.degree for made in operands) and name not in _ANSWERS
        return Made(SAME, UNCLEAR, GROWS) if grows else Made(SAME)
    if any(made.degree for made in operands):
        return Made(UNKNOWN)
    return _of_each(pair) if kinds else Made(SAME)


def _placing(name: str, operands: list[Made]) -> list[Made]:
    """The operands; a place that one in the batch was added to is one of each."""
    _, places = parts(name, range(len(operands)))
    return [
        made._replace(kind=EACH, why="")
        if number in places and made.why == BY_PLACE
        else made
        for number, made in enumerate(operands)
    ]


def _makes_keys(made: Made) -> bool:
    """Whether a key made of it is new in each micro-batch if another is."""
    return made.kind == SAME or made.known is not None or made.why == BY_PLACE


def _says_which(pair: Pair, operands: Sequence[Made]) -> bool:
    """Whether numbers that are given, and no places, say of which examples."""
    values, places = parts(pair.name, operands)
    given = [
        (made.kind == EACH or (made.kind == UNKNOWN and made.why == GROWS))
        and not made.numbered
        for made in places  # to those from the end their number is added
    ]
    if not any(given):
        return False
    along, params = pair.before[0], pair.eqn.params
    if pair.name == "gather":
        axes = params["dimension_numbers"].start_index_map
    elif pair.name.startswith("scatter"):
        axes = params["dimension_numbers"].scatter_dims_to_operand_dims
    else:
        axes = [axis for axis, is_given in enumerate(given) if is_given]
    written = pair.name not in PLACED
    return any(along[i] for i in axes) and (written or values[0].kind == EACH)


def _of_all(pair: Pair, operands: list[Made]) -> Made:
    """What follows from what is of all examples, and is not linear in it."""
    name, along = pair.name, any(pair.after[0])
    if name in _SHIFTED and along and operands[0].why == SHIFTED:
        return Made(EACH, why=SHIFTED, factors=((id(pair.eqn), 1),))
    if name in _CURVED:
        square = operands[0].square
        if square and _is_square(pair):
            return square
        called = _CALLED.get(name, name)
        made = first(operands, f"takes {called} of what is made of all examples")
        grows = any(operand.degree for operand in operands)
        square = operands[0] if name == "sqrt" else None
        return made._replace(degree=UNCLEAR if grows else 0, square=square)
    if name in _SOFT:
        return _soft(pair, operands)
    if name == "ragged_dot_general":  # of rows in groups, and how many each has
        return Made(UNKNOWN)
    if along and any(made.why == COMPARED for made in operands):
        return Made(OTHER, UNCLEAR, COMPARED)
    unsure = all(made.kind == UNSURE for made in operands) and name not in _KEYS
    return Made(UNKNOWN, why="" if unsure else FOLLOWS)


def _is_square(pair: Pair) -> bool:
    """Whether an equation takes the square of its first operand."""
    a, *others = pair.eqn.invars
    power = pair.name == "integer_pow" and pair.eqn.params["y"] == 2
    return power or pair.name == "square" or others == [a]


def _of_each(pair: Pair) -> Made:
    """What follows from each example by itself, unless several come together."""
    name, along = pair.name, any(pair.after[0])
    if name == "pallas_call":
        return Made(UNKNOWN)
    if _runs_along(pair):
        return Made(OTHER, UNCLEAR, COMPARED)
    if name in _EXTREMES and not along:
        return Made(UNSURE, UNCLEAR, LARGEST)
    if not name.startswith(("reduce_", "arg")):
        return Made(EACH)
    over = [pair.before[0][i] for i in pair.eqn.params.get("axes", ())]
    if along or not any(over):
        return Made(EACH)
    if name == "reduce_prod":
        return Made(OTHER, UNCLEAR, MULTIPLIED)
    if name not in ("reduce_and", "reduce_or"):
        return Made(UNSURE, UNCLEAR, LARGEST)
    # Of one answer, such as whether all are finite, nothing is told.
    return Made(UNSURE, UNCLEAR, _ANSWERED if pair.after[0] else "")


def _runs_along(pair: Pair) -> bool:
    """Whether a window, or a transform of several elements, lies along examples."""
    params: Any = pair.eqn.params
    along, *_ = pair.before
    if pair.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        kernel: Any = pair.eqn.invars[1].aval
        lengths = [kernel.shape[axis] for axis in numbers.rhs_spec[2:]]
        inside = zip(numbers.lhs_spec[2:], lengths, strict=True)
        return any(along[axis] and length > 1 for axis, length in inside)
    if pair.name.startswith("reduce_window"):
        lengths = params["window_dimensions"]
        return any(a and n > 1 for a, n in zip(along, lengths, strict=True))
    if pair.name == "fft":
        return any(along[-len(params["fft_lengths"]) :])
    return pair.name in _OF_MATRICES and any(along[-2:])


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
    of_all = {place.why for place in places if place.kind in OF_ALL}
    for why in (COMPARED, LARGEST):
        if why in of_all and value.kind == EACH:
            return Made(OTHER, UNCLEAR, why)
    if value.kind == EACH and any(of_all):
        return Made(UNSURE, UNCLEAR, max(of_all))
    if kinds <= {SAME, EACH} and value.kind in (WHOLE, OTHER):
        return first([value], "takes, for each example, what is made of all")
    if kinds <= {SAME, EACH} and value.kind == UNSURE:
        return value
    return None


def _soft(pair: Pair, operands: Sequence[Made]) -> Made:
    """A size, or an answer, of what is of all: linear only if it is what it was."""
    why, along = _heard(pair, operands), any(pair.after[0])
    if along and why == COMPARED:
        return Made(OTHER, UNCLEAR, why)
    if along and why == SHIFTED:
        why = BEYOND
    if along and why == FOLLOWS and pair.name not in _ANSWERS:
        why = _BESIDE  # which differs from one example to another
    return Made(UNSURE, UNCLEAR, why)


def _heard(pair: Pair, operands: Sequence[Made]) -> str:
    """Why a size, or an answer, is of all.

    Of whether one number of all is finite, say, nothing is told; of whether it is more
    than another something is.
    """
    if pair.name in _LOGIC:
        return next((m.why for m in operands if m.kind in OF_ALL and m.why), "")
    whole = any(pair.after[0])
    lying = operands if whole else itertools.compress(operands, map(any, pair.before))
    why = next((m.why or FOLLOWS for m in lying if m.kind in OF_ALL), "")
    if why or pair.name in _ANSWERS - _COMPARISONS:
        return why
    return next((m.why for m in operands if m.kind in OF_ALL), "") or FOLLOWS


def _written(pair: Pair, values: Sequence[Made], places: Sequence[Made]) -> Made:
    """A value with others written in some of its places, or added there."""
    into, new = values
    added = pair.name == "scatter-add"
    each = {made.kind for made in (*places, new)}
    if added and EACH in each and each <= {SAME, EACH} and not any(pair.after[0]):
        return joined([into, Made(WHOLE, times(new.degree, 1))])
    made = joined([into, new])
    if new.kind == EACH and not any(pair.before[-1]) and any(pair.after[0]):
        return Made(UNKNOWN, why=CHOSEN)
    if made.kind != OTHER and any(place.kind != SAME for place in places):
        apart = any(pair.after[0]) and made.kind in (SAME, EACH)
        why = CHOSEN if made.why == CHOSEN else ""
        of_all = {place.why for place in places if place.kind in OF_ALL}
        if apart and any(of_all):
            return Made(UNSURE, UNCLEAR, max(of_all))
        why = max(of_all, default=why)
        return made._replace(kind=EACH if apart else UNKNOWN, why=why)
    return made


def _place(made: Made) -> Made:
    """What says where something is: how large it is does not matter.

    Such as a place from the end, which the number of examples was added to.
    """
    if made.kind != UNKNOWN:
        return made._replace(degree=0)
    of_all = made.why in (FOLLOWS, RANKED)
    return Made(UNSURE, UNCLEAR, made.why) if of_all else Made(EACH)


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


def _converted(eqn: core.JaxprEqn, made: Made) -> Made:
    given: Any = eqn.invars[0].aval
    result: Any = eqn.outvars[0].aval
    floating = jnp.issubdtype(result.dtype, jnp.inexact)
    was = jnp.issubdtype(given.dtype, jnp.inexact)
    counted = was and not floating and made.kind in OF_ALL
    return Made(UNSURE, UNCLEAR, made.why) if counted else made

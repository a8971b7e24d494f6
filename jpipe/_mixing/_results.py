"""How results are made of examples: of each by itself, as a sum, or otherwise.

A loss of a mini-batch is that of its micro-batches if it is linear in what it takes of
each example. Whether it is a mean or a sum is told by numbers that grow with the
examples, which two jaxprs of one function show that were traced with other numbers.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr, _loops
from . import _known
from ._apart import is_numbered, takes_apart, tells_apart
from ._constants import constant, degree_of, is_number
from ._equation import made_by
from ._known import Known
from ._made import (
    ADDS,
    AFTER,
    BY_PLACE,
    CHOSEN,
    DRAWN,
    EACH,
    FOLLOWS,
    MOVED,
    OF_ALL,
    OTHER,
    SAME,
    UNCLEAR,
    UNKNOWN,
    WHOLE,
    Made,
    joined,
    placed,
)
from ._order import COMPARED, FREE, Orders, is_placed, merged
from ._ordered import follow
from ._pairs import PLACED, Differs, Numbers, Pair, axes_along

_OF_SELECTIONS = "concatenate dynamic_update_slice pad scatter slice split"

# What makes a root, or gives the same numbers again.
_KEEPS = frozenset(["convert_element_type", "reshape", "sqrt", "squeeze"])
# What leaves out some examples, or tells one from another, as a sum of them does not.
_SELECTIONS = frozenset([*PLACED, *_OF_SELECTIONS.split()])


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
    with reported():
        return _results(one, other, given, numbers)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """The scope of a check: a fault of it is told, and stops no training.

    Raises:
      Differs: in the place of a fault.
    """
    try:
        yield
    except Differs:
        raise
    except Exception as error:
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
        values[var] = constant(a, b, numbers.growth)

    def read(atoms: Sequence[Any], twins: Sequence[Any]) -> list[Made]:
        return [
            constant(atom.val, twin.val, numbers.growth)
            if isinstance(atom, core.Literal)
            else values[atom]
            for atom, twin in zip(atoms, twins, strict=True)
        ]

    for eqn, twin in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=True):
        pair = Pair(eqn, twin, numbers)
        operands = read(eqn.invars, twin.invars)
        found = _within(pair, operands, numbers)
        if found is None:
            found = _after(pair, operands, numbers)
        for var, last, made, along in zip(
            eqn.outvars, twin.outvars, found, pair.after, strict=True
        ):
            values[var] = placed(_lying(made, along), var.aval, last.aval, numbers)
    return read(one.jaxpr.outvars, other.jaxpr.outvars)


def _after(pair: Pair, operands: list[Made], numbers: Numbers) -> list[Made]:
    """Of an equation that holds no jaxpr."""
    if not pair.after or pair.name == "optimization_barrier":  # it prints, say
        return operands[: len(pair.after)]
    known = [made.known for made in operands]
    given = [*map(_orders, operands)]
    orders, together = follow(pair, given, numbers)
    if orders == [None]:
        orders = [_known.taken(pair, known, given)]
    if not together and _are_compared(operands, orders):
        together = COMPARED
    table_is_drawn = pair.name == "gather" and operands[0].drawn
    if not together and not table_is_drawn and tells_apart(pair, known, given, numbers):
        together = BY_PLACE
    made = Made(OTHER, UNCLEAR, together) if together else made_by(pair, operands)
    if pair.name not in _KEEPS:
        sized = made.sized and pair.name in ("div", "mul")
        made = made._replace(square=None, sized=sized)
    own = _singles(pair, operands), orders, _known.computed(pair, known)
    if (first := own[-1][0]) and all(own[-1]):
        made = _counted(made, first, numbers)
    elif _is_cut_to_size(pair, operands):
        made = Made(UNKNOWN, why=BY_PLACE)
    made = made._replace(
        drawn=any(made.drawn for made in operands),
        numbered=any(made.numbered for made in operands) or _are_places(pair, made),
        pieced=any(made.pieced for made in operands)
        or takes_apart(pair, orders, numbers),
    )
    return [
        made._replace(single=single, orders=order, known=known)
        for single, order, known in zip(*own, strict=True)
    ]


def _counted(made: Made, known: Known, numbers: Numbers) -> Made:
    """How what is known of the number of examples alone follows from it."""
    if made.kind == UNKNOWN:  # such as a place, with the number of examples added
        return Made(EACH)
    if made.kind != SAME or made.degree != UNCLEAR or known.changes:
        return made
    if not all(map(is_number, known.each)):
        return made
    few, many = (np.real(values).item() for values in known.each)
    return Made(SAME, degree_of(few, many, numbers.growth), made.why)


def _is_cut_to_size(pair: Pair, operands: Sequence[Made]) -> bool:
    """Whether as much is taken of a table as there are examples: one for each place."""
    cut = pair.name in ("slice", "dynamic_slice") and operands[0].kind == SAME
    fits = any(pair.after[0]) and not any(pair.before[0])
    return cut and fits and not operands[0].drawn


def _are_places(pair: Pair, made: Made) -> bool:
    return pair.name == "iota" and made.kind == EACH


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


def _within(pair: Pair, operands: list[Made], numbers: Numbers) -> list[Made] | None:
    """Of a call, of branches or of a loop; None of any other."""
    if pair.name == "custom_linear_solve":
        return _solved(pair, operands, numbers)
    bodies = _jaxpr.bodies(pair.eqn), _jaxpr.bodies(pair.twin)
    if len(bodies[0]) != len(bodies[1]):
        raise Differs
    if not bodies[0]:
        return None
    carried = _jaxpr.carry(pair.eqn)
    given, found = list(operands), list[Made]()
    given[carried] = [made._replace(known=None) for made in given[carried]]
    # Each round what is carried becomes something else, which each can a few times.
    for _ in range(2 + 4 * len(given[carried])):
        cases = []
        for one, other in zip(*bodies, strict=True):
            axes = axes_along(one.jaxpr.invars, other.jaxpr.invars, numbers)
            own = given[len(given) - len(axes) :]
            # A loop may go along the examples, one by one.
            own = [_lying(*each, why="") for each in zip(own, axes, strict=True)]
            if pair.name == "scan":
                own = _unstacked(pair, own, carried, numbers)
            cases.append(_results(one, other, own, numbers))
        found = [_either(case) for case in zip(*cases, strict=True)]
        if pair.name == "cond" and operands[0].kind != SAME:
            each = zip(found, pair.after, strict=True)
            return [_perhaps(made, operands[0], any(along)) for made, along in each]
        before = given[carried]
        after = [_either(both) for both in zip(before, found, strict=False)]
        if after == before and pair.name == "scan":
            going = _loops.handed_on(pair.eqn, [*map(_is_cut, operands, pair.before)])
            stacked = zip(found[len(before) :], going, strict=True)
            carry = map(_at_the_end, found[: len(before)])
            return [*carry, *(_stacked(*each) for each in stacked)]
        if after == before:
            which = _while(pair, given, numbers) if pair.name == "while" else None
            end = functools.partial(_lost, which=which) if which else _at_the_end
            return [*map(end, found)] if pair.name == "while" else found
        given = [*given[: carried.start or 0], *after, *given[carried.stop :]]
    return [*map(_lost, found)]


def _solved(pair: Pair, operands: list[Made], numbers: Numbers) -> list[Made]:
    """Of a linear system: as its solver, which takes what it closes over, and more."""
    lengths: Any = pair.eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    held = operands[before : before + lengths.solve]
    one, other = (eqn.params["jaxprs"].solve for eqn in (pair.eqn, pair.twin))
    return _results(one, other, [*held, *operands[sum(lengths) :]], numbers)


def _unstacked(
    pair: Pair, given: Sequence[Made], carried: slice, numbers: Numbers
) -> list[Made]:
    """What each step of a loop finds: of which examples, if all steps find the same.

    In a loop along the examples, keys and numbers of places are others in each step.
    """
    goes = pair.eqn.params["length"] != pair.twin.params["length"]
    found = list(given[: carried.start])
    for i, made in enumerate(given[carried.start :], carried.start):
        one, why = made, ""
        if i >= carried.stop:
            inside = made.orders and made.orders.inside
            one = made._replace(orders=inside, known=None)
            why = BY_PLACE if made.known and is_numbered(made.known, numbers) else ""
        if made.kind == SAME and not made.drawn and _is_key(pair.eqn.invars[i]):
            why = DRAWN
        found.append(one._replace(kind=UNKNOWN, why=why) if goes and why else one)
    return found


def _is_key(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)


def _at_the_end(made: Made) -> Made:
    """What a loop carried: of all examples that the steps chose one by one."""
    return made._replace(why="") if made.why == CHOSEN else made


def _stacked(made: Made, goes: bool) -> Made:
    """What all steps of a loop made: if each of one example, then of all again.

    Unless it follows from what the steps before found of theirs.
    """
    if goes:
        return Made(OTHER, UNCLEAR, AFTER, made.single)
    orders = made.orders and made.orders.stacked
    return _at_the_end(made)._replace(orders=orders, known=None)


def _is_cut(made: Made, along: Sequence[bool]) -> bool:
    """Whether a loop along the first axis goes from example to example."""
    return made.kind != SAME and bool(along) and along[0]


def _while(pair: Pair, given: Sequence[Made], numbers: Numbers) -> Made | None:
    """What says whether a loop goes on, if that is more than whether any does."""
    one, other = (eqn.params["cond_jaxpr"] for eqn in (pair.eqn, pair.twin))
    carried = _jaxpr.carry(pair.eqn)
    consts: Any = pair.eqn.params["cond_nconsts"]
    (made,) = _results(one, other, [*given[:consts], *given[carried]], numbers)
    return made if made.kind in OF_ALL and made.why else None


def _lost(made: Made, which: Made | None = None) -> Made:
    """Of what nobody knows more, but that something of all may have chosen it."""
    by_all = which is not None and which.kind in OF_ALL and which.why
    why = FOLLOWS if by_all else ""
    return made._replace(kind=UNKNOWN, degree=0, why=why, orders=None, known=None)


def _perhaps(made: Made, which: Made, along: bool) -> Made:
    """Of what a branch made that was taken by what is computed of examples."""
    lost = _lost(made, which)
    if made.kind == WHOLE and along:
        return lost._replace(why=ADDS)
    certain = made.kind in OF_ALL or made.why == DRAWN
    return lost._replace(why=made.why or lost.why) if certain else lost


def _either(cases: Sequence[Made]) -> Made:
    """One of several."""
    known = {made.known for made in cases}
    return joined(cases)._replace(
        single=any(made.single for made in cases),
        orders=merged([*map(_orders, cases)]),
        known=known.pop() if len(known) == 1 else None,
        drawn=any(made.drawn for made in cases),
        numbered=any(made.numbered for made in cases),
        pieced=any(made.pieced for made in cases),
        square=cases[0].square if len(cases) == 1 else None,
    )

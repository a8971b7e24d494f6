"""What comes to the places of other examples: reversed, sorted, taken, written."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from ._made import (
    CHOSEN,
    DRAWN,
    EACH,
    LARGEST,
    MOVED,
    OF_ALL,
    OTHER,
    RANKED,
    SAME,
    UNCLEAR,
    UNKNOWN,
    Made,
)
from ._order import is_placed
from ._pairs import PLACED, Pair

# What puts what lies along an axis in another order, and the parameter that says which.
_MOVES = {
    "approx_top_k": "reduction_dimension",
    "rev": "dimensions",
    "sort": "dimension",
    "top_k": "axis",
}
_T = TypeVar("_T")
# What may leave out some of what was put there.
_CUTS = frozenset(["dynamic_slice", "slice", "split"])


def moved(pair: Pair, operands: Sequence[Made]) -> Made | None:
    """What comes to the places of other examples, or perhaps to its own again.

    None of what stays where it is, and of what more is made of than single examples.
    """
    if pair.name == "sort" and _goes_along(pair) and _goes_by_size(pair, operands):
        return Made(OTHER, UNCLEAR, "puts the examples in the order of their size")
    values, places = parts(pair.name, operands)
    whys = {made.why for made in values if made.kind == UNKNOWN}
    if DRAWN in whys and pair.name in _MOVES and _goes_along(pair):
        return Made(UNKNOWN, why=MOVED)
    if any(made.kind in OF_ALL for made in operands) or whys - {
        "",
        MOVED,
        CHOSEN,
        RANKED,
    }:
        return None
    if pair.name == "rev" and is_placed(values[0].orders):
        return None
    if pair.name in _MOVES and _goes_along(pair):
        if pair.name.endswith("top_k") and not whys and _leaves_out(pair):
            return Made(OTHER, UNCLEAR, LARGEST)
        return Made(UNKNOWN, why=RANKED if whys else MOVED)
    if whys == {MOVED} and pair.name in _CUTS and _leaves_some(pair):
        return Made(UNKNOWN, why=CHOSEN)
    if any(made.why == CHOSEN for made in places) and values[0].kind == EACH:
        return Made(UNKNOWN, why=CHOSEN)
    # As a sort that is turned is, or a rank: of a table both say what is there.
    of_each = any(made.kind == EACH for made in values)
    by = (MOVED, RANKED) if of_each else (MOVED,)
    by_moved = any(made.why in by for made in places)
    if not places or not any(pair.after[0]) or not (whys or by_moved):
        return None
    if whys == {CHOSEN} and all(made.kind == SAME for made in places):
        return Made(UNKNOWN, why=CHOSEN)
    taken = pair.name in PLACED and not whys
    return Made(UNKNOWN, why=MOVED if taken else "")


def _goes_along(pair: Pair) -> bool:
    """Whether what puts something in order does so along the examples."""
    given: Any = pair.eqn.params[_MOVES[pair.name]]
    axes = given if isinstance(given, tuple) else [given]
    return any(pair.before[0][axis] for axis in axes)


def _leaves_some(pair: Pair) -> bool:
    """Whether a cut is along the examples."""
    given: Any = pair.eqn.invars[0].aval
    made: Any = pair.eqn.outvars[0].aval
    lengths = zip(pair.before[0], given.shape, made.shape, strict=True)
    return any(along and before != after for along, before, after in lengths)


def _goes_by_size(pair: Pair, operands: Sequence[Made]) -> bool:
    """Whether numbers are put in order, and nothing beside them."""
    given: Any = pair.eqn.invars[0].aval
    alone = len(operands) == 1 and operands[0].kind not in (SAME, UNKNOWN)
    return alone and jnp.issubdtype(given.dtype, jnp.floating)


def _leaves_out(pair: Pair) -> bool:
    """Whether it takes some of the examples, and not all."""
    axis: Any = pair.eqn.params[_MOVES[pair.name]]
    given: Any = pair.twin.invars[0].aval
    return pair.twin.params["k"] < given.shape[axis]


def parts(name: str, operands: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]]:
    """The values of an equation, and what says where they are or come."""
    if name in PLACED:
        return operands[:1], operands[1:]
    if name == "dynamic_update_slice":
        return operands[:2], operands[2:]
    if name.startswith("scatter"):
        return operands[::2], operands[1:2]
    return operands, ()

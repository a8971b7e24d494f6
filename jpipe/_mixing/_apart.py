"""Whether numbers that are known tell examples apart, as those of places do.

Micro-batches find others: `jnp.arange(n) < n // 2` is the first half of each.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs._primitives import ONE_BY_ONE
from . import _order, _ordered
from ._known import Array, Known, written
from ._order import FREE, NONE, Order, Orders
from ._pairs import Numbers, Pair

# What brings the axes of two operands to the same places.
_MATCHES = {"dot_general": _ordered.matched, "gather": _ordered.placed}


class _Meeting(NamedTuple):
    """What is known of one operand, and the order of another, with axes in common."""

    values: Array
    order: Order


def tells_apart(
    pair: Pair,
    given: Sequence[Known | None],
    orders: Sequence[Orders | None],
    numbers: Numbers,
) -> bool:
    """Whether what is known is not the same at the examples of each micro-batch.

    Args:
      pair: the equation.
      given: what is known of its operands.
      orders: those of its operands; ``None`` where nobody knows.
      numbers: of the examples.
    """
    if not numbers.part or all(given):
        return False
    met = _meetings(pair, given, orders, numbers)
    return any(_differ(each, numbers.part) for each in met)


def _meetings(
    pair: Pair,
    given: Sequence[Known | None],
    orders: Sequence[Orders | None],
    numbers: Numbers,
) -> Iterator[_Meeting]:
    numbered = {i: one for i, one in enumerate(given) if one and one.changes}
    if pair.name.startswith(("scatter", "dynamic_update_slice")):
        into, marks = orders[0], written(pair, given)
        if marks and into and into.are_known:
            yield from map(_Meeting, marks.each, into.each)
    # Such as how many are not padded is of no example: it meets all, as they lie. So
    # does what is no place in the end, as it is not whole.
    free = all(orders[i] is FREE for i, known in enumerate(given) if not known)
    for i, known in numbered.items():
        named = pair.name in ONE_BY_ONE or (pair.name == "gather" and i == 1)
        if (free and named) or (known.is_floating and pair.name not in ONE_BY_ONE):
            yield from _with_all(pair, i, known, numbers)
    placed = {i: one for i, one in enumerate(orders) if one and one.are_known}
    for one, other in itertools.product(numbered.items(), placed.items()):
        yield from _with(pair, one, other)


def _with_all(
    pair: Pair, number: int, known: Known, numbers: Numbers
) -> Iterator[_Meeting]:
    """With as many elements of each example, one after the other along an axis."""
    along = pair.before[number]
    if sum(along) != 1:
        return
    avals: list[Any] = [eqn.invars[number].aval for eqn in (pair.eqn, pair.twin)]
    axis = along.index(True)
    for values, aval, count in zip(known.each, avals, numbers.counts, strict=True):
        yield from _in_order(values, axis, aval.shape[axis], count)


def _in_order(values: Array, axis: int, length: int, count: int) -> Iterator[_Meeting]:
    each, rest = divmod(length, count)
    if not rest:
        order = np.arange(length, dtype=np.int32) // each
        yield _Meeting(values, order.reshape([-1, *[1] * (values.ndim - axis - 1)]))


def takes_apart(pair: Pair, made: Sequence[Orders | None], numbers: Numbers) -> bool:
    """Whether halves of the examples, say, are on their own from now on.

    Args:
      pair: the equation.
      made: the orders of its results.
      numbers: of the examples.
    """
    if pair.name not in _TAKES or numbers.growth == 1:
        return False
    results = zip(made, pair.after, pair.eqn.outvars, pair.twin.outvars, strict=True)
    return any(
        orders is not None
        and orders.are_known
        and not _are_together(orders, along, [var.aval, twin.aval], numbers)
        and (pair.name != "reshape" or _are_beside(orders, along))
        for orders, along, var, twin in results
    )


# What leaves examples out, or puts others beside them; and what makes rows of them, of
# which each may become something else.
_TAKES = frozenset(
    ["concatenate", "dynamic_slice", "gather", "pad", "reshape", "slice", "split"]
)


def _are_together(
    orders: Orders, along: Sequence[bool], avals: Sequence[Any], numbers: Numbers
) -> bool:
    if sum(along) != 1:
        return False
    axis = along.index(True)
    lengths = [aval.shape[axis] for aval in avals]
    return orders.are_in_place(axis, lengths, numbers.counts)


def _are_beside(orders: Orders, along: Sequence[bool]) -> bool:
    """Whether an axis goes from example to example that does not grow with them."""
    lengths = orders.each[0].shape
    return any(n > 1 and not grows for n, grows in zip(lengths, along, strict=True))


def is_numbered(known: Known, numbers: Numbers) -> bool:
    """Whether what is known differs between the steps of a loop along the examples."""
    met = [
        meeting
        for values, count in zip(known.each, numbers.counts, strict=True)
        for meeting in _in_order(values, 0, len(values), count)
    ]
    return bool(numbers.part) and any(_differ(each, numbers.part) for each in met)


def _with(
    pair: Pair, one: tuple[int, Known], other: tuple[int, Orders]
) -> Iterator[_Meeting]:
    """With elements that are of some examples, in both jaxprs."""
    (i, known), (j, orders) = one, other
    if pair.name in ONE_BY_ONE:
        yield from map(_Meeting, known.each, orders.each)
    elif pair.name in _MATCHES:
        both = zip((pair.eqn, pair.twin), known.each, orders.each, strict=True)
        for eqn, values, order in both:
            operands = {i: values, j: order}
            if found := _MATCHES[pair.name](eqn, operands[0], operands[1]):
                yield _Meeting(found[i], found[j])


def _differ(meeting: _Meeting, part: int) -> bool:
    """Whether parts of the examples, one after the other, meet other values."""
    shapes = [array.shape for array in meeting]
    shape = np.broadcast_shapes(*shapes)
    # Along an axis, counted from the last, both change, or all examples meet the same.
    both = any(min(pair) > 1 for pair in zip(*(s[::-1] for s in shapes), strict=False))
    if not both or math.prod(shape) > _order.LARGEST:
        return False
    values, order = (np.broadcast_to(array, shape) for array in meeting)
    placed = order != NONE
    parts, held = order[placed] // part, values[placed]
    _, counts = np.unique(parts, return_counts=True)
    if len(set(counts.tolist())) != 1:
        return False
    rows = held[np.argsort(parts, kind="stable")].reshape(len(counts), -1)
    if np.issubdtype(rows.dtype, np.floating):  # which are rounded
        return not np.allclose(rows, rows[:1], rtol=1e-5, equal_nan=True)
    return bool((rows != rows[:1]).any())

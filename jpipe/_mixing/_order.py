"""Of which example each element of an array is, and where examples come together.

An order is an array of the numbers of examples. It has as many axes as what it tells
of; an axis of length one tells of all places along it, and -1 of an element that is of
none, as far as is known. Where elements of several examples meet, what is made of them
is of a block of examples that follow one another, such as a pair, a half or all: it
has the number of the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Order = np.ndarray[Any, np.dtype[np.int32]]
NONE = -1
# Of more elements nothing is told: it would take seconds.
LARGEST = 1 << 20
COMPARED = "compares examples with one another"
_GROUPED = "takes examples together in groups that grow with their number"


class Met(NamedTuple):
    """What is made of elements that meet.

    Attributes:
      order: that of it: each is of the first example of all that are in it.
      block: of how many examples, that follow one another, are all that meet.
      why: what is amiss if that grows with the number of examples; empty where all
        meet, which may be a mean, say.
      one_of: of how many one is among them, where all are that meet: one, or two if
        they are every second, or as many as there are if they have no such rule.
    """

    order: Order
    block: int = 1
    why: str = ""
    one_of: int = 1


@dataclass(frozen=True, eq=False)
class Orders:
    """Those of a value in two jaxprs of one function.

    Attributes:
      each: in the one with few examples, and in the one with many.
      exact: whether it is certainly made of no other examples.
    """

    each: tuple[Order, Order]
    exact: bool = True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Orders):
            return NotImplemented
        same = all(map(np.array_equal, self.each, other.each))
        return same and self.exact == other.exact

    def __hash__(self) -> int:
        few, many = self.each
        return hash((few.shape, many.shape, few.tobytes()))

    @property
    def are_known(self) -> bool:
        """Whether they tell of any element."""
        return any(map(is_known, self.each))

    @property
    def are_all_known(self) -> bool:
        """Whether all elements are of some example."""
        return all((order != NONE).all() for order in self.each)

    def are_in_place(
        self, axis: int, lengths: Sequence[int], counts: Sequence[int]
    ) -> bool:
        """Whether what is made of parts of the examples is the same parts of it.

        Args:
          axis: the one along which the parts are put together.
          lengths: how long it is in each jaxpr.
          counts: how many examples there are.
        """
        blocks = set[int]()
        for order, length, total in zip(self.each, lengths, counts, strict=True):
            shape = [1] * order.ndim
            shape[axis] = length
            places = np.arange(length, dtype=np.int32) * total // length
            blocks.add(_block(order, places.reshape(shape), total))
        return len(blocks) == 1

    @property
    def inside(self) -> "Orders | None":
        """Of one place along the first axis; None if they change along it."""
        few, many = self.each
        if self is FREE:
            return self
        alike = len(few) == len(many) == 1
        return Orders((few[0], many[0]), self.exact) if alike else None

    @property
    def stacked(self) -> "Orders":
        """Of many arrays, one beside the other along one more axis, the first."""
        few, many = self.each
        return self if self is FREE else Orders((few[None], many[None]), self.exact)


# What is of no example, however many axes it has: only this one, and no other equal.
FREE = Orders((np.array(NONE, np.int32), np.array(NONE, np.int32)))


def is_placed(orders: Orders | None) -> bool:
    """Whether it is known where examples are."""
    return orders is not None and orders.are_known


def natural(ndim: int, axis: int, counts: Sequence[int]) -> Orders:
    """Those of an array with the examples along an axis, one after the other."""
    shape = [1] * ndim
    shape[axis] = -1
    few, *_, many = (np.arange(n, dtype=np.int32).reshape(shape) for n in counts)
    return Orders((few, many))


def merged(cases: Sequence[Orders | None]) -> Orders | None:
    """Those of what is one of several; None where nobody knows."""
    exact = all(case is not None and case.exact for case in cases)
    known = {Orders(case.each, exact) for case in cases if case and case.are_known}
    if len(known) > 1:
        return None
    return known.pop() if known else FREE if exact else None


def none(ndim: int) -> Order:
    """That of an array that is of no example."""
    return np.full([1] * ndim, NONE, np.int32)


def is_known(order: Order) -> bool:
    """Whether it tells of any element."""
    return bool((order != NONE).any())


def met(orders: Sequence[Order], total: int) -> Met:
    """What is made element by element.

    Args:
      orders: of what it is made of.
      total: how many examples there are.
    """
    ndim = max(order.ndim for order in orders)
    one, *others = [order for order in orders if is_known(order)] or [none(ndim)]
    block = 1
    for other in others:
        if other is not one:
            block = math.lcm(block, _block(one, other, total))
            one = np.where(one == NONE, other, one)
    one = one.reshape([1] * (ndim - one.ndim) + list(one.shape))
    return Met(one, block, COMPARED)


def gathered(order: Order, axes: Sequence[int], total: int) -> Met:
    """What is made of all elements along axes, of which one place is left.

    Args:
      order: that of the elements.
      axes: which.
      total: how many examples there are.
    """
    along = tuple(axis for axis in axes if order.shape[axis] > 1)
    if not along:
        return Met(order)
    last = order.max(axis=along, keepdims=True)
    first = np.where(order == NONE, total, order).min(axis=along, keepdims=True)
    first = np.where(last == NONE, NONE, first).astype(np.int32)
    block = _block(first, last, total)
    if block == total and all(_is_one(edge) for edge in (first, last)):
        return Met(none(order.ndim), block, "", _one_of(order, total))
    return Met(first, block, _GROUPED)


def _block(one: Order, other: Order, total: int) -> int:
    """The smallest block of examples that both are of, wherever both are known."""
    apart = (one != other) & (one != NONE) & (other != NONE)
    if not apart.any():
        return 1
    a, b = (np.broadcast_to(order, apart.shape)[apart] for order in (one, other))
    sizes = (size for size in range(2, total) if total % size == 0)
    return next((size for size in sizes if (a // size == b // size).all()), total)


def _is_one(order: Order) -> bool:
    """Whether all elements are of the same example, where it is known."""
    return np.unique(order[order != NONE]).size == 1


def _one_of(order: Order, total: int) -> int:
    """Of how many examples one is there: see `Met`."""
    found = np.unique(order)
    if found[0] == NONE:
        return 1
    for size in range(1, total):
        if total % size == 0:
            shares = np.bincount(found // size, minlength=total // size)
            if (shares == shares[0]).all():
                return size
    return total


def reshaped(order: Order, given: Sequence[int], made: Sequence[int]) -> Order | None:
    """That of an array in another shape; None if that is more than is told."""
    held, axes = list[int](), list[int]()
    for one, other in _runs(given, made):
        varies = any(order.shape[i] > 1 for i in one)
        held += [given[i] if varies else 1 for i in one]
        axes += [made[i] if varies else 1 for i in other]
    if math.prod(held) > LARGEST:
        return None
    return narrow(np.broadcast_to(order, held).reshape(axes))


def _runs(one: Sequence[int], other: Sequence[int]) -> list[tuple[range, range]]:
    """The axes of two shapes in runs that hold as many elements each."""
    runs = list[tuple[range, range]]()
    i = j = 0
    while i < len(one) or j < len(other):
        end, stop = min(i + 1, len(one)), min(j + 1, len(other))
        while (a := math.prod(one[i:end])) != (b := math.prod(other[j:stop])):
            if a < b:
                end += 1
            else:
                stop += 1
        runs.append((range(i, end), range(j, stop)))
        i, j = end, stop
    return runs


def narrow(order: Order) -> Order:
    """One place for all along each axis where it does not change."""
    for axis, length in enumerate(order.shape):
        if length > 1 and (order == (one := order.take([0], axis))).all():
            order = one
    return order

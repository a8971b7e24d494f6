"""Of which example each element is that an equation makes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from .._jaxprs._primitives import ONE_BY_ONE
from . import _order
from ._order import FREE, NONE, Met, Order, Orders
from ._pairs import Numbers, Pair

SOME = "takes some of the examples, and not the others"
_COPIES = frozenset(["convert_element_type", "copy", "copy_p", "name", "stop_gradient"])
# An order, or elements whose axes are as those of one.
Values = np.ndarray[Any, np.dtype[Any]]
# The orders of results; None where nobody knows.
_Moves = Callable[..., Sequence[Order] | None]
_Meets = Callable[[core.JaxprEqn, Sequence[Order], int], Met | None]


def follow(
    pair: Pair, given: Sequence[Orders | None], numbers: Numbers
) -> tuple[list[Orders | None], str]:
    """The orders of what an equation makes that holds no jaxpr.

    Args:
      pair: the equation.
      given: the orders of its operands; ``None`` where nobody knows.
      numbers: of the examples.

    Returns:
      those of each result; and what is amiss if examples come together that are not
      always in one micro-batch, as a pair is: empty if none do, or all.
    """
    unknown: list[Orders | None] = [None] * len(pair.after)
    exact = None not in given
    if not any(orders and orders.are_known for orders in given):
        return [FREE] * len(unknown) if exact else unknown, ""
    counts = numbers.counts
    eqns = zip((pair.eqn, pair.twin), counts, strict=True)
    few, many = (
        _after(eqn, [*map(_of, given, itertools.repeat(i), eqn.invars)], count)
        for i, (eqn, count) in enumerate(eqns)
    )
    both = [*zip(few, many, strict=False)]
    for a, b in both:
        if a.one_of != b.one_of or (numbers.part and numbers.part % a.one_of):
            return unknown, SOME
        apart = a.block == b.block and numbers.part % a.block == 0
        if not apart and (why := a.why or b.why):
            return unknown, why
    nothing = FREE if exact else None
    orders = [Orders((a.order, b.order), exact) for a, b in both]
    known = [each if each.are_known else nothing for each in orders]
    return known * len(unknown) if len(known) == 1 else known or unknown, ""


def _of(orders: Orders | None, number: int, atom: Any) -> Order:
    """That of an operand, in the first jaxpr or in the second."""
    if orders is None or orders is FREE:
        return _order.none(len(_shape(atom)))
    return orders.each[number]


def _shape(atom: Any) -> Sequence[int]:
    return getattr(atom.aval, "shape", ())


def _after(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> list[Met]:
    """What an equation makes of as many examples in all; nothing if nobody knows.

    One of all results, or one of each.
    """
    name = eqn.primitive.name
    if any(0 in _shape(atom) for atom in (*eqn.invars, *eqn.outvars)):
        return []
    if name in MOVES:
        found = [Met(order) for order in MOVES[name](eqn, *given) or ()]
    else:
        meets = _meets(name)
        made = meets and meets(eqn, given, total)
        found = [made] if made else []
    small = all(met.order.size <= _order.LARGEST for met in found)
    return found if small else []


def _meets(name: str) -> _Meets | None:
    if name in ONE_BY_ONE or name in _COPIES:
        return _joined
    reduces = name.startswith(("reduce_", "arg"))
    return _MEETS.get(name, _reduced if reduces else None)


def _transposed(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    return [order.transpose(eqn.params["permutation"])]


def _squeezed(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    return [np.squeeze(order, tuple(eqn.params["dimensions"]))]


def _reversed(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    return [np.flip(order, tuple(eqn.params["dimensions"]))]


def _broadcast(eqn: core.JaxprEqn, order: Order, *sizes: Order) -> Sequence[Order]:
    to = dict(enumerate(eqn.params["broadcast_dimensions"]))
    return [_placed(order, to, len(eqn.params["shape"]))]


def _placed(order: Order, to: dict[int, int], ndim: int) -> Order:
    """The same with its axes in the places of others, and one along all beside."""
    axes = sorted(to, key=lambda axis: to[axis])
    left = [axis for axis in range(order.ndim) if axis not in to]
    sizes = [1] * ndim
    for axis in axes:
        sizes[to[axis]] = order.shape[axis]
    return order.transpose([*axes, *left]).reshape(sizes)


def _reshaped(eqn: core.JaxprEqn, order: Order) -> Sequence[Order] | None:
    given: Any = eqn.invars[0].aval
    if eqn.params["dimensions"] is not None:
        return None
    made = _order.reshaped(order, given.shape, eqn.params["new_sizes"])
    return None if made is None else [made]


def _tiled(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    times = zip(eqn.params["reps"], order.shape, strict=True)
    return [np.tile(order, [n if length > 1 else 1 for n, length in times])]


def _sliced(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    params: Any = eqn.params
    strides = params["strides"] or itertools.repeat(1)
    cuts = map(slice, params["start_indices"], params["limit_indices"], strides)
    lengths = zip(order.shape, cuts, strict=False)
    return [order[tuple(cut if length > 1 else slice(1) for length, cut in lengths)]]


def _split(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    axis: Any = eqn.params["axis"]
    sizes: Any = eqn.params["sizes"]
    if order.shape[axis] == 1:
        return [order]
    return np.split(order, np.cumsum(sizes)[:-1], axis)


def _concatenated(eqn: core.JaxprEqn, *orders: Order) -> Sequence[Order] | None:
    axis: Any = eqn.params["dimension"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return _beside(orders, [aval.shape[axis] for aval in avals], axis)


def _stacked(eqn: core.JaxprEqn, *orders: Order) -> Sequence[Order] | None:
    axis: Any = eqn.params["axis"]
    each = [np.expand_dims(order, axis) for order in orders]
    return _beside(each, [1] * len(each), axis)


def _beside(
    orders: Sequence[Order], lengths: Sequence[int], axis: int
) -> Sequence[Order] | None:
    """Arrays one after the other along an axis, of which they have such lengths."""
    shape = np.max([order.shape for order in orders], axis=0)
    shape[axis] = 1
    if math.prod(shape) * sum(lengths) > _order.LARGEST:
        return None
    parts = []
    for order, length in zip(orders, lengths, strict=True):
        shape[axis] = length
        parts.append(np.broadcast_to(order, shape))
    return [_order.narrow(np.concatenate(parts, axis))]


def _unstacked(eqn: core.JaxprEqn, order: Order) -> Sequence[Order]:
    axis: Any = eqn.params["axis"]
    return [*np.moveaxis(order, axis, 0)]


def _padded(eqn: core.JaxprEqn, order: Order, value: Order) -> Sequence[Order] | None:
    config: Any = eqn.params["padding_config"]
    edges = [
        edges if length > 1 else (0, 0, 0)
        for length, edges in zip(order.shape, config, strict=True)
    ]
    if any(between or min(ends) < 0 for *ends, between in edges):
        return None
    padding = [ends for *ends, _ in edges]
    return [np.pad(order, padding, constant_values=NONE)]


def _convolved(
    eqn: core.JaxprEqn, order: Order, kernel: Order
) -> Sequence[Order] | None:
    numbers: Any = eqn.params["dimension_numbers"]
    batch = numbers.lhs_spec[0]
    if _order.is_known(kernel) or order.size != order.shape[batch]:
        return None
    return [_placed(order, {batch: numbers.out_spec[0]}, order.ndim)]


def _pooled(eqn: core.JaxprEqn, order: Order) -> Sequence[Order] | None:
    """In windows of one along the axes where the order changes."""
    given, made = _lengths(eqn)
    lengths = zip(
        order.shape, eqn.params["window_dimensions"], given, made, strict=True
    )
    changed = any(n > 1 and (size > 1 or a != b) for n, size, a, b in lengths)
    return None if changed else [order]


def _cut(eqn: core.JaxprEqn, order: Order, *places: Order) -> Sequence[Order] | None:
    """Whole along the axes where the order changes, from places that are computed."""
    lengths = zip(order.shape, *_lengths(eqn), strict=True)
    return None if any(n > 1 and a != b for n, a, b in lengths) else [order]


def _lengths(eqn: core.JaxprEqn) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of the first operand, and that of the first result."""
    avals: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    return avals[0].shape, avals[1].shape


def _joined(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met:
    return _order.met(given, total)


def _reduced(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met:
    axes = tuple(eqn.params["axes"])
    found = _order.gathered(given[0], axes, total)
    return found._replace(order=np.squeeze(found.order, axes))


def _written(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met | None:
    """What stays of an operand, and what is written in it, of all examples at once."""
    operand, *rest = given
    if eqn.primitive.name == "dynamic_update_slice":
        number, to = 1, dict(enumerate(range(operand.ndim)))
    else:
        numbers: Any = eqn.params["dimension_numbers"]
        left = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        inside = [axis for axis in range(operand.ndim) if axis not in left]
        number, to = 2, dict(zip(numbers.update_window_dims, inside, strict=True))
    update, new = rest[number - 1], _shape(eqn.invars[number])
    if any(n > 1 and axis not in to for axis, n in enumerate(update.shape)):
        return None
    whole = {to[axis]: length for axis, length in enumerate(new) if axis in to}
    update = _placed(update, to, operand.ndim)
    for axis, length in enumerate(_shape(eqn.invars[0])):
        changes = operand.shape[axis] > 1 or update.shape[axis] > 1
        if changes and whole.get(axis) != length:
            return None
    return _order.met([operand, update], total)


def _along(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met | None:
    """What is sorted, chosen or added up along an axis where no order changes."""
    names = ("axis", "dimension", "reduction_dimension")
    axis: Any = next(eqn.params[name] for name in names if name in eqn.params)
    changes = any(order.shape[axis] > 1 for order in given)
    return None if changes else _order.met(given, total)


def _multiplied(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met | None:
    """A product of matrices: one of elements, added up along what is contracted."""
    first, second = matched(eqn, *given)
    if math.prod(np.broadcast_shapes(first.shape, second.shape)) > _order.LARGEST:
        return None
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    inner = tuple(range(len(batch), len(batch) + len(contracted)))
    product = _order.met([first, second], total)
    found = _order.gathered(product.order, inner, total)
    if product.block > found.block:
        found = product._replace(order=found.order)
    return found._replace(order=np.squeeze(found.order, inner))


def matched(eqn: core.JaxprEqn, first: Values, second: Values) -> tuple[Values, Values]:
    """The operands of a product of matrices, with axes that say which meet.

    They are those of the batch, what is contracted, those of one, those of the other.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    first, second = (
        values.transpose(
            [
                *batch,
                *inner,
                *(i for i in range(values.ndim) if i not in (*batch, *inner)),
            ]
        )
        for values, inner, batch in zip(
            (first, second), contracted, batched, strict=True
        )
    )
    shared = len(batched[0]) + len(contracted[0])
    beside = [1] * (first.ndim - shared)
    first = first.reshape([*first.shape, *[1] * (second.ndim - shared)])
    return first, second.reshape(
        [*second.shape[:shared], *beside, *second.shape[shared:]]
    )


def _taken(eqn: core.JaxprEqn, given: Sequence[Order], total: int) -> Met | None:
    """What is taken at places: of their examples, and of those of the operand."""
    found = placed(eqn, *given)
    if not found:
        return None
    operand, places = found
    last = places.ndim - 1
    places = _order.gathered(places, [last], total).order
    return _order.met([np.squeeze(each, last) for each in (operand, places)], total)


def placed(
    eqn: core.JaxprEqn, operand: Values, places: Values
) -> tuple[Values, Values] | None:
    """The operands of a gather, with the axes of its result and one of coordinates.

    None if the places say where along an axis on which the operand changes.
    """
    numbers: Any = eqn.params["dimension_numbers"]
    sizes: Any = eqn.params["slice_sizes"]
    before, after = _lengths(eqn)
    batching = numbers.operand_batching_dims
    outer = [i for i in range(len(after)) if i not in numbers.offset_dims]
    inner = {*range(len(before))} - {*numbers.collapsed_slice_dims, *batching}
    to = dict(zip(sorted(inner), numbers.offset_dims, strict=True))
    for axis, place in zip(batching, numbers.start_indices_batching_dims, strict=True):
        to[axis] = outer[place]
    changing = [axis for axis, length in enumerate(operand.shape) if length > 1]
    if not all(i in batching or (i in to and sizes[i] == before[i]) for i in changing):
        return None
    ndim = len(after) + 1
    return _placed(operand, to, ndim), _placed(
        places, dict(enumerate([*outer, ndim - 1])), ndim
    )


MOVES: dict[str, _Moves] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "dynamic_slice": _cut,
    "pad": _padded,
    "reduce_window_max": _pooled,
    "reduce_window_min": _pooled,
    "reduce_window_sum": _pooled,
    "reshape": _reshaped,
    "rev": _reversed,
    "slice": _sliced,
    "split": _split,
    "squeeze": _squeezed,
    "stack": _stacked,
    "tile": _tiled,
    "transpose": _transposed,
    "unstack": _unstacked,
}
_MEETS: dict[str, _Meets] = {
    "approx_top_k": _along,
    "cumlogsumexp": _along,
    "cummax": _along,
    "cummin": _along,
    "cumprod": _along,
    "cumsum": _along,
    "dot_general": _multiplied,
    "dynamic_update_slice": _written,
    "gather": _taken,
    "scatter": _written,
    "scatter-add": _written,
    "sort": _along,
    "top_k": _along,
}

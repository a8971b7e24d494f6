"""Numbers that follow from how many examples there are, and tell one from another.

Such as places in a batch, `jnp.arange(n)`, and what is computed of them: those of a
micro-batch begin anew.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from . import _order, _ordered
from ._order import NONE, Order, Orders
from ._pairs import PLACED, Pair

# What is computed by JAX, or fetched from a device, is no longer than this.
_FEW = 1 << 16
# Of more it is not looked whether all are the same.
_LARGEST = 1 << 26
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Known:
    """The elements of a value in two jaxprs of one function.

    Attributes:
      each: in the one with few examples, and in the one with many; an axis of length
        one stands for all places along it, as in an order.
    """

    each: tuple[Array, Array]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Known):
            return NotImplemented
        pairs = zip(self.each, other.each, strict=True)
        return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        few, many = self.each
        return hash((few.shape, many.shape, few.tobytes()))

    @property
    def is_floating(self) -> bool:
        """Whether it is of no whole numbers, and thus no place."""
        return np.issubdtype(self.each[0].dtype, np.floating)

    def is_below(self, size: float) -> bool:
        """Whether all of it is less than a number, beside its sign."""
        return all(bool((np.abs(values) < size).all()) for values in self.each)

    @property
    def changes(self) -> bool:
        """Whether it is not everywhere the same."""
        return any(values.size > 1 for values in self.each)


def constant(one: Any, other: Any) -> Known | None:
    """What two jaxprs hold in one place, if it is not too much."""
    few, many = map(_fetched, (one, other))
    return None if few is None or many is None else Known((few, many))


def _fetched(held: Any) -> Array | None:
    if isinstance(held, jax.Array):
        there = not isinstance(held, Tracer) and held.is_fully_addressable
        is_key = jnp.issubdtype(held.dtype, jax.dtypes.extended)
        if not there or is_key or held.size > _FEW:
            return None
        held = jax.device_get(held)
    array = np.asarray(held)
    if array.dtype == object or array.size > _LARGEST:
        return None
    array = _order.narrow(array)
    return array if array.size <= _order.LARGEST else None


def computed(pair: Pair, given: Sequence[Known | None]) -> list[Known | None]:
    """What an equation that holds no jaxpr makes of what is known."""
    known = [one for one in given if one]
    if len(known) == len(given) and (known or pair.name == "iota"):
        each = [
            _evaluated(eqn, [one.each[i] for one in known])
            for i, eqn in enumerate((pair.eqn, pair.twin))
        ]
        if all(each):
            return [Known(both) for both in zip(*each, strict=True)]
    return [None] * len(pair.after)


def _evaluated(eqn: core.JaxprEqn, given: Sequence[Array]) -> Sequence[Array]:
    """The results of an equation; none where that is too much, or not known how."""
    name = eqn.primitive.name
    if name in _ONE_BY_ONE:
        shapes = [x.shape for x in given]
        if math.prod(np.broadcast_shapes(*shapes)) > _order.LARGEST:
            return ()
        made: Any = eqn.outvars[0].aval
        with np.errstate(all="ignore"):
            found = _ONE_BY_ONE[name](*given)
        return [np.asarray(found).astype(made.dtype)]
    if name in _COPIES:
        made = eqn.outvars[0].aval
        return [given[0].astype(made.dtype)]
    if name == "iota":
        return [_counted(eqn.params)]
    if name in _SHAPED:
        return _ordered.MOVES[name](eqn, *given) or ()
    return _bound(eqn, given) if name in _BOUND else ()


def _counted(params: Mapping[str, Any]) -> Array:
    shape, axis = params["shape"], params["dimension"]
    places = np.arange(shape[axis]).astype(params["dtype"])
    return places.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _bound(
    eqn: core.JaxprEqn, given: Sequence[Array], **others: Any
) -> Sequence[Array]:
    """As JAX computes it, of a few numbers, with some parameters that are others."""
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if any(math.prod(aval.shape) > _FEW for aval in avals):
        return ()
    operands = [
        np.broadcast_to(x, aval.shape) for x, aval in zip(given, avals, strict=False)
    ]
    with jax.transfer_guard("allow"):
        found = eqn.primitive.bind(*operands, **{**eqn.params, **others})
        results = found if eqn.primitive.multiple_results else [found]
        return [_order.narrow(np.asarray(x)) for x in results]


def taken(
    pair: Pair, given: Sequence[Known | None], orders: Sequence[Orders | None]
) -> Orders | None:
    """The order of what is taken at places that are known.

    As the same is taken of the numbers of examples.

    Args:
      pair: the equation.
      given: what is known of its operands.
      orders: those of its operands.
    """
    if pair.name not in PLACED or not all(given[1:]):
        return None
    value, known = orders[0], [one for one in given[1:] if one]
    if value is None or not value.are_known:
        return None
    others = {"fill_value": NONE} if pair.name == "gather" else {}
    both = list[Order]()
    for i, eqn in enumerate((pair.eqn, pair.twin)):
        operands = [value.each[i], *(one.each[i] for one in known)]
        both += [np.maximum(x, NONE) for x in _bound(eqn, operands, **others)]
    return Orders((both[0], both[1]), value.exact) if len(both) > 1 else None


def written(pair: Pair, given: Sequence[Known | None]) -> Known | None:
    """Where an operand is written to, at places that are known: one there, else zero.

    Args:
      pair: the equation.
      given: what is known of its operands.
    """
    new = 1 if pair.name == "dynamic_update_slice" else 2
    places = [known for i, known in enumerate(given) if known and i not in (0, new)]
    if len(places) < len(given) - 2:
        return None
    marks = list[Array]()
    for which, eqn in enumerate((pair.eqn, pair.twin)):
        avals: list[Any] = [atom.aval for atom in eqn.invars]
        shapes = [aval.shape for aval in avals]
        if any(math.prod(shape) > _FEW for shape in shapes):
            return None
        at = [known.each[which] for known in places]
        with jax.transfer_guard("allow"):
            marks.append(np.asarray(_marked(eqn, shapes, new, at)))
    return Known((marks[0], marks[1]))


def _marked(
    eqn: core.JaxprEqn, shapes: Sequence[Any], new: int, at: Sequence[Array]
) -> jax.Array:
    operand, update = np.zeros(shapes[0], np.int32), np.ones(shapes[new], np.int32)
    if eqn.primitive.name == "dynamic_update_slice":
        return jax.lax.dynamic_update_slice(operand, update, at)
    places = np.broadcast_to(at[0], shapes[1])
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    return jax.lax.scatter(operand, places, update, numbers, mode=mode)


def _quotient(a: Array, b: Array) -> Array:
    """As JAX divides: whole numbers towards zero."""
    if not np.issubdtype(a.dtype, np.integer):
        return a / b
    return np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))


def _selected(which: Array, *cases: Array) -> Array:
    return np.choose(which.astype(np.int32), cases)


def _clamped(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


_ONE_BY_ONE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "clamp": _clamped,
    "cos": np.cos,
    "div": _quotient,
    "eq": np.equal,
    "exp": np.exp,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": np.fmod,
    "select_n": _selected,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
_OF_COPIES = "convert_element_type copy copy_p name stop_gradient"
_OF_SHAPES = """
    broadcast_in_dim concatenate reshape rev slice split squeeze stack tile transpose
    unstack
"""
_OF_JAX = """
    acos acosh argmax argmin asin asinh atan atan2 atanh cbrt cosh cummax cummin cumprod
    cumsum dynamic_slice dynamic_update_slice erf erf_inv erfc exp2 expm1 gather
    integer_pow is_finite log1p logistic pad reduce_max reduce_min reduce_prod
    reduce_sum round rsqrt scatter scatter-add sinh sort tan tanh
"""
_COPIES = frozenset(_OF_COPIES.split())
_SHAPED = frozenset(_OF_SHAPES.split())
_BOUND = frozenset(_OF_JAX.split())

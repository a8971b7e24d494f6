"""Axes that equations keep: slices of a result that follow from slices of an operand.

    y = f(x)  and  y[:, i:j] = f(x[i:j])        axis 0 of x is axis 1 of y

An axis map says so for one operand of an equation. It is read in both directions: from
arrays that are in pieces to what is computed from them, and from what a loop goes along
to the parameters that it follows from. A slice of the result may have more rows, or
fewer, than that of the operand: a reshape divides or joins axes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from ._primitives import ELEMENTWISE

# axis of an operand -> axis of the result
AxisMap = Mapping[int, int]

# The result has the shape of each operand, but for operands of one element.
_SAME_SHAPE = ELEMENTWISE | frozenset(
    [
        "bitcast_convert_type",
        "convert_element_type",
        "copy",
        "copy_p",
        "device_put",
        "name",
        "reduce_precision",
        "stop_gradient",
    ]
)


def axis_map(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    """Maps each axis of an operand, along whose slices a result can be computed.

    It is mapped to the axis of the only result along which its slices then are.
    """
    if len(eqn.outvars) != 1:
        return {}
    name = eqn.primitive.name
    shape = shape_of(eqn.invars[operand_index])
    result_shape = shape_of(eqn.outvars[0])
    if name in _SAME_SHAPE:
        if len(shape) != len(result_shape):
            return {}
        axes = range(len(shape))
        return {a: a for a in axes if shape[a] == result_shape[a]}
    if name not in _MAPS:
        return {}
    return _MAPS[name](eqn, operand_index)


def source_axis(eqn: core.JaxprEqn, operand_index: int, result_axis: int) -> int | None:
    """The axis of an operand that becomes an axis of the result, if there is one."""
    for axis, mapped in axis_map(eqn, operand_index).items():
        if mapped == result_axis:
            return axis
    return None


def can_resize(eqn: core.JaxprEqn, result_axis: int) -> bool:
    """True if an equation on slices of its operands gives a slice of its result."""
    if eqn.primitive.name == "broadcast_in_dim":
        return True
    indices = range(len(eqn.invars))
    return any(source_axis(eqn, i, result_axis) is not None for i in indices)


def resize(eqn: core.JaxprEqn, axis: int, size: int) -> dict[str, Any]:
    """The parameters of an equation whose result has another size along an axis."""
    name = {
        "broadcast_in_dim": "shape",
        "dynamic_slice": "slice_sizes",
        "reshape": "new_sizes",
        "slice": "limit_indices",
    }.get(eqn.primitive.name)
    if name is None:
        return dict(eqn.params)
    old: Any = eqn.params[name]
    return {**eqn.params, name: with_size(old, axis, size)}


def with_size(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size along an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return atom.aval.shape


# --------------------------------------------------------- maps of single primitives


def _transpose(eqn: core.JaxprEqn, _: int) -> AxisMap:
    permutation: Any = eqn.params["permutation"]
    return {int(axis): i for i, axis in enumerate(permutation)}


def _broadcast(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    if operand_index > 0:
        return {}
    result_axes: Any = eqn.params["broadcast_dimensions"]
    shape = shape_of(eqn.invars[0])
    result_shape = shape_of(eqn.outvars[0])
    return {
        a: int(result_axes[a])
        for a in range(len(shape))
        if shape[a] == result_shape[result_axes[a]]
    }


def _without(ndim: int, removed: Iterable[int]) -> AxisMap:
    """The map of axes that stay if others are removed."""
    gone = {*removed}
    kept = [axis for axis in range(ndim) if axis not in gone]
    return {axis: i for i, axis in enumerate(kept)}


def _reduce(eqn: core.JaxprEqn, _: int) -> AxisMap:
    axes: Any = eqn.params["axes"]
    return _without(len(shape_of(eqn.invars[0])), axes)


def _squeeze(eqn: core.JaxprEqn, _: int) -> AxisMap:
    dimensions: Any = eqn.params["dimensions"]
    return _without(len(shape_of(eqn.invars[0])), dimensions)


def _reshape(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    """Axes with as many elements before them, and as many from them on, as one before.

    Such an axis of the result may be longer, as further axes are joined to it, or
    shorter, as it is divided.
    """
    if operand_index > 0 or eqn.params["dimensions"] is not None:
        return {}
    shape = shape_of(eqn.invars[0])
    new_shape = shape_of(eqn.outvars[0])
    axis_of_prefix = {
        math.prod(new_shape[:a]): a for a in range(len(new_shape)) if new_shape[a] > 1
    }
    axes: dict[int, int] = {}
    for a, size in enumerate(shape):
        prefix = math.prod(shape[:a])
        if size > 1 and prefix in axis_of_prefix:
            axes[a] = axis_of_prefix[prefix]
    return axes


def _is_whole(start: int, size: int, length: int) -> bool:
    return start == 0 and size == length


def _slice(eqn: core.JaxprEqn, _: int) -> AxisMap:
    params: Any = eqn.params
    shape = shape_of(eqn.invars[0])
    strides = params["strides"] or [1] * len(shape)
    axes: dict[int, int] = {}
    for a, length in enumerate(shape):
        start = params["start_indices"][a]
        size = params["limit_indices"][a] - start
        if _is_whole(start, size, length) and strides[a] == 1:
            axes[a] = a
    return axes


def _dynamic_slice(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    if operand_index > 0:
        return {}
    slice_sizes: Any = eqn.params["slice_sizes"]
    shape = shape_of(eqn.invars[0])
    # Where all is read, a start is clamped to 0.
    return {a: a for a in range(len(shape)) if slice_sizes[a] == shape[a]}


def _concatenate(eqn: core.JaxprEqn, _: int) -> AxisMap:
    joined = eqn.params["dimension"]
    return {a: a for a in range(len(shape_of(eqn.outvars[0]))) if a != joined}


def _stack(eqn: core.JaxprEqn, _: int) -> AxisMap:
    new_axis: Any = eqn.params["axis"]
    axes = range(len(shape_of(eqn.invars[0])))
    return {a: a + (a >= new_axis) for a in axes}


def _dot_general(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    """The result has the batch axes, then the free ones of each operand in order."""
    params: Any = eqn.params
    contracted, batch = params["dimension_numbers"]
    axes = {int(axis): i for i, axis in enumerate(batch[operand_index])}
    first_free = len(batch[0])
    for i in range(operand_index + 1):
        used = {*contracted[i], *batch[i]}
        free = [a for a in range(len(shape_of(eqn.invars[i]))) if a not in used]
        if i == operand_index:
            axes |= {axis: first_free + k for k, axis in enumerate(free)}
        first_free += len(free)
    return axes


def _sort_or_scan(eqn: core.JaxprEqn, _: int) -> AxisMap:
    """Equations that mix the elements of one axis and keep all others."""
    params: Any = eqn.params
    mixed = params["axis"] if "axis" in params else params["dimension"]
    return {a: a for a in range(len(shape_of(eqn.invars[0]))) if a != mixed}


def _unwrap_keys(eqn: core.JaxprEqn, _: int) -> AxisMap:
    """The first axes of the result are those of an array of keys."""
    return {a: a for a in range(len(shape_of(eqn.invars[0])))}


def _draw(eqn: core.JaxprEqn, operand_index: int) -> AxisMap:
    """The first axes of the result are those of an array of keys, if these are apart.

    Keys of threefry are. From an array of keys of ``impl="rbg"``, JAX draws all numbers
    by the first key: a slice of the keys would draw others.
    """
    keys: Any = eqn.invars[0]
    if keys.aval.dtype != _dtype_of_threefry_keys():
        return {}
    shape = shape_of(eqn.invars[operand_index])
    result_shape = shape_of(eqn.outvars[0])
    return {a: a for a, size in enumerate(shape) if size == result_shape[a]}


@functools.cache
def _dtype_of_threefry_keys() -> Any:
    make_key = functools.partial(jax.random.key, 0, impl="threefry2x32")
    return jax.eval_shape(make_key).dtype


_MAPS: dict[str, Callable[[core.JaxprEqn, int], AxisMap]] = {
    "argmax": _reduce,
    "argmin": _reduce,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "cumlogsumexp": _sort_or_scan,
    "cummax": _sort_or_scan,
    "cummin": _sort_or_scan,
    "cumprod": _sort_or_scan,
    "cumsum": _sort_or_scan,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "random_bits": _draw,
    "random_fold_in": _draw,
    "random_unwrap": _unwrap_keys,
    "reduce_and": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_or": _reduce,
    "reduce_prod": _reduce,
    "reduce_sum": _reduce,
    "reshape": _reshape,
    "slice": _slice,
    "sort": _sort_or_scan,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
}

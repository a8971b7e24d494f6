"""Axes that equations keep: slices of results that follow from slices of operands.

    y = f(x)  and  y[:, i:j] = f(x[i:j])        axis 0 of x is axis 1 of y

An axis map says so for an equation and one axis of it. It is read in both directions:
from arrays that are in pieces to what is computed from them, and from what a loop goes
along to the parameters that it follows from. A slice of a result may have more rows, or
fewer, than that of the operand: a reshape divides or joins axes.

JAX's rules of `jax.vmap` go the other way, from an operation on a row to the one on a
stack: to ask them, one needs the parameters of the operation on a row, and a table that
has them is this one. So the operations are listed, by class:

    all axes but some     element by element, reductions, sorts, slices, matrices
    axes that move        transpose, broadcast, reshape, stack, products
    axes that are named   gather, scatter
    the first axes        arrays of keys
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ._primitives import ELEMENTWISE


class AxisMap(NamedTuple):
    """An axis along which slices of all results follow from slices of operands.

    Attributes:
      operands: the axis of each operand; ``None``: each slice follows from all of it.
      results: the axis of each result.
    """

    operands: tuple[int | None, ...]
    results: tuple[int, ...]


def map_operand_axis(
    eqn: core.JaxprEqn, operand_index: int, axis: int
) -> AxisMap | None:
    """The map of an axis of an operand; ``None`` if slices along it are not kept."""
    for axis_map in _axis_maps(eqn):
        if axis_map.operands[operand_index] == axis:
            return axis_map
    return None


def map_result_axis(eqn: core.JaxprEqn, result_index: int, axis: int) -> AxisMap | None:
    """The map of an axis of a result; ``None`` if its slices follow from no slices."""
    for axis_map in _axis_maps(eqn):
        if axis_map.results[result_index] == axis:
            return axis_map
    return None


def resize(eqn: core.JaxprEqn, axis_map: AxisMap, size: int) -> dict[str, Any]:
    """The parameters of an equation whose results have another size along an axis."""
    name = _SIZES.get(eqn.primitive.name)
    axis: int | None = axis_map.results[0]
    if eqn.primitive.name == "gather":
        axis = axis_map.operands[0]
        if axis in _dimension_numbers(eqn).operand_batching_dims:
            return dict(eqn.params)  # of each batch there is one row
    if name is None or axis is None:
        return dict(eqn.params)
    old: Any = eqn.params[name]
    return {**eqn.params, name: with_size(old, axis, size)}


# primitive -> its parameter that has a size for each axis of the result
_SIZES = {
    "broadcast_in_dim": "shape",
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}


def with_size(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size along an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return atom.aval.shape


def _axis_maps(eqn: core.JaxprEqn) -> list[AxisMap]:
    name = eqn.primitive.name
    if name in _SAME_SHAPE:
        return _map_same_shape(eqn)
    if name in _MIXED_AXES:
        return _map_others(eqn, _MIXED_AXES[name](eqn))
    return _MAPS[name](eqn) if name in _MAPS else []


# ----------------------------------------------------------------- all axes but some


def _map_same_shape(eqn: core.JaxprEqn) -> list[AxisMap]:
    """The maps of all axes; operands of one element along an axis are repeated."""
    shapes = [shape_of(atom) for atom in eqn.invars]
    result_shape = shape_of(eqn.outvars[0])
    maps = list[AxisMap]()
    for axis, length in enumerate(result_shape):
        has_axis = [
            len(shape) == len(result_shape) and shape[axis] == length
            for shape in shapes
        ]
        operands = tuple(axis if is_kept else None for is_kept in has_axis)
        if any(has_axis):
            maps.append(AxisMap(operands, (axis,)))
    return maps


def _map_others(eqn: core.JaxprEqn, mixed: Collection[int]) -> list[AxisMap]:
    """The maps of all axes but those whose elements an equation mixes.

    Operands of fewer axes, such as scalars, are read whole where they have no such
    axis. A result may have lost the axes that are mixed.
    """
    shapes = [shape_of(atom) for atom in eqn.invars]
    result_shapes = [shape_of(var) for var in eqn.outvars]
    largest = max(shapes, key=len, default=())
    maps = list[AxisMap]()
    for axis, length in enumerate(largest):
        num_before = sum(a < axis for a in mixed)
        operands = tuple(axis if axis < len(shape) else None for shape in shapes)
        results = tuple(
            axis if len(shape) == len(largest) else axis - num_before
            for shape in result_shapes
        )
        sizes = [
            shape[a] for shape, a in zip(shapes, operands, strict=True) if a is not None
        ]
        sizes += [
            shape[a] if a < len(shape) else None
            for shape, a in zip(result_shapes, results, strict=True)
        ]
        if axis not in mixed and set(sizes) == {length}:
            maps.append(AxisMap(operands, results))
    return maps


def _axes_in(param: str) -> Callable[[core.JaxprEqn], Collection[int]]:
    """The axes that a parameter names."""

    def read_axes(eqn: core.JaxprEqn) -> Collection[int]:
        axes: Any = eqn.params[param]
        return {*axes} if isinstance(axes, Sequence) else {axes}

    return read_axes


def _last_axes(count: int) -> Callable[[core.JaxprEqn], Collection[int]]:
    """The last axes, so many: those of matrices, or of vectors."""

    def read_axes(eqn: core.JaxprEqn) -> Collection[int]:
        ndim = max(len(shape_of(atom)) for atom in eqn.invars)
        return range(ndim - count, ndim)

    return read_axes


def _transformed_axes(eqn: core.JaxprEqn) -> Collection[int]:
    lengths: Any = eqn.params["fft_lengths"]
    return _last_axes(len(lengths))(eqn)


def _sliced_axes(eqn: core.JaxprEqn) -> Collection[int]:
    params: Any = eqn.params
    shape = shape_of(eqn.invars[0])
    strides = params["strides"] or [1] * len(shape)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return {a for a, x in enumerate(bounds) if x != (0, shape[a], 1)}


def _padded_axes(eqn: core.JaxprEqn) -> Collection[int]:
    params: Any = eqn.params
    return {a for a, x in enumerate(params["padding_config"]) if tuple(x) != (0, 0, 0)}


def _repeated_axes(eqn: core.JaxprEqn) -> Collection[int]:
    params: Any = eqn.params
    return {a for a, count in enumerate(params["reps"]) if count != 1}


def _windowed_axes(eqn: core.JaxprEqn) -> Collection[int]:
    params: Any = eqn.params
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    columns = [params[name] for name in names]
    columns.append([1 + low + high for low, high in params["padding"]])
    return {a for a, sizes in enumerate(zip(*columns, strict=True)) if {*sizes} != {1}}


def _nothing(_: core.JaxprEqn) -> Collection[int]:
    """Axes of which only a part is read, or written, have another size there.

    Where all is read a start is clamped to 0.
    """
    return ()


# The result has the shape of each operand, but where that has one element.
_SAME_SHAPE = ELEMENTWISE | frozenset(
    [
        "bitcast_convert_type",
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "device_put",
        "reduce_precision",
        "stop_gradient",
    ]
)

# primitive -> the axes whose elements it mixes
_MIXED_AXES: dict[str, Callable[[core.JaxprEqn], Collection[int]]] = {
    **dict.fromkeys(
        [
            "argmax",
            "argmin",
            "reduce_and",
            "reduce_max",
            "reduce_min",
            "reduce_or",
            "reduce_prod",
            "reduce_sum",
            "reduce_xor",
        ],
        _axes_in("axes"),
    ),
    **dict.fromkeys(
        [
            "cumlogsumexp",
            "cummax",
            "cummin",
            "cumprod",
            "cumsum",
            "split",
            "top_k",
            "unstack",
        ],
        _axes_in("axis"),
    ),
    **dict.fromkeys(["concatenate", "sort"], _axes_in("dimension")),
    **dict.fromkeys(["rev", "squeeze"], _axes_in("dimensions")),
    **dict.fromkeys(
        [
            "cholesky",
            "eig",
            "eigh",
            "geqrf",
            "hessenberg",
            "householder_product",
            "lu",
            "qr",
            "schur",
            "svd",
            "triangular_solve",
            "tridiagonal",
            "tridiagonal_solve",
        ],
        _last_axes(2),
    ),
    "lu_pivots_to_permutation": _last_axes(1),
    "fft": _transformed_axes,
    "slice": _sliced_axes,
    "pad": _padded_axes,
    "tile": _repeated_axes,
    "dynamic_slice": _nothing,
    "dynamic_update_slice": _nothing,
    **dict.fromkeys(
        [
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_sum",
        ],
        _windowed_axes,
    ),
}


# -------------------------------------------------------------------- axes that move


def _transpose(eqn: core.JaxprEqn) -> list[AxisMap]:
    permutation: Any = eqn.params["permutation"]
    return [AxisMap((int(axis),), (i,)) for i, axis in enumerate(permutation)]


def _broadcast(eqn: core.JaxprEqn) -> list[AxisMap]:
    """A slice along a new axis follows from all of the operand."""
    result_axes: Any = eqn.params["broadcast_dimensions"]
    (operand_shape, *_) = shapes = [shape_of(atom) for atom in eqn.invars]
    # axis of the result -> axis of the operand
    axes = {int(b): a for a, b in enumerate(result_axes)}
    maps = list[AxisMap]()
    for b, length in enumerate(shape_of(eqn.outvars[0])):
        a = axes.get(b)
        if a is not None and operand_shape[a] != length:
            a = None
        maps.append(AxisMap((a, *[None] * (len(shapes) - 1)), (b,)))
    return maps


def _reshape(eqn: core.JaxprEqn) -> list[AxisMap]:
    """Axes with as many elements before them, and as many from them on, as one before.

    Such an axis of the result may be longer, as further axes are joined to it, or
    shorter, as it is divided.
    """
    if len(eqn.invars) > 1 or eqn.params["dimensions"] is not None:
        return []
    shape = shape_of(eqn.invars[0])
    new_shape = shape_of(eqn.outvars[0])
    axis_of_prefix = {
        math.prod(new_shape[:a]): a for a in range(len(new_shape)) if new_shape[a] > 1
    }
    maps = list[AxisMap]()
    for a, size in enumerate(shape):
        prefix = math.prod(shape[:a])
        if size > 1 and prefix in axis_of_prefix:
            maps.append(AxisMap((a,), (axis_of_prefix[prefix],)))
    return maps


def _stack(eqn: core.JaxprEqn) -> list[AxisMap]:
    new_axis: Any = eqn.params["axis"]
    axes = range(len(shape_of(eqn.invars[0])))
    return [AxisMap((a,) * len(eqn.invars), (a + (a >= new_axis),)) for a in axes]


def _dot_general(eqn: core.JaxprEqn) -> list[AxisMap]:
    """The result has the batch axes, then the free ones of each operand in order."""
    params: Any = eqn.params
    contracted, batch = params["dimension_numbers"]
    pairs = list[tuple[int | None, int | None]](zip(*batch, strict=True))
    for i in range(2):
        used = {*contracted[i], *batch[i]}
        for axis in range(len(shape_of(eqn.invars[i]))):
            if axis not in used:
                pairs.append((axis, None) if i == 0 else (None, axis))
    return [AxisMap(operands, (b,)) for b, operands in enumerate(pairs)]


# --------------------------------------------------------------- axes that are named


def _gather(eqn: core.JaxprEqn) -> list[AxisMap]:
    """Axes of the operand that no index chooses from, and axes of the indices."""
    numbers = _dimension_numbers(eqn)
    shape, index_shape = (shape_of(atom) for atom in eqn.invars)
    slice_sizes: Any = eqn.params["slice_sizes"]
    not_windows = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [a for a in range(len(shape)) if a not in not_windows]
    maps = [
        AxisMap((a, None), (int(b),))
        for a, b in zip(windows, numbers.offset_dims, strict=True)
        if a not in numbers.start_index_map and slice_sizes[a] == shape[a]
    ]
    batches = _remaining_axes(eqn.outvars[0], numbers.offset_dims)
    batched = dict(
        zip(
            map(int, numbers.start_indices_batching_dims),
            map(int, numbers.operand_batching_dims),
            strict=True,
        )
    )
    index_axes = range(len(index_shape) - 1)
    return maps + [AxisMap((batched.get(i), i), (batches[i],)) for i in index_axes]


def _scatter(eqn: core.JaxprEqn) -> list[AxisMap]:
    """Axes of the operand into which no index chooses a place."""
    numbers = _dimension_numbers(eqn)
    shape, _, update_shape = (shape_of(atom) for atom in eqn.invars)
    not_windows = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [a for a in range(len(shape)) if a not in not_windows]
    maps = [
        AxisMap((a, None, int(b)), (a,))
        for a, b in zip(windows, numbers.update_window_dims, strict=True)
        if a not in numbers.scatter_dims_to_operand_dims and update_shape[b] == shape[a]
    ]
    batches = _remaining_axes(eqn.invars[2], numbers.update_window_dims)
    pairs = zip(
        map(int, numbers.operand_batching_dims),
        map(int, numbers.scatter_indices_batching_dims),
        strict=True,
    )
    return maps + [AxisMap((a, i, batches[i]), (a,)) for a, i in pairs]


def _dimension_numbers(eqn: core.JaxprEqn) -> Any:
    return eqn.params["dimension_numbers"]


def _remaining_axes(atom: Any, axes: Collection[int]) -> list[int]:
    """The other axes of an array, in order."""
    return [a for a in range(len(shape_of(atom))) if a not in axes]


# ------------------------------------------------------------------- arrays of keys


def _first_axes(eqn: core.JaxprEqn) -> list[AxisMap]:
    """The first axes of the result are those of an array of keys."""
    shapes = [shape_of(atom) for atom in eqn.invars]
    result_shape = shape_of(eqn.outvars[0])
    maps = list[AxisMap]()
    for axis, length in enumerate(shapes[0]):
        operands = tuple(
            axis if shape[axis : axis + 1] == (length,) else None for shape in shapes
        )
        if result_shape[axis] == length:
            maps.append(AxisMap(operands, (axis,)))
    return maps


def _draw(eqn: core.JaxprEqn) -> list[AxisMap]:
    """Draws, one for each key, if keys are apart.

    Keys of threefry are. From an array of keys of ``impl="rbg"``, JAX draws all numbers
    by the first key: a slice of the keys would draw others.
    """
    keys: Any = eqn.invars[0]
    is_apart = keys.aval.dtype == _dtype_of_threefry_keys()
    return _first_axes(eqn) if is_apart else []


@functools.cache
def _dtype_of_threefry_keys() -> Any:
    make_key = functools.partial(jax.random.key, 0, impl="threefry2x32")
    return jax.eval_shape(make_key).dtype


_MAPS: Mapping[str, Callable[[core.JaxprEqn], list[AxisMap]]] = {
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "gather": _gather,
    "random_bits": _draw,
    "random_fold_in": _draw,
    "random_split": _draw,
    "random_unwrap": _first_axes,
    "reshape": _reshape,
    **dict.fromkeys(
        [
            "scatter",
            "scatter-add",
            "scatter_add",
            "scatter_max",
            "scatter_min",
            "scatter_mul",
            "scatter_sub",
        ],
        _scatter,
    ),
    "stack": _stack,
    "transpose": _transpose,
}

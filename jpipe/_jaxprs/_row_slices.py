"""Reads of some rows along the axis of pieces, at constants: of the pieces they are in.

    concatenate([x0, x1])[i]  = x1[i - len(x0)]

A read is a slice, or a gather of one row. On a piece, or on a part of one, it is the
same equation that reads all rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from . import _axis_maps, _jaxpr
from ._pieces import Pieces


class Rows(NamedTuple):
    """Rows along an axis, from ``begin`` to before ``end``."""

    begin: int
    end: int


def find_rows(
    eqn: core.JaxprEqn,
    pieces: Pieces,
    read_constant: Callable[[Any], np.ndarray | None],
) -> Rows | None:
    """The rows that an equation reads along the axis of the pieces of its operand.

    Args:
      eqn: the equation.
      pieces: the pieces of its first operand.
      read_constant: ``atom -> its value``; ``None`` if it is no constant.

    Returns:
      The rows; ``None`` if they are all rows, or not known.
    """
    params: Any = eqn.params
    axis = pieces.axis
    if eqn.primitive.name == "slice":
        rows = Rows(params["start_indices"][axis], params["limit_indices"][axis])
        strides = params["strides"]
        is_dense = not strides or strides[axis] == 1
        is_part = rows.begin < rows.end and rows != (0, pieces.length)
        return rows if is_dense and is_part else None

    size = params["slice_sizes"][axis]
    if eqn.primitive.name == "dynamic_slice":
        start = read_constant(eqn.invars[1 + axis])
        if start is None or size == pieces.length:
            return None
        begin = min(max(int(start), 0), pieces.length - size)
        return Rows(begin, begin + size)

    numbers = params["dimension_numbers"]
    if size != 1 or tuple(numbers.start_index_map) != (axis,):
        return None
    index = read_constant(eqn.invars[1])
    if index is None or index.size != 1 or not 0 <= index.item() < pieces.length:
        return None  # what is then read depends on the mode of the gather
    return Rows(int(index.item()), int(index.item()) + 1)


def read_all_rows(
    eqn: core.JaxprEqn, operands: Sequence[Any], axis: int
) -> tuple[list[Any], dict[str, Any]]:
    """The operands and parameters with which an equation reads all rows of an array.

    Args:
      eqn: the equation.
      operands: its operands, the first of which has these rows only.
      axis: the axis of the rows.
    """
    params: dict[str, Any] = dict(eqn.params)
    array, *starts = operands
    size = array.shape[axis]
    if eqn.primitive.name == "slice":
        params["start_indices"] = _axis_maps.with_size(params["start_indices"], axis, 0)
        params["limit_indices"] = _axis_maps.with_size(
            params["limit_indices"], axis, size
        )
        return [array], params
    if eqn.primitive.name == "dynamic_slice":
        atom: Any = eqn.invars[1 + axis]
        starts[axis] = np.zeros((), atom.aval.dtype)
        params["slice_sizes"] = _axis_maps.with_size(params["slice_sizes"], axis, size)
        return [array, *starts], params
    (indices,) = starts
    return [array, np.zeros(indices.shape, indices.dtype)], params


def compute_constant(closed: core.ClosedJaxpr, atom: Any) -> np.ndarray | None:
    """Computes a variable of a jaxpr that follows from none of its inputs.

    Returns:
      The value; ``None`` if an effect makes it.
    """
    if isinstance(atom, core.Literal):
        return np.asarray(atom.val)
    needed = _jaxpr.recomputation(closed, [atom], ()).jaxpr
    if any(eqn.effects for eqn in needed.eqns):
        return None
    needed = needed.replace(invars=[], effects=set())
    # Within a trace, such as that of pieces.
    with jax.ensure_compile_time_eval():
        (value,) = core.jaxpr_as_fun(core.ClosedJaxpr(needed, closed.consts))()
    return np.asarray(value)

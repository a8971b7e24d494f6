"""Scans over stacked layers: found in a traced function, and divided into pieces.

    x, _ = scan(layer, x, cast(w))      w: [layers, ...], a parameter

    x, _ = scan(layer, x, cast(w0))     w0: [2, ...]      stage 0
    x, _ = scan(layer, x, cast(w1))     w1: [3, ...]      stage 1

Inside, a parameter that a scan goes along is as many parameters as it has pieces. The
user's function is traced on whole arrays, and its jaxpr is rewritten: see
`_jaxprs/_piecewise`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs import _axis_maps, _eqn_source, _jaxpr
from .._jaxprs._pieces import Pieces, trace_axes_back
from .._jaxprs._piecewise import WholeRead, run_in_pieces
from .._messages import raise_all
from ..schedules._formats import format_bytes
from ._traced_function import TracedFunction

# What has so few bytes may be put together wherever it is read.
_FEW_BYTES = 1024


class LayerScan(NamedTuple):
    """A scan along parameters, or several that go along the same ones.

    Attributes:
      length: the number of its iterations.
      axes: index of a parameter -> the axis along which the scan goes.
    """

    length: int
    axes: dict[int, int]

    def pieces(self, traced: TracedFunction, sizes: Sequence[int]) -> dict[int, Pieces]:
        """The pieces of its parameters, for pieces of so many iterations."""
        pieces: dict[int, Pieces] = {}
        for index, axis in self.axes.items():
            shape = _axis_maps.shape_of(traced.params[index])
            rows = shape[axis] // self.length  # a reshape may divide an axis
            pieces[index] = Pieces(axis, tuple(rows * size for size in sizes))
        return pieces


def find_layer_scans(
    traced: TracedFunction, scan_indices: Sequence[int]
) -> list[LayerScan]:
    """Finds the parameters that scans go along.

    Args:
      traced: the function, traced on whole parameters.
      scan_indices: the indices of the equations that are scans to divide.
    """
    jaxpr = traced.closed.jaxpr
    num_params = traced.num_params - len(traced.captured_arrays)
    layer_scans = list[LayerScan]()
    for scan_index in scan_indices:
        eqn = jaxpr.eqns[scan_index]
        xs = eqn.invars[_jaxpr.carry_slice(eqn).stop :]
        axes_of_vars = trace_axes_back(jaxpr, dict.fromkeys(_jaxpr.variables(xs), 0))
        length: Any = eqn.params["length"]
        axes: dict[int, int] = {}
        for i, var in enumerate(traced.params[:num_params]):
            axis = axes_of_vars.get(var)
            if axis is not None and _axis_maps.shape_of(var)[axis] % length == 0:
                axes[i] = axis
        if axes:
            layer_scans.append(LayerScan(length, axes))
    return _join_scans(layer_scans)


def _join_scans(layer_scans: Sequence[LayerScan]) -> list[LayerScan]:
    """Joins scans that go along a common parameter, if their lengths are equal."""
    joined = list[LayerScan]()
    for scan in layer_scans:
        axes = dict(scan.axes)
        for other in list(joined):
            if not axes.keys().isdisjoint(other.axes):
                if other.length != scan.length:
                    axes = {i: a for i, a in axes.items() if i not in other.axes}
                    continue
                joined.remove(other)
                axes = other.axes | axes
        joined.append(LayerScan(scan.length, axes))
    return joined


def with_params_in_pieces(
    traced: TracedFunction,
    pieces: Mapping[int, Pieces],
    names: Sequence[str],
    written_params: Mapping[int, int],
) -> TracedFunction:
    """The function of parameters of which some are in pieces.

    Args:
      traced: the function of whole parameters.
      pieces: index of a parameter -> its pieces.
      names: the name of each parameter in errors.
      written_params: index of a leaf of aux -> the parameter whose new value it is, and
        in whose pieces it comes.

    Raises:
      ValueError: with the parameters in pieces that are read as a whole.
    """
    first_aux = traced.has_loss + traced.is_weighted
    output_pieces = {
        first_aux + i: pieces[param]
        for i, param in written_params.items()
        if param in pieces
    }
    piecewise = run_in_pieces(
        traced.closed, pieces, output_pieces, num_fixed=traced.num_params
    )
    raise_all(
        "a parameter that a scan goes along is in pieces, one in each stage that runs "
        "some of its iterations; read it element by element, along other axes, or as a "
        "sum over the layers, or take num_stages=1",
        [
            _describe_read(read, names)
            for read in piecewise.whole_reads
            if _jaxpr.nbytes(read.spec) > _FEW_BYTES
        ],
    )
    num_pieces = sum(len(x.sizes) - 1 for x in pieces.values())
    return replace(
        traced,
        closed=piecewise.closed,
        num_params=traced.num_params + num_pieces,
        folded_numbers=[*traced.folded_numbers, *map(np.int32, piecewise.begins)],
        has_pieces=True,
    )


def _describe_read(read: WholeRead, names: Sequence[str]) -> str:
    """The parameters that are read as a whole, by what, and the bytes that takes."""
    params = ", ".join(names[i] for i in sorted(read.input_indices))
    reader = "a result" if read.eqn is None else _eqn_source.describe_eqn(read.eqn)
    num_bytes = format_bytes(_jaxpr.nbytes(read.spec))
    return f"{params}: {reader} reads all of it, {num_bytes}"

"""Scans over stacked layers: found in a traced function, and divided into pieces.

    x, _ = scan(layer, x, cast(w))      w: [layers, ...], a parameter

    x, _ = scan(layer, x, cast(w0))     w0: [2, ...]      stage 0
    x, _ = scan(layer, x, cast(w1))     w1: [3, ...]      stage 1

Inside, a parameter that a scan goes along is as many parameters as it has pieces. The
user's function is traced on whole arrays, and its jaxpr is rewritten: see
`_jaxprs/_piecewise`. Where the function stacks the parameters of layers itself, as in
``scan(layer, x, stack([a, b, c, d, e]))``, these stay as they are, and each piece is a
stack of its own: ``stack([a, b])``, ``stack([c, d, e])``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from .._jaxprs import _axis_maps, _eqn_source, _jaxpr
from .._jaxprs._piece_evaluation import WholeRead
from .._jaxprs._pieces import (
    AlignedAxis,
    Pieces,
    first_inner_indices,
    operand_axes,
    trace_axes_back,
)
from .._jaxprs._piecewise import run_in_pieces
from .._messages import raise_all
from ..schedules._formats import format_bytes
from ._traced_function import TracedFunction


@dataclass(frozen=True)
class ScanDivision:
    """The pieces in which scans over layers are, and the parameters they go along.

    Attributes:
      params: index of a parameter that a scan goes along -> its pieces.
      scans: index of an equation, among those that are scans and go along what the
        function stacks itself -> the iterations of each piece.
    """

    params: Mapping[int, Pieces]
    scans: Mapping[int, tuple[int, ...]]

    @property
    def num_added(self) -> int:
        """The number of parameters inside that there are more than outside."""
        return sum(len(pieces.sizes) - 1 for pieces in self.params.values())

    def union(self, other: "ScanDivision") -> "ScanDivision":
        """The pieces of both; a parameter of both has those of the other one."""
        return ScanDivision(
            params={**self.params, **other.params}, scans={**self.scans, **other.scans}
        )

    def faults(self, num_params: int) -> Iterator[str]:
        """Yields faults of the numbers, such as after they were read from a file.

        Args:
          num_params: the number of parameters outside.
        """
        indices = list(self.params)
        if not set(indices) <= set(range(num_params)):
            yield f"params has indices {indices}, of {num_params} parameters"
        all_sizes = [pieces.sizes for pieces in self.params.values()]
        for sizes in [*all_sizes, *self.scans.values()]:
            if min(sizes, default=0) < 1:
                yield f"pieces of sizes {sizes}: need to be of 1 at least"

    def merge_pieces(
        self, first_stages: Sequence[int]
    ) -> tuple["ScanDivision", list[bool]]:
        """Merges neighbouring pieces of a parameter that a stage is the first to read.

        Args:
          first_stages: the first stage that reads each parameter inside.

        Returns:
          The division; and one bool for each parameter inside, False if it is a part of
          the piece before it.
        """
        begins_piece = [True] * len(first_stages)
        first_indices = first_inner_indices(
            len(first_stages) - self.num_added, self.params
        )
        params: dict[int, Pieces] = {}
        for index, pieces in self.params.items():
            sizes = list[int]()
            for i, size in enumerate(pieces.sizes, start=first_indices[index]):
                if sizes and first_stages[i] == first_stages[i - 1]:
                    sizes[-1] += size
                    begins_piece[i] = False
                else:
                    sizes.append(size)
            if len(sizes) > 1:
                params[index] = Pieces(pieces.axis, tuple(sizes))
        return ScanDivision(params, self.scans), begins_piece


UNDIVIDED = ScanDivision(params={}, scans={})


class LayerScan(NamedTuple):
    """A scan over layers, or several over the same ones.

    Attributes:
      lengths: index of an equation, among those that are scans -> its iterations.
      length: the number of iterations, of which a stage runs some. If one scan goes
        along layers and another along blocks of them, that of the scan along blocks.
      axes: index of a parameter that stacks those of all layers -> the axis along which
        the scan goes.
      layer_params: for each iteration the parameters that the function stacks itself;
        empty if it stacks none.
    """

    lengths: dict[int, int]
    length: int
    axes: dict[int, int]
    layer_params: list[set[int]]

    def in_blocks(self, length: int) -> "LayerScan":
        """The same in a smaller number of iterations."""
        layer_params = list[set[int]]()
        for i, params in enumerate(self.layer_params):
            block = i * length // self.length
            if block == len(layer_params):
                layer_params.append(set())
            layer_params[block] |= params
        return self._replace(length=length, layer_params=layer_params)

    def divide(self, traced: TracedFunction, sizes: Sequence[int]) -> ScanDivision:
        """Its pieces, and those of its parameters, for pieces of so many iterations."""
        params: dict[int, Pieces] = {}
        for index, axis in self.axes.items():
            shape = _axis_maps.shape_of(traced.params[index])
            rows = shape[axis] // self.length  # a reshape may divide an axis
            params[index] = Pieces(axis, tuple(rows * size for size in sizes))
        scans: dict[int, tuple[int, ...]] = {}
        if self.layer_params:
            for index, length in self.lengths.items():
                iterations = length // self.length
                scans[index] = tuple(iterations * size for size in sizes)
        return ScanDivision(params, scans)


def find_layer_scans(
    traced: TracedFunction, eqn_indices: Sequence[int]
) -> list[LayerScan]:
    """Finds the parameters that scans go along.

    Args:
      traced: the function, traced on whole parameters.
      eqn_indices: the indices of the equations that are scans to divide.
    """
    jaxpr = traced.closed.jaxpr
    num_params = traced.num_params - len(traced.captured_arrays)
    scan_indices = [i for i, eqn in enumerate(jaxpr.eqns) if _is_scan(eqn)]
    layer_scans = list[LayerScan]()
    for eqn_index in eqn_indices:
        eqn = jaxpr.eqns[eqn_index]
        axes_of_vars = trace_axes_back(
            jaxpr, dict.fromkeys(_xs(eqn), AlignedAxis(axis=0))
        )
        length: Any = eqn.params["length"]
        axes: dict[int, int] = {}
        for i, var in enumerate(traced.params[:num_params]):
            aligned = axes_of_vars.get(var)
            if aligned is None or not aligned.is_whole:
                continue
            if _axis_maps.shape_of(var)[aligned.axis] % length == 0:
                axes[i] = aligned.axis
        layer_params = _find_layer_params(traced, axes_of_vars, length)
        if axes or layer_params:
            scan_index = scan_indices.index(eqn_index)
            layer_scans.append(
                LayerScan({scan_index: length}, length, axes, layer_params)
            )
    return _join_scans(layer_scans)


def _is_scan(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan"


def _xs(eqn: core.JaxprEqn) -> set[core.Var]:
    """The variables that a scan goes along."""
    return _jaxpr.variables(eqn.invars[_jaxpr.carry_slice(eqn).stop :])


def _find_layer_params(
    traced: TracedFunction, axes_of_vars: Mapping[core.Var, AlignedAxis], length: int
) -> list[set[int]]:
    """Finds the parameters that the function stacks itself, for each iteration.

    Args:
      traced: the function.
      axes_of_vars: variable from which what a scan goes along follows slice by slice ->
        the axis of its slices.
      length: the number of iterations.

    Returns:
      Parameters of each iteration; none, if no stack of several parameters is made.
    """
    layer_params = list[set[int]]()
    num_params = traced.num_params - len(traced.captured_arrays)
    # variable -> the parameters that it follows from, and from nothing of the batch
    params_of = {var: {i} for i, var in enumerate(traced.params[:num_params])}
    for eqn in traced.closed.jaxpr.eqns:
        operands = _jaxpr.variables(eqn.invars)
        if not operands.isdisjoint(traced.vars_of_batch):
            continue
        params = set[int]().union(*[params_of.get(var, ()) for var in operands])
        params_of.update(dict.fromkeys(eqn.outvars, params))
        if len(params) < 2 or not _is_stacked_along(eqn, axes_of_vars):
            continue
        aligned = axes_of_vars[eqn.outvars[0]]
        rows = list[set[int]]()
        for atom in eqn.invars:
            num_rows = 1
            if eqn.primitive.name == "concatenate":
                num_rows = _axis_maps.shape_of(atom)[aligned.axis]
            rows += [params_of.get(atom, set())] * num_rows
        if not layer_params:
            layer_params = [set() for _ in range(length)]
        # An iteration may go along several rows, of which a reshape makes one.
        for i, row in enumerate(rows):
            start = aligned.part(len(rows), i, i + 1).start
            if 0 <= start < 1:
                layer_params[int(start * length)] |= row
    return layer_params


def _is_stacked_along(eqn: core.JaxprEqn, axes: Mapping[core.Var, AlignedAxis]) -> bool:
    """True if an equation puts arrays together along the axis of its result."""
    params: Any = eqn.params
    names = {"concatenate": "dimension", "stack": "axis"}
    if eqn.primitive.name not in names or eqn.outvars[0] not in axes:
        return False
    return axes[eqn.outvars[0]].axis == params[names[eqn.primitive.name]]


def _join_scans(layer_scans: Sequence[LayerScan]) -> list[LayerScan]:
    """Joins scans that go along a common parameter, or make the same stacks.

    One may go along layers, and another along blocks of them: both are divided between
    blocks. If they have no number of blocks in common, or go along different axes, the
    second one reads the parameter as a whole.
    """
    joined = list[LayerScan]()
    for scan in layer_scans:
        for other in list(joined):
            common = scan.axes.keys() & other.axes.keys()
            length = math.gcd(scan.length, other.length)
            is_aligned = all(scan.axes[i] == other.axes[i] for i in common)
            has_same_stacks = scan.layer_params == other.layer_params != []
            has_blocks = length > 1 or scan.length == other.length
            if common and not (is_aligned and has_blocks):
                axes = {i: a for i, a in scan.axes.items() if i not in common}
                scan = scan._replace(axes=axes)
            elif common or has_same_stacks:
                joined.remove(other)
                scan = _join_two(other.in_blocks(length), scan.in_blocks(length))
        if scan.axes or scan.layer_params:
            joined.append(scan)
    return joined


def _join_two(first: LayerScan, second: LayerScan) -> LayerScan:
    """Two scans of the same number of iterations as one."""
    layer_params = first.layer_params or second.layer_params
    if first.layer_params and second.layer_params:
        pairs = zip(first.layer_params, second.layer_params, strict=True)
        layer_params = [x | y for x, y in pairs]
    return LayerScan(
        lengths=first.lengths | second.lengths,
        length=first.length,
        axes=first.axes | second.axes,
        layer_params=layer_params,
    )


def divide_scans(
    traced: TracedFunction,
    division: ScanDivision,
    names: Sequence[str],
    written_params: Mapping[int, int],
) -> TracedFunction:
    """Divides scans over layers. The parameters that they go along are in pieces then.

    Args:
      traced: the function of whole parameters.
      division: the pieces.
      names: the name of each parameter in errors.
      written_params: index of a leaf of aux -> the parameter whose new value it is, and
        in whose pieces it comes.

    Raises:
      ValueError: if the pieces are those of other numbers of layers, or with the
        parameters in pieces that are read as a whole.
    """
    for index, pieces in division.params.items():
        shape = _axis_maps.shape_of(traced.params[index])
        pieces.check_shape(shape, names[index])
    first_aux = traced.has_loss + traced.is_weighted
    output_pieces = {
        first_aux + i: division.params[param]
        for i, param in written_params.items()
        if param in division.params
    }
    piecewise = run_in_pieces(
        traced.closed,
        division.params,
        output_pieces,
        targets=_find_targets(traced, division),
        num_fixed=traced.num_params,
    )
    # One number of each layer may be put together wherever it is read.
    raise_all(
        "a parameter that a scan goes along is in pieces, one in each stage that runs "
        "some of its iterations; read it element by element, along other axes, or as a "
        "sum over the layers, or take num_stages=1",
        [
            _describe_read(read, names)
            for read in piecewise.whole_reads
            if read.is_accumulation or len(read.spec.shape) > 1
        ],
    )
    return replace(
        traced,
        closed=piecewise.closed,
        num_params=traced.num_params + division.num_added,
        folded_numbers=[*traced.folded_numbers, *map(np.int32, piecewise.starts)],
        has_pieces=True,
    )


def _find_targets(
    traced: TracedFunction, division: ScanDivision
) -> dict[core.Var, Pieces]:
    """The pieces in which the function makes what scans go along.

    A function of another batch size may have other scans: those stay whole.
    """
    targets: dict[core.Var, Pieces] = {}
    scans = [eqn for eqn in traced.closed.jaxpr.eqns if _is_scan(eqn)]
    for index, sizes in division.scans.items():
        if index < len(scans) and scans[index].params["length"] == sum(sizes):
            for var in _xs(scans[index]):
                targets.setdefault(var, Pieces(0, sizes))
    return targets


def _describe_read(read: WholeRead, names: Sequence[str]) -> str:
    """The parameters that are read as a whole, by what, and the bytes that takes."""
    params = ", ".join(names[i] for i in sorted(read.input_indices) if i < len(names))
    reader = "a result" if read.eqn is None else _eqn_source.describe_eqn(read.eqn)
    if read.is_accumulation:
        return f"{params}: {reader} accumulates along the layers"
    num_bytes = format_bytes(_jaxpr.nbytes(read.spec))
    return f"{params}: {reader} reads all of it, {num_bytes}"


def find_mixed_layers(
    traced: TracedFunction, scan: core.JaxprEqn
) -> core.JaxprEqn | None:
    """The last equation before a scan that moves or mixes the layers of parameters.

    Args:
      traced: the function.
      scan: a scan that goes along no parameter slice by slice.

    Returns:
      The equation; ``None`` if the scan follows from no parameter alone.
    """
    jaxpr = traced.closed.jaxpr
    params = {*traced.params}
    axes = trace_axes_back(jaxpr, dict.fromkeys(_xs(scan), AlignedAxis(axis=0)))
    of_params = _jaxpr.descendants(jaxpr, params) - traced.vars_of_batch
    for eqn in reversed(jaxpr.eqns):
        if axes.keys().isdisjoint(eqn.outvars) or of_params.isdisjoint(eqn.outvars):
            continue
        operands = dict(operand_axes(eqn, axes))
        is_lost = of_params.isdisjoint(operands)
        is_moved = any(not operands[var].is_whole for var in params & operands.keys())
        if is_lost or is_moved:
            return eqn
    return None

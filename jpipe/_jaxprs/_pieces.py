"""Arrays in pieces along an axis, and what must be in pieces so that others are.

A loop goes along the slices of an array; these are slices of parameters, transposed,
cast or reshaped. So pieces are traced back from what is read, or made, slice by slice:

    y = cos(x).T       y in pieces along axis 1   <-   x in pieces along axis 0
"""

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import _axis_maps, _custom_rules, _inlining, _jaxpr
from ._host_memory import in_memory_of

# Loops, branches and calls that may be divided by pieces: see `_divided_bodies`.
DIVIDED_BODIES = frozenset(["cond", "scan", *_jaxpr.CHECKPOINTS])

_ACCUMULATIONS = frozenset(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"])


class AlignedAxis(NamedTuple):
    """An axis of an array whose slices line up with a part of what they are read for.

    Attributes:
      axis: the axis.
      start: where its first slice is, as a part of the length of what it is read for.
      stop: where its last slice ends.
    """

    axis: int
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    @property
    def is_whole(self) -> bool:
        """True if the slices line up with all of what they are read for."""
        return (self.start, self.stop) == (0, 1)

    def part(self, length: int, first: int, last: int) -> "AlignedAxis":
        """The axis of an array that is read for some rows of this one.

        Args:
          length: the length of this axis.
          first: the row of this one that is the first row of that array.
          last: the row of this one that is behind its last one.
        """
        row = (self.stop - self.start) / length
        return AlignedAxis(self.axis, self.start + first * row, self.start + last * row)


class Pieces(NamedTuple):
    """The pieces in which an array lies.

    Attributes:
      axis: the axis along which it is cut.
      sizes: the size of each piece along this axis.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """The size of all pieces along the axis."""
        return sum(self.sizes)

    @property
    def ends(self) -> list[int]:
        """The end of each piece along the axis."""
        return [*itertools.accumulate(self.sizes)]

    @property
    def starts(self) -> list[int]:
        """The start of each piece along the axis."""
        return [0, *self.ends[:-1]]

    def check_shape(self, shape: Sequence[int], name: str) -> None:
        """Checks that these are the pieces of an array of some shape.

        Raises:
          ValueError: if they are those of a longer or shorter one.
        """
        if tuple(shape[self.axis : self.axis + 1]) != (self.length,):
            sizes = ", ".join(map(str, self.sizes))
            raise ValueError(
                f"{name} has shape {tuple(shape)}; it is in pieces of {sizes} along "
                f"axis {self.axis}, and needs {self.length} there; for another number "
                f"of layers make another pipeline, or another jpipe.value_and_grad"
            )

    def align(self, atom: Any, aligned: AlignedAxis) -> "Pieces | None":
        """The pieces of what is read for some of these; ``None`` if it has others too.

        Args:
          atom: the variable that is read.
          aligned: the axis of its slices, and with which of these they line up.
        """
        length = _axis_maps.shape_of(atom)[aligned.axis]
        if aligned.start < 0 or aligned.stop > 1 or not length:
            return None
        rows = length / (aligned.stop - aligned.start)
        ends = set[int]()
        for end in [*(Fraction(end, self.length) for end in self.ends), aligned.stop]:
            if aligned.start < end <= aligned.stop:
                last = (end - aligned.start) * rows
                if last.denominator > 1:
                    return None
                ends.add(int(last))
        return Pieces(aligned.axis, sizes_between(ends))

    def specs(self, spec: Any) -> list[jax.ShapeDtypeStruct]:
        """The spec of each piece of an array."""
        weak_type = getattr(spec, "weak_type", False)
        specs: list[jax.ShapeDtypeStruct] = []
        for size in self.sizes:
            shape = _axis_maps.with_size(spec.shape, self.axis, size)
            piece = jax.ShapeDtypeStruct(shape, spec.dtype, weak_type=weak_type)
            specs.append(in_memory_of(piece, spec))
        return specs


def trace_axes_back(
    jaxpr: core.Jaxpr, axes: Mapping[core.Var, AlignedAxis]
) -> dict[core.Var, AlignedAxis]:
    """Finds the variables from which others follow slice by slice.

    Args:
      jaxpr: the jaxpr.
      axes: variable -> the axis of its slices.

    Returns:
      The axis of each of these variables, and of those that they follow from.
    """
    all_axes = dict(axes)
    for eqn in reversed(jaxpr.eqns):
        for var, axis in operand_axes(eqn, all_axes):
            all_axes.setdefault(var, axis)
    return all_axes


def operand_axes(
    eqn: core.JaxprEqn, axes: Mapping[core.Var, AlignedAxis]
) -> list[tuple[core.Var, AlignedAxis]]:
    """The operands, and their axes, that results follow from slice by slice.

    Args:
      eqn: the equation.
      axes: variable -> the axis of its slices.
    """
    pairs = list[tuple[Any, AlignedAxis]]()
    first_xs, first_ys = first_stacked(eqn)
    stacked = [axes[y] for y in eqn.outvars[first_ys:] if y in axes]
    if any(aligned.axis == 0 for aligned in stacked):
        pairs = [(atom, stacked[0]._replace(axis=0)) for atom in eqn.invars[first_xs:]]
    elif axes.keys().isdisjoint(eqn.outvars):
        pass
    elif eqn.primitive.name in DIVIDED_BODIES | _custom_rules.CUSTOM_RULES:
        pairs = _body_operand_axes(eqn, axes)
    else:
        for i, var in enumerate(eqn.outvars):
            if var in axes:
                pairs += _axes_of_result(eqn, i, axes[var])
    return [(atom, axis) for atom, axis in pairs if not isinstance(atom, core.Literal)]


def _axes_of_result(
    eqn: core.JaxprEqn, index: int, aligned: AlignedAxis
) -> list[tuple[Any, AlignedAxis]]:
    """The operands, and their axes, that a result follows from slice by slice."""
    params: Any = eqn.params
    axis = aligned.axis
    rows = _axis_maps.shape_of(eqn.outvars[index])[axis]
    if (axis_map := _axis_maps.map_result_axis(eqn, index, axis)) is not None:
        return [
            (atom, aligned._replace(axis=operand_axis))
            for atom, operand_axis in zip(eqn.invars, axis_map.operands, strict=True)
            if operand_axis is not None
        ]
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [(eqn.invars[index], aligned)]
    if name == "concatenate" and params["dimension"] == axis:
        ends = [0]
        for atom in eqn.invars:
            ends.append(ends[-1] + _axis_maps.shape_of(atom)[axis])
        bounds = zip(eqn.invars, itertools.pairwise(ends), strict=True)
        return [(atom, aligned.part(rows, *bound)) for atom, bound in bounds]

    start: int | None = None
    if name == "slice" and (not params["strides"] or params["strides"][axis] == 1):
        start = params["start_indices"][axis]
    if name == "split" and params["axis"] == axis:
        start = sum(params["sizes"][:index])
    if start is None or rows == 0:
        return []
    (operand,) = eqn.invars
    length = _axis_maps.shape_of(operand)[axis]
    return [(operand, aligned.part(rows, -start, length - start))]


def _body_operand_axes(
    eqn: core.JaxprEqn, axes: Mapping[core.Var, AlignedAxis]
) -> list[tuple[Any, AlignedAxis]]:
    """The operands that results of a loop or a branch follow from slice by slice."""
    # index of an operand -> its axis
    of_operands: dict[int, AlignedAxis] = {}
    first_xs, first_ys = first_stacked(eqn)
    carry = range(len(eqn.invars))[_jaxpr.carry_slice(eqn)]
    for body in inlined_bodies(eqn):
        num_leading = len(eqn.invars) - len(body.in_avals)
        body_axes: dict[core.Var, AlignedAxis] = {}
        for i, var in enumerate(eqn.outvars):
            result = body.jaxpr.outvars[i]
            if var in axes and not isinstance(result, core.Literal):
                # The body of a scan has one axis less of what it stacks.
                body_axes[result] = _shifted(axes[var], -(i >= first_ys))
        body_axes = trace_axes_back(body.jaxpr, body_axes)
        for i, var in enumerate(body.jaxpr.invars, start=num_leading):
            if var in body_axes:
                of_operands[i] = _shifted(body_axes[var], i >= first_xs)
    # A carry has slices along one axis, from its first value to its last.
    for i, var in zip(carry, eqn.outvars, strict=False):
        if var in axes:
            of_operands[i] = axes[var]
    return [(eqn.invars[i], aligned) for i, aligned in of_operands.items()]


def _shifted(aligned: AlignedAxis, change: int) -> AlignedAxis:
    """The axis of an array with so many axes more before this one."""
    return aligned._replace(axis=aligned.axis + change)


def find_accumulations(
    jaxpr: core.Jaxpr, var: core.Var, axis: int
) -> list[core.JaxprEqn]:
    """The accumulations along an axis from which a variable follows slice by slice."""
    axes = trace_axes_back(jaxpr, {var: AlignedAxis(axis)})
    return [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _ACCUMULATIONS
        and eqn.outvars[0] in axes
        and axes[eqn.outvars[0]].axis == eqn.params["axis"]
    ]


def inlined_bodies(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The bodies of a loop, a branch or a custom rule, with calls inlined."""
    if eqn.primitive.name in _custom_rules.CUSTOM_RULES:
        return [_custom_rules.trace_values(eqn)]
    return [_inlining.inline_eqns(body, ()) for body in _jaxpr.bodies(eqn)]


def first_stacked(eqn: core.JaxprEqn) -> tuple[int, int]:
    """The indices of the first x and the first y of a scan.

    These have an axis more than in its body. Other loops and branches have none: the
    numbers of their operands and results are returned.
    """
    if eqn.primitive.name != "scan":
        return len(eqn.invars), len(eqn.outvars)
    carry = _jaxpr.carry_slice(eqn)
    return carry.stop, carry.stop - carry.start


def find_target_pieces(
    jaxpr: core.Jaxpr,
    output_pieces: Mapping[int, Pieces | None],
    targets: Mapping[core.Var, Pieces],
) -> dict[core.Var, Pieces]:
    """Finds the pieces in which variables are made, so that others are in pieces.

    Args:
      jaxpr: the jaxpr.
      output_pieces: index of a result -> its pieces; ``None`` if it is whole.
      targets: variable -> its pieces, of further ones.
    """
    targets = dict(targets)
    for i, pieces in output_pieces.items():
        atom = jaxpr.outvars[i]
        if pieces is not None and not isinstance(atom, core.Literal):
            targets[atom] = pieces

    for eqn in reversed(jaxpr.eqns):
        targets_of_results = [targets[var] for var in eqn.outvars if var in targets]
        if not targets_of_results:
            continue
        axes: dict[core.Var, AlignedAxis] = {}
        for var in eqn.outvars:
            if var in targets:
                axes[var] = AlignedAxis(targets[var].axis)
        for var, aligned in operand_axes(eqn, axes):
            pieces = targets_of_results[0].align(var, aligned)
            if pieces is not None:
                targets.setdefault(var, pieces)
    return targets


def first_inner_indices(num_arrays: int, pieces: Mapping[int, Pieces]) -> list[int]:
    """The index of the first piece of each array, or of itself if it is whole.

    Args:
      num_arrays: the number of arrays.
      pieces: index of an array -> its pieces.
    """
    indices = list[int]()
    inner_index = 0
    for index in range(num_arrays):
        indices.append(inner_index)
        inner_index += len(pieces[index].sizes) if index in pieces else 1
    return indices


def scale_sizes(sizes: Sequence[int], length: int) -> tuple[int, ...] | None:
    """Sizes of pieces for an axis of another length; ``None`` if no integers."""
    scaled = [Fraction(size * length, sum(sizes)) for size in sizes]
    if any(size.denominator > 1 for size in scaled):
        return None
    return tuple(int(size) for size in scaled)


def sizes_between(ends: set[int]) -> tuple[int, ...]:
    """The sizes of pieces with these ends."""
    return tuple(end - begin for begin, end in itertools.pairwise([0, *sorted(ends)]))

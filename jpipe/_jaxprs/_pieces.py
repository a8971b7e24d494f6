"""Arrays in pieces along an axis, and what must be in pieces so that others are.

A loop goes along the slices of an array; these are slices of parameters, transposed,
cast or reshaped. So pieces are traced back from what is read, or made, slice by slice:

    y = cos(x).T       y in pieces along axis 1   <-   x in pieces along axis 0
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.extend import core

from . import _axis_maps, _jaxpr
from ._host_memory import in_memory_of

# Loops, branches and calls that may be divided by pieces: see `_divided_bodies`.
DIVIDED_BODIES = frozenset(["cond", "scan", *_jaxpr.CHECKPOINTS])


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
    def begins(self) -> list[int]:
        """The begin of each piece along the axis."""
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
    jaxpr: core.Jaxpr, axes: Mapping[core.Var, int]
) -> dict[core.Var, int]:
    """Finds the variables from which others follow slice by slice.

    Args:
      jaxpr: the jaxpr.
      axes: variable -> the axis of its slices.

    Returns:
      The axis of each of these variables, and of those that they follow from.
    """
    all_axes = dict(axes)
    for eqn in reversed(jaxpr.eqns):
        for var, axis in _operand_axes(eqn, all_axes):
            all_axes.setdefault(var, axis)
    return all_axes


def _operand_axes(
    eqn: core.JaxprEqn, axes: Mapping[core.Var, int]
) -> Iterable[tuple[core.Var, int]]:
    """Yields the operands, and their axes, that results follow from slice by slice."""
    if axes.keys().isdisjoint(eqn.outvars):
        return
    # the axis of each operand; empty if there is no rule for the equation
    operand_axes = list[int | None]()
    first_xs, first_ys = first_stacked(eqn)
    if any(axes.get(var) == 0 for var in eqn.outvars[first_ys:]):
        num_xs = len(eqn.invars) - first_xs
        operand_axes = [None] * first_xs + [0] * num_xs
    elif eqn.primitive.name in DIVIDED_BODIES:
        operand_axes = _body_operand_axes(eqn, axes)
    elif len(eqn.outvars) == 1:
        result_axis = axes[eqn.outvars[0]]
        for i in range(len(eqn.invars)):
            operand_axes.append(_axis_maps.source_axis(eqn, i, result_axis))

    for atom, axis in zip(eqn.invars, operand_axes, strict=False):
        if axis is not None and not isinstance(atom, core.Literal):
            yield atom, axis


def _body_operand_axes(
    eqn: core.JaxprEqn, axes: Mapping[core.Var, int]
) -> list[int | None]:
    """The axes of operands that results of a loop or a branch follow from by slices."""
    operand_axes: list[int | None] = [None] * len(eqn.invars)
    first_xs, first_ys = first_stacked(eqn)
    carry = range(len(eqn.invars))[_jaxpr.carry_slice(eqn)]
    for body in inlined_bodies(eqn):
        num_leading = len(eqn.invars) - len(body.in_avals)
        body_axes: dict[core.Var, int] = {}
        for i, var in enumerate(eqn.outvars):
            result = body.jaxpr.outvars[i]
            if var in axes and not isinstance(result, core.Literal):
                # The body of a scan has one axis less of what it stacks.
                body_axes[result] = axes[var] - (i >= first_ys)
        body_axes = trace_axes_back(body.jaxpr, body_axes)
        for i, var in enumerate(body.jaxpr.invars, start=num_leading):
            if var in body_axes:
                operand_axes[i] = body_axes[var] + (i >= first_xs)
    # A carry has slices along one axis, from its first value to its last.
    for i, var in zip(carry, eqn.outvars, strict=False):
        if var in axes:
            operand_axes[i] = axes[var]
    return operand_axes


def inlined_bodies(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The bodies of a loop or a branch, with calls of `jax.jit` inlined."""
    return [_jaxpr.inline_eqns(body, ()) for body in _jaxpr.bodies(eqn)]


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
        sizes = targets_of_results[0].sizes
        axes = {var: targets[var].axis for var in eqn.outvars if var in targets}
        for var, axis in _operand_axes(eqn, axes):
            new_sizes = scale_sizes(sizes, _axis_maps.shape_of(var)[axis])
            if new_sizes is not None:
                targets.setdefault(var, Pieces(axis, new_sizes))
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

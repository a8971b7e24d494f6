"""A computation on arrays in pieces, such as the stacked parameters of layers.

    x = concatenate([x0, x1, x2], axis)

A *concatenation* is this equation, not done yet. Each rule below is an equality, by
which it passes through an equation of a jaxpr:

    scan(f, c, concatenate([x0, x1]))   = scan(f, scan(f, c, x0), x1)
    f(concatenate([x0, x1]))            = concatenate([f(x0), f(x1)])
    sum(concatenate([x0, x1]), axis)    = sum(x0, axis) + sum(x1, axis)
    concatenate([x0, x1]) @ concatenate([y0, y1])       = x0 @ y0 + x1 @ y1
    concatenate([x0, x1])[i]            = x1[i - len(x0)]
    cond(p, f, g, concatenate([x0, x1]))
                        = concatenate([cond(p, f, g, x0), cond(p, f, g, x1)])

The second one is for an `f` that keeps the axis, such as one element by element: see
`_axis_maps`. The last one is for branches, and for bodies of loops, that do: see
`_divided_bodies`.

Where there is no rule the concatenation is done, and if it is of inputs, reported: no
device may have room for all of a stack. Results may be wanted in pieces too, and so may
be what scans go along. Then what makes them runs in pieces, so that a device makes no
more than it keeps:

    slice(broadcast(c, shape))      = broadcast(c, shape of the slice)
    slice(stack([a, b, c]))         = stack([b, c])
    slice(ys of a scan)             = ys of one scan of the row

All is evaluated under a new trace. Sums over pieces are added in another order than in
one reduction; nothing else differs.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _axis_maps, _jaxpr
from ._concatenation import Concatenation
from ._divided_bodies import divide_bodies
from ._explicit_dtypes import make_jaxpr
from ._piece_slices import PieceSlices
from ._pieces import Pieces, find_target_pieces, scale_sizes, sizes_between

# The operations that combine reductions of pieces along the axis of these.
_COMBINE = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


class WholeRead(NamedTuple):
    """A read of something as one array that follows from inputs in pieces.

    Attributes:
      input_indices: the inputs that it follows from.
      eqn: the equation that reads it; ``None`` if it is a result.
      spec: the shape and dtype of the whole.
    """

    input_indices: frozenset[int]
    eqn: core.JaxprEqn | None
    spec: jax.ShapeDtypeStruct


class PiecewiseJaxpr(NamedTuple):
    """A jaxpr of pieces, computed from one of whole arrays.

    Attributes:
      closed: ``(*inputs, *begins) -> results``. Each input, or result, in pieces is as
        many as it has pieces.
      begins: the last inputs, where pieces of arrays begin that are cut here: so that
        computations on equal pieces are equal.
      output_pieces: index of a result -> its pieces, if it is in pieces.
      whole_reads: the inputs in pieces that are read as one array.
    """

    closed: core.ClosedJaxpr
    begins: list[int]
    output_pieces: dict[int, Pieces]
    whole_reads: list[WholeRead]


# An array, or a concatenation of arrays.
_Value = Any


def run_in_pieces(
    closed: core.ClosedJaxpr,
    input_pieces: Mapping[int, Pieces],
    output_pieces: Mapping[int, Pieces | None],
    *,
    targets: Mapping[core.Var, Pieces] = MappingProxyType({}),
    keeps_pieces: bool = False,
    num_fixed: int | None = None,
) -> PiecewiseJaxpr:
    """Rewrites a jaxpr for inputs and results that are in pieces.

    Args:
      closed: the jaxpr.
      input_pieces: index of an input -> its pieces.
      output_pieces: index of a result -> its pieces; ``None`` if it is whole.
      targets: variable -> the pieces in which it is made, if it can be.
      keeps_pieces: True if all other results come in the pieces in which they are
        computed; False if they are put together.
      num_fixed: the number of first inputs that are parameters; the others are those
        of the batch. What follows from parameters alone, as a penalty does, is cut at
        constants: ``begins`` come with the batch. ``None``: all is cut at constants.
    """
    jaxpr = closed.jaxpr
    fixed_vars = _jaxpr.descendants(jaxpr, jaxpr.invars[:num_fixed])
    batch_vars = _jaxpr.descendants(jaxpr, jaxpr.invars[num_fixed:])
    target_pieces = find_target_pieces(jaxpr, output_pieces, targets)
    begins = list[int]()
    if num_fixed is not None:
        all_pieces = [*input_pieces.values(), *target_pieces.values()]
        begins = sorted({begin for pieces in all_pieces for begin in pieces.begins})
    whole_reads = list[WholeRead]()
    results_in_pieces: dict[int, Pieces] = {}

    input_specs = list[jax.ShapeDtypeStruct]()
    for i, var in enumerate(jaxpr.invars):
        spec = _jaxpr.spec(var.aval)
        pieces = input_pieces.get(i)
        input_specs += [spec] if pieces is None else pieces.specs(spec)
    begin_specs = [jax.ShapeDtypeStruct((), jnp.int32)] * len(begins)

    def run(*args: jax.Array) -> list[jax.Array]:
        arrays = iter(args[: len(input_specs)])
        begin_args = dict(zip(begins, args[len(input_specs) :], strict=True))
        values: dict[core.Var, _Value] = dict(
            zip(jaxpr.constvars, closed.consts, strict=True)
        )
        for i, var in enumerate(jaxpr.invars):
            if (pieces := input_pieces.get(i)) is None:
                values[var] = next(arrays)
            else:
                parts = list(itertools.islice(arrays, len(pieces.sizes)))
                values[var] = Concatenation(parts, pieces.axis, frozenset([i]))

        evaluation = _Evaluation(
            jaxpr,
            values,
            target_pieces=target_pieces,
            slices=PieceSlices(fixed_vars, batch_vars, begin_args),
        )
        evaluation.run()
        results = list[jax.Array]()
        for i, atom in enumerate(jaxpr.outvars):
            pieces = output_pieces.get(i)
            if i not in output_pieces and keeps_pieces:
                pieces = evaluation.pieces_of(atom)
            if pieces is None:
                results.append(evaluation.whole(evaluation.read(atom), eqn=None))
            else:
                results_in_pieces[i] = pieces
                results += evaluation.cut(atom, pieces)
        whole_reads.extend(evaluation.whole_reads)
        return results

    new_closed = make_jaxpr(run)(*input_specs, *begin_specs)
    return PiecewiseJaxpr(
        closed=new_closed,
        begins=begins,
        output_pieces=results_in_pieces,
        whole_reads=whole_reads,
    )


class _Evaluation:
    """The evaluation of a jaxpr some of whose variables are concatenations.

    Args:
      jaxpr: the jaxpr.
      values: variable -> value, of constants and inputs; results are added.
      target_pieces: variable -> the pieces in which it is made.
      slices: cuts whole arrays into pieces.

    Attributes:
      whole_reads: the reads of inputs in pieces as one array.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        values: dict[core.Var, _Value],
        *,
        target_pieces: Mapping[core.Var, Pieces],
        slices: PieceSlices,
    ) -> None:
        self._jaxpr = jaxpr
        self._values = values
        self._target_pieces = target_pieces
        self._slices = slices
        self.whole_reads = list[WholeRead]()

    def read(self, atom: Any) -> _Value:
        """Returns the value of a variable or literal."""
        return atom.val if isinstance(atom, core.Literal) else self._values[atom]

    def pieces_of(self, atom: Any) -> Pieces | None:
        """Returns the pieces of a variable or literal; ``None`` if it is whole."""
        value = self.read(atom)
        return value.pieces if isinstance(value, Concatenation) else None

    def run(self) -> None:
        """Evaluates all equations; those on whole arrays many at a time, for speed."""
        plain_eqns = list[core.JaxprEqn]()
        for eqn in self._jaxpr.eqns:
            if not self._is_piecewise(eqn):
                plain_eqns.append(eqn)
                continue
            self._bind_plain(plain_eqns)
            plain_eqns = []
            results = self._evaluate(eqn)
            self._values.update(zip(eqn.outvars, results, strict=True))
        self._bind_plain(plain_eqns)

    def _is_piecewise(self, eqn: core.JaxprEqn) -> bool:
        variables = _jaxpr.variables(eqn.invars)
        reads_pieces = any(
            isinstance(self._values.get(var), Concatenation) for var in variables
        )
        return reads_pieces or any(var in self._target_pieces for var in eqn.outvars)

    def _bind_plain(self, eqns: list[core.JaxprEqn]) -> None:
        if eqns:
            results = _jaxpr.bind_eqns(self._jaxpr, eqns, self._values)
            self._values.update(zip(_jaxpr.outvars_of(eqns), results, strict=True))

    # ------------------------------------------------------------ whole arrays and cuts

    def whole(self, value: _Value, eqn: core.JaxprEqn | None) -> jax.Array:
        """Returns a value as one array.

        Args:
          value: the value.
          eqn: the equation that reads it; ``None`` if it is a result.
        """
        if not isinstance(value, Concatenation):
            return value
        array = jax.lax.concatenate(value.arrays, value.axis)
        if value.input_indices:
            spec = _jaxpr.spec(jax.typeof(array))
            self.whole_reads.append(WholeRead(value.input_indices, eqn, spec))
        return array

    def cut(
        self, atom: Any, pieces: Pieces, eqn: core.JaxprEqn | None = None
    ) -> list[jax.Array]:
        """Returns the value of an atom in pieces.

        Args:
          atom: a variable or literal.
          pieces: the pieces.
          eqn: the equation that reads them; ``None`` if they are a result.
        """
        value = self.read(atom)
        if isinstance(value, Concatenation):
            if value.axis == pieces.axis:
                return value.regroup(pieces).arrays
            value = self.whole(value, eqn)
        if len(pieces.sizes) == 1:
            return [jnp.asarray(value)]

        return self._slices.cut(value, pieces, atom=atom, eqn=eqn)

    # ---------------------------------------------------------------------------- rules

    def _evaluate(self, eqn: core.JaxprEqn) -> Sequence[_Value]:
        """Evaluates an equation by a rule, or else on whole arrays."""
        name = eqn.primitive.name
        if name == "scan":
            results = self._scan(eqn)
        elif name in ("split", "unstack"):
            results = self._split(eqn)
        else:
            rules = {
                "concatenate": self._join,
                "dot_general": self._contract,
                "dynamic_slice": self._dynamic_slice,
                "slice": self._static_slice,
                "stack": self._join,
            }
            rule = rules.get(name, self._combine if name in _COMBINE else None)
            result = rule(eqn) if rule else None
            result = self._piece_by_piece(eqn) if result is None else result
            results = None if result is None else [result]
        if results is None:
            results = self._divide_bodies(eqn)
        return self._bind_whole(eqn) if results is None else results

    def _bind_whole(self, eqn: core.JaxprEqn) -> list[jax.Array]:
        operands = [self.whole(self.read(atom), eqn) for atom in eqn.invars]
        return self._bind(eqn, operands)

    def _bind(
        self,
        eqn: core.JaxprEqn,
        operands: Sequence[Any],
        params: Mapping[str, Any] | None = None,
    ) -> list[jax.Array]:
        """Evaluates an equation on other operands.

        They get variables of their own: the equation may read one variable twice, or
        literals, where pieces differ.
        """
        invars: list[Any] = [core.Var(jax.typeof(operand)) for operand in operands]
        eqn = eqn.replace(invars=invars, params=dict(params or eqn.params))
        return _jaxpr.bind(self._jaxpr, eqn, operands)

    def _concatenations(self, eqn: core.JaxprEqn) -> dict[int, Concatenation]:
        """Operand index -> the operand, for those that are in pieces."""
        operands = enumerate(map(self.read, eqn.invars))
        return {i: x for i, x in operands if isinstance(x, Concatenation)}

    def _piece_by_piece(self, eqn: core.JaxprEqn) -> Concatenation | None:
        """An equation that keeps the axis of the pieces: see `_axis_maps`."""
        result_pieces = self._result_pieces(eqn)
        if result_pieces is None or not _axis_maps.can_resize(eqn, result_pieces.axis):
            return None
        columns = list[list[Any]]()
        for i, atom in enumerate(eqn.invars):
            axis = _axis_maps.source_axis(eqn, i, result_pieces.axis)
            if axis is None:
                columns.append([self.read(atom)] * len(result_pieces.sizes))
                continue
            sizes = scale_sizes(result_pieces.sizes, _axis_maps.shape_of(atom)[axis])
            if sizes is None:
                return None
            columns.append(self.cut(atom, Pieces(axis, sizes), eqn))

        arrays = list[jax.Array]()
        for size, *operands in zip(result_pieces.sizes, *columns, strict=True):
            params = _axis_maps.resize(eqn, result_pieces.axis, size)
            arrays += self._bind(eqn, operands, params)
        input_indices = frozenset[int]().union(
            *[x.input_indices for x in self._concatenations(eqn).values()]
        )
        return Concatenation(arrays, result_pieces.axis, input_indices)

    def _result_pieces(self, eqn: core.JaxprEqn) -> Pieces | None:
        """The pieces of the result: all cuts of operands, and those of its target."""
        result_axes = set[int | None]()
        ends = set[int]()
        (var, *_) = eqn.outvars
        for i, operand in self._concatenations(eqn).items():
            result_axis = _axis_maps.axis_map(eqn, i).get(operand.axis)
            result_axes.add(result_axis)
            if result_axis is not None:
                length = _axis_maps.shape_of(var)[result_axis]
                sizes = scale_sizes(operand.pieces.sizes, length)
                if sizes is None:
                    return None
                ends.update(itertools.accumulate(sizes))
        if (target := self._target_pieces.get(var)) and result_axes <= {target.axis}:
            result_axes.add(target.axis)
            ends.update(target.ends)
        if len(result_axes) != 1:
            return None
        (axis,) = result_axes
        return None if axis is None else Pieces(axis, sizes_between(ends))

    def _combine(self, eqn: core.JaxprEqn) -> jax.Array | None:
        """A reduction along the axis of the pieces: of each, and then of these."""
        operand = self.read(eqn.invars[0])
        axes: Any = eqn.params["axes"]
        if not isinstance(operand, Concatenation) or operand.axis not in axes:
            return None
        combine = _COMBINE[eqn.primitive.name]
        (total,) = self._bind(eqn, operand.arrays[:1])
        for array in operand.arrays[1:]:
            total = combine(total, *self._bind(eqn, [array]))
        return total

    def _contract(self, eqn: core.JaxprEqn) -> jax.Array | None:
        """A product that sums along the axis of pieces: of each, and then of these."""
        params: Any = eqn.params
        (contracted, _) = params["dimension_numbers"]
        summed_axes = list(zip(*contracted, strict=True))
        operands = self._concatenations(eqn)
        for axes in summed_axes if operands else []:
            if any(operand.axis != axes[i] for i, operand in operands.items()):
                continue
            ends = {end for x in operands.values() for end in x.pieces.ends}
            sizes = sizes_between(ends)
            columns = [
                self.cut(atom, Pieces(axis, sizes), eqn)
                for atom, axis in zip(eqn.invars, axes, strict=True)
            ]
            products = [self._bind(eqn, x)[0] for x in zip(*columns, strict=True)]
            return functools.reduce(jax.lax.add, products)
        return None

    def _static_slice(self, eqn: core.JaxprEqn) -> _Value | None:
        """A slice along the axis of the pieces: of the pieces that it spans."""
        operand = self.read(eqn.invars[0])
        if not isinstance(operand, Concatenation):
            return None
        params: Any = eqn.params
        begin = params["start_indices"][operand.axis]
        end = params["limit_indices"][operand.axis]
        strides = params["strides"]
        length = operand.pieces.length
        is_whole = begin == 0 and end == length
        if is_whole or begin == end or (strides and strides[operand.axis] != 1):
            return None
        part = operand.slice(begin, end)
        arrays = part.arrays if isinstance(part, Concatenation) else [part]
        results = list[jax.Array]()
        for array in arrays:
            size = array.shape[operand.axis]
            starts = _axis_maps.with_size(params["start_indices"], operand.axis, 0)
            limits = _axis_maps.with_size(params["limit_indices"], operand.axis, size)
            new_params = {**params, "start_indices": starts, "limit_indices": limits}
            results += self._bind(eqn, [array], new_params)
        return results[0] if len(results) == 1 else operand._replace(arrays=results)

    def _dynamic_slice(self, eqn: core.JaxprEqn) -> _Value | None:
        """A slice that begins at a constant along the axis of the pieces."""
        operand = self.read(eqn.invars[0])
        if not isinstance(operand, Concatenation):
            return None
        start = eqn.invars[1 + operand.axis]
        slice_sizes: Any = eqn.params["slice_sizes"]
        size = slice_sizes[operand.axis]
        length = operand.pieces.length
        if not isinstance(start, core.Literal) or size == length:
            return None
        begin = min(max(int(start.val), 0), length - size)
        part = operand.slice(begin, begin + size)
        is_one = not isinstance(part, Concatenation)
        starts = list(map(self.read, eqn.invars[1:]))
        starts[operand.axis] = np.zeros((), _jaxpr.spec(start.aval).dtype)
        results = list[jax.Array]()
        for array in [part] if is_one else part.arrays:
            params = _axis_maps.resize(eqn, operand.axis, array.shape[operand.axis])
            results += self._bind(eqn, [array, *starts], params)
        return results[0] if is_one else operand._replace(arrays=results)

    def _join(self, eqn: core.JaxprEqn) -> Concatenation | None:
        """A concatenation along the axis of pieces of operands, or of its target.

        So it is with a stack, which has no operands along its new axis.
        """
        params: Any = eqn.params
        is_stack = eqn.primitive.name == "stack"
        axis = params["axis"] if is_stack else params["dimension"]
        target = self._target_pieces.get(eqn.outvars[0])
        is_target = target is not None and target.axis == axis
        operands = self._concatenations(eqn)
        if is_stack and operands:
            return None
        if any(operand.axis != axis for operand in operands.values()):
            return None
        if not operands and not is_target:
            return None

        arrays = list[jax.Array]()
        input_indices = frozenset[int]()
        for i, atom in enumerate(eqn.invars):
            if i in operands:
                arrays += operands[i].arrays
                input_indices |= operands[i].input_indices
            elif is_stack:
                arrays.append(jax.lax.expand_dims(self.read(atom), [axis]))
            else:
                arrays.append(self.read(atom))
        joined = Concatenation(arrays, axis, input_indices)
        return joined.regroup(target) if target and is_target else joined

    def _split(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A split along the axis of the pieces, into slices or into single rows."""
        params: Any = eqn.params
        operand = self.read(eqn.invars[0])
        if not isinstance(operand, Concatenation) or operand.axis != params["axis"]:
            return None
        if eqn.primitive.name == "unstack":
            rows = range(operand.pieces.length)
            return [
                jax.lax.squeeze(operand.slice_whole(i, i + 1), [operand.axis])
                for i in rows
            ]
        cuts = Pieces(operand.axis, tuple(map(int, params["sizes"])))
        if 0 in cuts.sizes:
            return None
        return [
            operand.slice(begin, end)
            for begin, end in zip(cuts.begins, cuts.ends, strict=True)
        ]

    def _divide_bodies(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A loop or a branch for each piece, if no body reads several pieces."""
        operands = self._concatenations(eqn)
        pieces = {i: operand.pieces for i, operand in operands.items()}
        divided = divide_bodies(eqn, pieces, run_in_pieces) if operands else None
        if divided is None:
            return None
        flat_operands = list[jax.Array]()
        for i, atom in enumerate(eqn.invars):
            if i in divided.operand_pieces:
                flat_operands += self.cut(atom, divided.operand_pieces[i], eqn)
            else:
                flat_operands.append(self.read(atom))
        arrays = iter(divided.bind(flat_operands))
        input_indices = frozenset[int]().union(
            *[operand.input_indices for operand in operands.values()]
        )
        results = list[_Value]()
        for i in range(len(eqn.outvars)):
            if (pieces_of_result := divided.result_pieces.get(i)) is None:
                results.append(next(arrays))
                continue
            parts = list(itertools.islice(arrays, len(pieces_of_result.sizes)))
            axis = pieces_of_result.axis
            results.append(Concatenation(parts, axis, input_indices))
        return results

    def _scan(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A scan along pieces: one for each, which goes on where the last one ended."""
        params: Any = eqn.params
        carry_slice = _jaxpr.carry_slice(eqn)
        num_carry = carry_slice.stop - carry_slice.start
        xs = eqn.invars[carry_slice.stop :]
        pieces = self._scan_pieces(eqn, xs, eqn.outvars[num_carry:])
        if pieces is None:
            return None

        fixed = [
            self.whole(self.read(atom), eqn) for atom in eqn.invars[: carry_slice.stop]
        ]
        consts = fixed[: carry_slice.start]
        carry = fixed[carry_slice]
        columns = [self.cut(atom, pieces, eqn) for atom in xs]
        order = list(range(len(pieces.sizes)))
        if params["reverse"]:
            order.reverse()
        # index of a piece -> the ys of its iterations
        ys_of_pieces: dict[int, list[jax.Array]] = {}
        for k in order:
            xs_of_piece = [column[k] for column in columns]
            results = self._bind(
                eqn,
                [*consts, *carry, *xs_of_piece],
                {**params, "length": pieces.sizes[k]},
            )
            carry = results[:num_carry]
            ys_of_pieces[k] = results[num_carry:]

        ys = list[_Value]()
        for i in range(len(eqn.outvars) - num_carry):
            arrays = [ys_of_pieces[k][i] for k in range(len(order))]
            ys.append(Concatenation(arrays, axis=0, input_indices=frozenset()))
        return [*carry, *ys]

    def _scan_pieces(
        self, eqn: core.JaxprEqn, xs: Sequence[Any], ys: Sequence[core.Var]
    ) -> Pieces | None:
        """The pieces of a scan: all cuts of what it goes along, and of its results.

        They are none if it goes along no pieces: these are constants, or carried.
        """
        ends = set[int]()
        for atom in xs:
            value = self.read(atom)
            if isinstance(value, Concatenation) and value.axis == 0:
                ends.update(value.pieces.ends)
        for var in ys:
            if (target := self._target_pieces.get(var)) and target.axis == 0:
                ends.update(target.ends)
        return Pieces(0, sizes_between(ends)) if ends else None

"""The evaluation of a jaxpr on arrays in pieces: the rules of `_piecewise`."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _axis_maps, _jaxpr
from ._axis_maps import AxisMap
from ._concatenation import Concatenation
from ._custom_rules import CUSTOM_RULES
from ._divided_bodies import divide_bodies
from ._divided_rules import divide_rule
from ._piece_slices import PieceSlices
from ._pieces import Pieces, find_accumulations, scale_sizes, sizes_between
from ._row_slices import compute_constant, find_rows, read_all_rows

# An array, or a concatenation of arrays.
_Value = Any
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
      is_accumulation: True if the equation accumulates along an axis, and its result is
        cut along that.
    """

    input_indices: frozenset[int]
    eqn: core.JaxprEqn | None
    spec: jax.ShapeDtypeStruct
    is_accumulation: bool = False


class PieceEvaluation:
    """The evaluation of a jaxpr some of whose variables are concatenations.

    Args:
      closed: the jaxpr.
      values: variable -> value, of constants and inputs; results are added.
      target_pieces: variable -> the pieces in which it is made.
      slices: cuts whole arrays into pieces.
      run_in_pieces: rewrites a body, by an evaluation of its own: see `_piecewise`.

    Attributes:
      whole_reads: the reads of inputs in pieces as one array.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        values: dict[core.Var, _Value],
        *,
        target_pieces: Mapping[core.Var, Pieces],
        slices: PieceSlices,
        run_in_pieces: Callable[..., Any],
    ) -> None:
        self._closed = closed
        self._jaxpr = closed.jaxpr
        self._values = values
        self._target_pieces = target_pieces
        self._slices = slices
        self._run_in_pieces = run_in_pieces
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
        array = value.whole()
        if value.input_indices and len(value.arrays) > 1:
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

        if self._slices.is_fixed(atom) and _jaxpr.is_inexact(atom.aval):
            self._note_accumulations(atom, pieces.axis)
        return self._slices.cut(value, pieces, atom=atom, eqn=eqn)

    def _note_accumulations(self, var: core.Var, axis: int) -> None:
        """Notes the accumulations of inputs that a variable follows from by slices."""
        jaxpr = self._jaxpr
        for eqn in find_accumulations(jaxpr, var, axis):
            needed = _jaxpr.ancestors(jaxpr, eqn.invars)
            indices = [i for i, invar in enumerate(jaxpr.invars) if invar in needed]
            spec = _jaxpr.spec(eqn.outvars[0].aval)
            read = WholeRead(frozenset(indices), eqn, spec, is_accumulation=True)
            self.whole_reads.append(read)

    # ---------------------------------------------------------------------------- rules

    def _evaluate(self, eqn: core.JaxprEqn) -> Sequence[_Value]:
        """Evaluates an equation by a rule, or else on whole arrays."""
        name = eqn.primitive.name
        rules = {
            "concatenate": self._join,
            "dot_general": self._contract,
            "dynamic_slice": self._take_rows,
            "gather": self._take_rows,
            "optimization_barrier": self._pass_barrier,
            "scan": self._scan,
            "slice": self._take_rows,
            "split": self._split,
            "stack": self._join,
            "unstack": self._split,
        }
        if name in _COMBINE:
            rules[name] = self._combine
        if name in rules and (results := rules[name](eqn)) is not None:
            return results
        for rule in (self._piece_by_piece, self._divide_bodies):
            if (results := rule(eqn)) is not None:
                return results
        return self._bind_whole(eqn)

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

    def _input_indices(self, eqn: core.JaxprEqn) -> frozenset[int]:
        """The inputs in pieces that the operands of an equation follow from."""
        operands = self._concatenations(eqn).values()
        return frozenset[int]().union(*[x.input_indices for x in operands])

    def _piece_by_piece(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """An equation that keeps the axis of the pieces: see `_axis_maps`."""
        axis_map = self._find_axis_map(eqn)
        sizes = None if axis_map is None else self._result_sizes(eqn, axis_map)
        if axis_map is None or sizes is None:
            return None
        columns = list[list[Any]]()
        for atom, axis in zip(eqn.invars, axis_map.operands, strict=True):
            if axis is None:
                columns.append([self.read(atom)] * len(sizes))
                continue
            operand_sizes = scale_sizes(sizes, _axis_maps.shape_of(atom)[axis])
            if operand_sizes is None:
                return None
            columns.append(self.cut(atom, Pieces(axis, operand_sizes), eqn))

        results_of_pieces = list[list[jax.Array]]()
        for size, *operands in zip(sizes, *columns, strict=True):
            params = _axis_maps.resize(eqn, axis_map, size)
            results_of_pieces.append(self._bind(eqn, operands, params))
        arrays_of_results = zip(*results_of_pieces, strict=True)
        input_indices = self._input_indices(eqn)
        return [
            Concatenation(list(arrays), axis, input_indices)
            for arrays, axis in zip(arrays_of_results, axis_map.results, strict=True)
        ]

    def _find_axis_map(self, eqn: core.JaxprEqn) -> AxisMap | None:
        """The map of the axis of all pieces; ``None`` if they have no common one."""
        maps = [
            _axis_maps.map_operand_axis(eqn, i, operand.axis)
            for i, operand in self._concatenations(eqn).items()
        ]
        if not maps:
            maps = [
                _axis_maps.map_result_axis(eqn, i, self._target_pieces[var].axis)
                for i, var in enumerate(eqn.outvars)
                if var in self._target_pieces
            ]
        return maps[0] if len({*maps}) == 1 else None

    def _result_sizes(
        self, eqn: core.JaxprEqn, axis_map: AxisMap
    ) -> tuple[int, ...] | None:
        """The sizes of pieces of results: all cuts of operands, and of the target."""
        length = _axis_maps.shape_of(eqn.outvars[0])[axis_map.results[0]]
        ends = set[int]()
        for operand in self._concatenations(eqn).values():
            sizes = scale_sizes(operand.pieces.sizes, length)
            if sizes is None:
                return None
            ends.update(itertools.accumulate(sizes))
        for var, axis in zip(eqn.outvars, axis_map.results, strict=True):
            if (target := self._target_pieces.get(var)) and target.axis == axis:
                ends.update(target.ends)
        return sizes_between(ends)

    def _combine(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A reduction along the axis of the pieces: of each, and then of these."""
        operand = self.read(eqn.invars[0])
        axes: Any = eqn.params["axes"]
        if not isinstance(operand, Concatenation) or operand.axis not in axes:
            return None
        combine = _COMBINE[eqn.primitive.name]
        (total,) = self._bind(eqn, operand.arrays[:1])
        for array in operand.arrays[1:]:
            total = combine(total, *self._bind(eqn, [array]))
        return [total]

    def _contract(self, eqn: core.JaxprEqn) -> list[_Value] | None:
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
            return [functools.reduce(jax.lax.add, products)]
        return None

    def _take_rows(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A read of some rows along the axis of the pieces: see `_row_slices`."""
        operand, *start_indices = map(self.read, eqn.invars)
        if not isinstance(operand, Concatenation):
            return None
        rows = find_rows(eqn, operand.pieces, self._read_constant)
        if rows is None:
            return None
        part = operand.slice(*rows)
        results = list[jax.Array]()
        for array in part.arrays:
            operands, params = read_all_rows(eqn, [array, *start_indices], operand.axis)
            results += self._bind(eqn, operands, params)
        is_gather = eqn.primitive.name == "gather"  # of one row
        return results if is_gather else [part._replace(arrays=results)]

    def _read_constant(self, atom: Any) -> np.ndarray | None:
        """The value of an atom that follows from no input; ``None`` for others."""
        if self._slices.follows_from_inputs(atom):
            return None
        return compute_constant(self._closed, atom)

    def _pass_barrier(self, eqn: core.JaxprEqn) -> list[_Value]:
        """A barrier for each operand, and for each piece of it."""
        results = list[_Value]()
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            value = self.read(atom)
            target = self._target_pieces.get(var)
            if target and not isinstance(value, Concatenation):
                arrays = self.cut(atom, target, eqn)
                value = Concatenation(arrays, target.axis, frozenset())
            if isinstance(value, Concatenation):
                arrays = list(map(jax.lax.optimization_barrier, value.arrays))
                results.append(value._replace(arrays=arrays))
            else:
                results.append(jax.lax.optimization_barrier(value))
        return results

    def _join(self, eqn: core.JaxprEqn) -> list[_Value] | None:
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
        return [joined.regroup(target) if target and is_target else joined]

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
            for begin, end in zip(cuts.starts, cuts.ends, strict=True)
        ]

    def _divide_bodies(self, eqn: core.JaxprEqn) -> list[_Value] | None:
        """A loop, branch or custom rule for each piece, if none reads several."""
        operands = self._concatenations(eqn)
        pieces = {i: operand.pieces for i, operand in operands.items()}
        if not operands or eqn.effects:
            return None
        if eqn.primitive.name in CUSTOM_RULES:
            divided = divide_rule(
                eqn,
                pieces,
                self._run_in_pieces,
                bind=functools.partial(self._bind, eqn),
                is_differentiated=list(map(self._may_have_gradient, eqn.invars)),
            )
        else:
            divided = divide_bodies(eqn, pieces, self._run_in_pieces)
        if divided is None:
            return None
        flat_operands = list[jax.Array]()
        for i, atom in enumerate(eqn.invars):
            if i in divided.operand_pieces:
                flat_operands += self.cut(atom, divided.operand_pieces[i], eqn)
            else:
                flat_operands.append(self.read(atom))
        arrays = iter(divided.bind(flat_operands))
        input_indices = self._input_indices(eqn)
        results = list[_Value]()
        for i in range(len(eqn.outvars)):
            if (pieces_of_result := divided.result_pieces.get(i)) is None:
                results.append(next(arrays))
                continue
            parts = list(itertools.islice(arrays, len(pieces_of_result.sizes)))
            axis = pieces_of_result.axis
            results.append(Concatenation(parts, axis, input_indices))
        return results

    def _may_have_gradient(self, atom: Any) -> bool:
        is_inexact = _jaxpr.is_inexact(atom.aval)
        return is_inexact and self._slices.follows_from_inputs(atom)

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

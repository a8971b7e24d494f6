"""Scans that index arrays by a counter, as scans along these arrays.

    scan(lambda x, i: f(x, w[i]), x, arange(n))  =  scan(lambda x, row: f(x, row), x, w)

The array is a constant of the loop on the left, all of which each iteration seems to
need. What a body computes from constants alone, such as an index from a counter, is run
at once for all iterations. Where it is 0, 1, ..., n - 1, and nothing else of the array
is read, the loop goes along it. A slice of one row of the array is a slice of the row.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _inlining, _jaxpr, _scans
from ._explicit_dtypes import make_jaxpr


class _RowRead(NamedTuple):
    """A read of one row of an array.

    Attributes:
      axis: the axis along which it is one row.
      start: the variable that is the index of the row.
    """

    axis: int
    start: core.Var


def scan_along_counted(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation, whose scans go along what they index by a counter."""
    # id of a scan -> index of an operand that it goes along -> the axis
    counted: dict[int, dict[int, int]] = {}
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "scan" and (axes := _find_counted(closed, eqn)):
            counted[id(eqn)] = axes

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if id(eqn) not in counted:
            return None
        return lambda operands: _scan_along(eqn, operands, counted[id(eqn)])

    return _jaxpr.rewrite(closed, rule) if counted else closed


def _find_counted(closed: core.ClosedJaxpr, eqn: core.JaxprEqn) -> dict[int, int]:
    """Finds what a scan indexes by a counter: index of an operand -> axis of rows."""
    params: Any = eqn.params
    length: int = params["length"]
    carry = _jaxpr.carry_slice(eqn)
    body = _inlining.open_checkpoints(params["jaxpr"])
    body = _jaxpr.dce_jaxpr(body, body.jaxpr.outvars)
    # index of an operand -> its reads
    reads: dict[int, list[_RowRead]] = {}
    for i in range(carry.start):
        reads_of_operand = _find_row_reads(body.jaxpr, body.jaxpr.invars[i], length)
        if reads_of_operand:
            reads[i] = reads_of_operand
    if not reads:
        return {}

    constant = _find_constant_inputs(closed, eqn, body)
    computed = _computable(body, constant)
    # index of an operand whose rows follow from constants -> the index of each row
    row_indices: dict[int, list[core.Var]] = {}
    for i, reads_of_operand in reads.items():
        starts = [read.start for read in reads_of_operand]
        if computed.issuperset(starts):
            row_indices[i] = starts
    if not row_indices:
        return {}
    all_indices = list(itertools.chain.from_iterable(row_indices.values()))
    values = _run_constant_part(closed, eqn, body, constant, all_indices)
    counters = set[core.Var]()
    for var, value in zip(all_indices, values, strict=True):
        if np.array_equal(value, np.arange(length)):
            counters.add(var)
    return {
        i: reads[i][0].axis
        for i, starts in row_indices.items()
        if counters.issuperset(starts)
    }


def _find_row_reads(jaxpr: core.Jaxpr, var: core.Var, length: int) -> list[_RowRead]:
    """The reads of an array, if all are of one row along one axis of some length."""
    reads = list[_RowRead]()
    for eqn in jaxpr.eqns:
        if var not in _jaxpr.variables(eqn.invars):
            continue
        if eqn.primitive.name != "dynamic_slice":
            return []
        operand, *starts = list[Any](eqn.invars)
        slice_sizes: Any = eqn.params["slice_sizes"]
        shape = operand.aval.shape
        cut_axes = [a for a in range(len(shape)) if slice_sizes[a] != shape[a]]
        if operand is not var or var in _jaxpr.variables(starts) or len(cut_axes) != 1:
            return []
        (axis,) = cut_axes
        is_row = slice_sizes[axis] == 1 and shape[axis] == length
        if not is_row or isinstance(starts[axis], core.Literal):
            return []
        reads.append(_RowRead(axis, starts[axis]))
    has_one_axis = len({read.axis for read in reads}) == 1
    is_returned = var in _jaxpr.variables(jaxpr.outvars)
    return reads if has_one_axis and not is_returned else []


def _find_constant_inputs(
    closed: core.ClosedJaxpr, eqn: core.JaxprEqn, body: core.ClosedJaxpr
) -> list[int]:
    """The inputs of the body of a scan that follow from no argument of a jaxpr.

    A carry does if it begins so, and follows from nothing else in each iteration.
    """
    constants = _computable(closed, [])
    atoms: list[Any] = list(eqn.invars)
    constant = [
        i
        for i, atom in enumerate(atoms)
        if isinstance(atom, core.Literal) or atom in constants
    ]
    carry = _jaxpr.carry_slice(eqn)
    while True:
        computed = _computable(body, constant)
        changed = [
            i
            for i in constant
            if carry.start <= i < carry.stop
            and not _jaxpr.variables([body.jaxpr.outvars[i - carry.start]]) <= computed
        ]
        if not changed:
            return constant
        constant = [i for i in constant if i not in changed]


def _computable(closed: core.ClosedJaxpr, inputs: Sequence[int]) -> set[core.Var]:
    """The variables that follow from some inputs, and constants, alone."""
    jaxpr = closed.jaxpr
    roots = [*jaxpr.constvars, *(jaxpr.invars[i] for i in inputs)]
    return _jaxpr.computable_from(jaxpr, roots, lambda eqn: not eqn.effects)


def _run_constant_part(
    closed: core.ClosedJaxpr,
    eqn: core.JaxprEqn,
    body: core.ClosedJaxpr,
    constant: Sequence[int],
    outvars: Sequence[core.Var],
) -> list[np.ndarray]:
    """Runs what the iterations of a scan compute from constants alone.

    Args:
      closed: the jaxpr that the scan is in.
      eqn: the scan.
      body: its body.
      constant: the inputs of the body that are constants.
      outvars: variables of the body that follow from these alone.

    Returns:
      The values of each variable, by the index of the slice that the scan is at.
    """
    carry = _jaxpr.carry_slice(eqn)
    carried = [i for i in constant if carry.start <= i < carry.stop]
    results = [body.jaxpr.outvars[i - carry.start] for i in carried]
    jaxpr = _jaxpr.dce_jaxpr(body, [*results, *outvars]).jaxpr
    jaxpr = jaxpr.replace(
        invars=[body.jaxpr.invars[i] for i in constant],
        eqns=[inner for inner in jaxpr.eqns if not inner.effects],
        effects=set(),
    )
    run_body = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, body.consts))

    atoms = [eqn.invars[i] for i in constant]
    outside = _jaxpr.dce_jaxpr(closed, atoms).jaxpr
    outside = outside.replace(
        invars=[],
        eqns=[inner for inner in outside.eqns if not inner.effects],
        effects=set(),
    )
    run_outside = core.jaxpr_as_fun(core.ClosedJaxpr(outside, closed.consts))
    num_consts = sum(i < carry.start for i in constant)
    first_xs = num_consts + len(carried)
    # Also within a trace, such as that of a caller.
    with jax.ensure_compile_time_eval():
        operands = run_outside()
        indices = range(len(operands))
        results = _scans.run_scan(
            run_body,
            operands,
            carried=indices[num_consts:first_xs],
            along=indices[first_xs:],
            like=eqn,
        )
    return [np.asarray(y) for y in results[len(carried) :]]


def _scan_along(
    eqn: core.JaxprEqn, operands: Sequence[Any], axes: Mapping[int, int]
) -> list[Any]:
    """Evaluates a scan along operands that were constants of it.

    Args:
      eqn: the scan.
      operands: its operands.
      axes: index of an operand -> the axis along which the scan goes.
    """
    params: Any = eqn.params
    carry = _jaxpr.carry_slice(eqn)
    run_rows = core.jaxpr_as_fun(_of_one_row(params["jaxpr"], axes))
    scanned = list(operands)
    for i, axis in axes.items():
        scanned[i] = jnp.moveaxis(operands[i], axis, 0)

    def body(*args: Any) -> list[Any]:
        rows = list(args)
        for i, axis in axes.items():
            rows[i] = jnp.expand_dims(args[i], axis)
        return run_rows(*rows)

    indices = range(len(operands))
    return _scans.run_scan(
        body,
        scanned,
        carried=indices[carry],
        along=[*axes, *indices[carry.stop :]],
        like=eqn,
    )


def _of_one_row(closed: core.ClosedJaxpr, axes: Mapping[int, int]) -> core.ClosedJaxpr:
    """A jaxpr that slices one row of some inputs, for inputs that are that row alone.

    A start beyond the end is clamped, as that of any slice in JAX.

    Args:
      closed: the jaxpr.
      axes: index of an input -> the axis along which it has one row.
    """
    # What nothing needs may read all rows.
    closed = _jaxpr.dce_jaxpr(closed, closed.jaxpr.outvars)
    axis_of_var = {closed.jaxpr.invars[i]: axis for i, axis in axes.items()}

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        inner_axes: dict[int, int] = {}
        for i, atom in enumerate(eqn.invars):
            if not isinstance(atom, core.Literal) and atom in axis_of_var:
                inner_axes[i] = axis_of_var[atom]
        if not inner_axes or not _jaxpr.inner_jaxprs(eqn):
            return None
        (inner,) = _jaxpr.inner_jaxprs(eqn)
        run = core.jaxpr_as_fun(_of_one_row(inner, inner_axes))
        if eqn.primitive.name in _jaxpr.CHECKPOINTS:
            params: Any = eqn.params
            policy = params["policy"]
            run = jax.checkpoint(run, policy=policy, prevent_cse=params["prevent_cse"])
        return lambda operands: run(*operands)

    specs = _jaxpr.specs(closed.jaxpr.invars)
    for i, axis in axes.items():
        shape = list(specs[i].shape)
        shape[axis] = 1
        specs[i] = jax.ShapeDtypeStruct(shape, specs[i].dtype)
    return make_jaxpr(lambda *args: _jaxpr.evaluate(closed, args, rule))(*specs)

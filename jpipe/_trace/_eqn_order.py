"""The order of equations before a program is cut, and how each one runs.

`sink_equations` moves each equation right before the first one that reads its results.
A program may compute a value early that only a late stage reads, such as a decoder's
embedding before the encoder. Moved behind the encoder, the value crosses fewer stages:

    e = embed y          h = encode x
    h = encode x    ->   e = embed y
    z = decode h e       z = decode h e

`unify_eqn_kinds` makes the programs of all sizes of micro-batches agree on which
equations run once per step: their results are the same arrays for all micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._min_cut import total_bytes
from ._boundaries import is_mark
from ._traced_function import EqnKind, TracedFunction


def sink_equations(
    traced_functions: Mapping[int, TracedFunction],
) -> dict[int, TracedFunction]:
    """Moves each equation right before the first one that reads its results.

    An equation stays where it is if larger operands would be held in place of its
    results, if it marks the end of a stage, if it has effects, or if its results are
    returned.

    Programs with the same equations as the first one get its order, as few bytes of one
    example are many of two.

    Args:
      traced_functions: micro-batch size -> trace; the first micro-batch first.
    """
    first = next(iter(traced_functions.values()))
    first_fingerprint = _fingerprint(first)
    first_order = _sunk_order(first)
    sunk = dict[int, TracedFunction]()
    for size, traced in traced_functions.items():
        has_equal_eqns = _fingerprint(traced) == first_fingerprint
        order = first_order if has_equal_eqns else _sunk_order(traced)
        sunk[size] = _in_order(traced, order)
    return sunk


def unify_eqn_kinds(
    traced_functions: Mapping[int, TracedFunction],
) -> dict[int, TracedFunction]:
    """Gives programs with the same equations as the first one the same kinds of these.

    Results of parameters alone that have another shape in each program are computed by
    a stage, and not once per step.

    Args:
      traced_functions: micro-batch size -> trace; the first micro-batch first.
    """
    first = next(iter(traced_functions.values()))
    first_fingerprint = _fingerprint(first)
    equal_programs = {
        size: traced
        for size, traced in traced_functions.items()
        if _fingerprint(traced) == first_fingerprint
    }
    common_kinds = _common_kinds(list(equal_programs.values()))
    unified = dict[int, TracedFunction]()
    for size, traced in traced_functions.items():
        kinds = common_kinds if size in equal_programs else traced.eqn_kinds
        unified[size] = replace(traced, fixed_eqn_kinds=kinds)
    return unified


def _common_kinds(traced_functions: Sequence[TracedFunction]) -> list[EqnKind]:
    """The kinds of the equations of programs that have the same ones."""
    first = traced_functions[0]
    kinds = list(first.eqn_kinds)
    # Variables whose shape differs between programs, or that follow from such; and
    # those that a stage makes because of that.
    varying = set[core.Var]()
    moved_to_stage = set[core.Var]()
    for index, eqn in enumerate(first.closed.jaxpr.eqns):
        operands = _jaxpr.variables(eqn.invars)
        if not _has_varying_shape(traced_functions, index) and varying.isdisjoint(
            operands
        ):
            continue
        varying.update(eqn.outvars)
        if kinds[index] == EqnKind.ONCE or not moved_to_stage.isdisjoint(operands):
            kinds[index] = EqnKind.STAGE
            moved_to_stage.update(eqn.outvars)
    return kinds


def _has_varying_shape(traced_functions: Sequence[TracedFunction], index: int) -> bool:
    """True if the results of an equation have other shapes in some programs."""
    avals = list[list[Any]]()
    for traced in traced_functions:
        avals.append([var.aval for var in traced.closed.jaxpr.eqns[index].outvars])
    return any(avals_of_program != avals[0] for avals_of_program in avals)


def _fingerprint(traced: TracedFunction) -> list[Any]:
    """The primitive of each equation, and the equations that make its operands."""
    producer = traced.producer
    fingerprint = []
    for eqn in traced.closed.jaxpr.eqns:
        operands = [var for var in eqn.invars if not isinstance(var, core.Literal)]
        producers = [producer.get(var) for var in operands]
        fingerprint.append((eqn.primitive.name, producers))
    return fingerprint


def _in_order(traced: TracedFunction, order: Sequence[int]) -> TracedFunction:
    """The program with its equations, and their kinds, in another order."""
    jaxpr = traced.closed.jaxpr
    jaxpr = jaxpr.replace(eqns=[jaxpr.eqns[index] for index in order])
    return replace(
        traced,
        closed=core.ClosedJaxpr(jaxpr, traced.closed.consts),
        fixed_eqn_kinds=[traced.eqn_kinds[index] for index in order],
    )


def _sunk_order(traced: TracedFunction) -> list[int]:
    """The order of the equations, each right before the first one that reads it."""
    jaxpr = traced.closed.jaxpr
    returned = _jaxpr.variables(jaxpr.outvars)
    of_stages = set[core.Var]()
    for eqn, eqn_kind in zip(jaxpr.eqns, traced.eqn_kinds, strict=True):
        if eqn_kind == EqnKind.STAGE:
            of_stages.update(eqn.outvars)
    # index of an equation -> that of the equation before which it is put
    target = list(range(len(jaxpr.eqns)))
    # variable -> the targets of the equations that read it
    reader_targets: dict[core.Var, list[int]] = {}
    for index in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[index]
        operands = _jaxpr.variables(eqn.invars)
        readers = list[int]()
        for var in eqn.outvars:
            readers += reader_targets.get(var, [])
        may_move = not (eqn.effects or is_mark(eqn))
        if readers and may_move and returned.isdisjoint(eqn.outvars):
            first_reader = min(readers)
            # Operands that nobody else reads so late would be held in its place.
            held = {
                var
                for var in operands & of_stages
                if max(reader_targets.get(var, [0])) < first_reader
            }
            if total_bytes(held) <= total_bytes(eqn.outvars):
                target[index] = first_reader
        for var in operands:
            reader_targets.setdefault(var, []).append(target[index])
    return sorted(range(len(target)), key=lambda index: (target[index], index))

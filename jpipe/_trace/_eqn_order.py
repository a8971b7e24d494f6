"""Moves equations to where they are first read.

A program may compute a value early that only a late stage reads, such as a decoder's
embedding before the encoder. Moved behind the encoder, the value crosses fewer stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core

from .._jaxprs import _jaxpr
from .._jaxprs._min_cut import total_bytes
from ._traced_function import EqnKind, TracedFunction


def sink_equations(
    programs: Mapping[int, TracedFunction], *, moves: bool = True
) -> dict[int, TracedFunction]:
    """Moves each equation right before the first one that reads its results.

    An equation stays where it is if larger operands would be held in place of its
    results, if it has effects, or if its results are returned.

    Programs with the same equations as the first one get its order and its kinds, as
    few bytes of one example are many of two. Results of parameters alone that have
    another shape in each program are made by a stage, and not once per step.

    Args:
      programs: the programs by the sizes of their micro-batches, the first first.
      moves: whether equations move; those of a list stay in their layers.
    """
    first = next(iter(programs.values()))
    find_order = _sunk_order if moves else _present_order
    fingerprint = _fingerprint(first)
    equal_programs = {
        size: program
        for size, program in programs.items()
        if _fingerprint(program) == fingerprint
    }
    order = find_order(first)
    kinds = _common_kinds(list(equal_programs.values()))

    ordered = {}
    for size, program in programs.items():
        if size in equal_programs:
            ordered[size] = _ordered(program, order, kinds)
        else:
            ordered[size] = _ordered(program, find_order(program), program.kinds)
    return ordered


def _common_kinds(programs: Sequence[TracedFunction]) -> list[EqnKind]:
    """The kinds of the equations of programs that have the same ones."""
    kinds = list[EqnKind]()
    # Variables whose shape differs between programs, or that follow from such; and
    # those that a stage makes because of that.
    varying = set[core.Var]()
    moved_to_stage = set[core.Var]()
    columns = zip(*(program.closed.jaxpr.eqns for program in programs), strict=True)
    for kind, (eqn, *other_eqns) in zip(programs[0].kinds, columns, strict=True):
        operands = _jaxpr.variables(eqn.invars)
        avals = [var.aval for var in eqn.outvars]
        differs = any(
            [var.aval for var in other.outvars] != avals for other in other_eqns
        )
        if differs or not varying.isdisjoint(operands):
            varying.update(eqn.outvars)
            if kind == EqnKind.ONCE or not moved_to_stage.isdisjoint(operands):
                kind = EqnKind.STAGE
                moved_to_stage.update(eqn.outvars)
        kinds.append(kind)
    return kinds


def _fingerprint(program: TracedFunction) -> list[Any]:
    """The primitive of each equation, and the equations that make its operands."""
    producer = program.producer
    fingerprint = []
    for eqn in program.closed.jaxpr.eqns:
        operands = [var for var in eqn.invars if not isinstance(var, core.Literal)]
        producers = [producer.get(var) for var in operands]
        fingerprint.append((eqn.primitive.name, producers))
    return fingerprint


def _ordered(
    program: TracedFunction, order: Sequence[int], kinds: Sequence[EqnKind]
) -> TracedFunction:
    jaxpr = program.closed.jaxpr
    jaxpr = jaxpr.replace(eqns=[jaxpr.eqns[index] for index in order])
    return replace(
        program,
        closed=core.ClosedJaxpr(jaxpr, program.closed.consts),
        known_kinds=[kinds[index] for index in order],
    )


def _present_order(program: TracedFunction) -> list[int]:
    return [*range(len(program.closed.jaxpr.eqns))]


def _sunk_order(program: TracedFunction) -> list[int]:
    """The order of the equations, each right before the first one that reads it."""
    jaxpr = program.closed.jaxpr
    returned = _jaxpr.variables(jaxpr.outvars)
    of_stages = {
        var
        for eqn, kind in zip(jaxpr.eqns, program.kinds, strict=True)
        if kind == EqnKind.STAGE
        for var in eqn.outvars
    }
    # The equation before which each one is put; variable -> those of its readers.
    target = list(range(len(jaxpr.eqns)))
    reader_targets: dict[core.Var, list[int]] = {}
    for index in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[index]
        operands = _jaxpr.variables(eqn.invars)
        readers = [i for var in eqn.outvars for i in reader_targets.get(var, ())]
        if readers and not eqn.effects and returned.isdisjoint(eqn.outvars):
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

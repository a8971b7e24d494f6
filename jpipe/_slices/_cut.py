"""Where a program is divided: at marks, or where it balances and few bytes cross."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from jax.extend import core

from .._jaxprs import _cheapest, _jaxpr, _source, _work
from .._warn import WarnOnce
from . import _marks
from ._program import Traced

# A piece is at least one of so many parts of a stage.
_PARTS = 8
# So much more than an even share of the work is worth a warning.
_UNEVEN = 1.25
# An equation of fewer operations takes less than the start of the program that it is
# in, some microseconds: there is nothing to balance.
_LEAST_WORK = 2**15


def positions(
    program: Traced, num_stages: int | None, default: int, warnings: WarnOnce
) -> list[int]:
    """The numbers of the equations with which the stages but the first begin.

    Args:
      program: what is divided.
      num_stages: in how many stages; ``None``: as many as marks make.
      default: in how many where there are no marks either.
      warnings: of the pipeline.

    Raises:
      ValueError: if it cannot be divided so.
    """
    marks = _marks.positions(program.closed)
    if marks:
        if num_stages not in (None, len(marks) + 1):
            raise ValueError(
                f"num_stages={num_stages}: jpipe.boundary marks {len(marks)} places, "
                f"so that there are {len(marks) + 1} stages; leave out num_stages"
            )
        return marks
    return _balanced(program, default if num_stages is None else num_stages, warnings)


def _balanced(program: Traced, num_stages: int, warnings: WarnOnce) -> list[int]:
    """The least largest cost of a stage among the cuts that few bytes cross."""
    if num_stages == 1:
        return []
    cost = _costs(program)
    _check_atoms(program, cost, num_stages)
    total = [0, *accumulate(cost)]
    crossing = crossing_bytes(program)
    places = _candidates(program, crossing, total, num_stages)
    if len(places) < num_stages - 1:
        raise ValueError(
            f"num_stages={num_stages}: the program can be divided in {len(places) + 1} "
            f"at most; type num_stages={len(places) + 1}"
        )
    # For each end, of so many stages before it: the largest cost, bytes, and the cuts.
    ends = [*places, len(cost)]
    best: list[Any] = [(total[end], 0, ()) for end in ends]
    for _ in range(1, num_stages):
        best = [
            min(
                (_joined(best[k], total[end] - total[ends[k]], ends[k], crossing))
                for k in range(number)
            )
            if number
            else (np.inf, 0, ())
            for number, end in enumerate(ends)
        ]
    cuts = list(best[-1][2])
    _warn_of_one(program, cost, cuts, warnings)
    return cuts


def _warn_of_one(
    program: Traced, cost: Sequence[float], cuts: Sequence[int], warnings: WarnOnce
) -> None:
    """Warns of one equation because of which a stage has more than its share."""
    ends = [0, *cuts, len(cost)]
    ranges = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    work = [sum(cost[i] for i in stage) for stage in ranges]
    fullest = max(range(len(work)), key=work.__getitem__)
    largest = max(ranges[fullest], key=cost.__getitem__)
    num_stages, total = len(work), max(sum(work), 1)
    is_most_of_it = cost[largest] > work[fullest] / 2
    if work[fullest] * num_stages <= _UNEVEN * total or not is_most_of_it:
        return
    if cost[largest] < _LEAST_WORK:
        return
    eqn = program.closed.jaxpr.eqns[largest]
    fewer = max(int(_UNEVEN * total / work[fullest]), 1)
    loop = "write the loop in Python, or " if _jaxpr.inside(eqn) else ""
    warnings(
        "balance",
        f"stage {fullest} has {work[fullest] / total:.0%} of the estimated work, where "
        f"an even share of {num_stages} stages is {1 / num_stages:.0%}: one operation, "
        f"{_source.told(eqn)} is {cost[largest] / total:.0%} and cannot be divided; "
        f"{loop}take fewer stages: num_stages={fewer}",
    )


def pieces(program: Traced, num_stages: int) -> list[int]:
    """The places where few bytes cross, at marks or else as for so many stages.

    Between two there is something to compute, at least a part of a stage.
    """
    if marks := _marks.positions(program.closed):
        return marks
    total = [0, *accumulate(_costs(program))]
    least, found = total[-1] / num_stages / _PARTS, [0]
    for at in _candidates(program, crossing_bytes(program), total, num_stages):
        if total[at] - total[found[-1]] >= least <= total[-1] - total[at]:
            found.append(at)
    return found[1:]


def _costs(program: Traced) -> list[float]:
    """Of each equation what it costs a stage, in operations."""
    return [
        _work.of_equation(eqn) if kind == "stage" else 0
        for eqn, kind in zip(program.closed.jaxpr.eqns, program.kinds, strict=True)
    ]


def _joined(before: Any, cost: float, at: int, crossing: Sequence[int]) -> Any:
    """The largest cost, the bytes and the cuts of some stages and one more."""
    most, moved, cuts = before
    return max(most, cost), moved + crossing[at], (*cuts, at)


def _check_atoms(program: Traced, cost: Sequence[float], num_stages: int) -> None:
    """Checks that no equation is more than a stage."""
    if not cost:
        return
    largest = max(range(len(cost)), key=cost.__getitem__)
    eqn, share = program.closed.jaxpr.eqns[largest], cost[largest] / max(sum(cost), 1)
    if _jaxpr.inside(eqn) and share > 1.5 / num_stages:
        raise ValueError(
            f"num_stages={num_stages}: one operation, {_source.told(eqn)} is "
            f"{share:.0%} of the work and cannot be divided; write the loop over "
            f"layers in Python, or take fewer stages"
        )


def crossing_bytes(program: Traced) -> list[int]:
    """Before each equation, the bytes that stages made before and read from it on."""
    eqns, kinds = program.closed.jaxpr.eqns, program.kinds
    made = {
        var: i
        for i, (eqn, kind) in enumerate(zip(eqns, kinds, strict=True))
        for var in eqn.outvars
        if kind == "stage"
    }
    change = [0] * (len(eqns) + 2)
    last: dict[core.Var, int] = {}
    for i, eqn in enumerate(eqns):
        for var in eqn.invars:
            if not isinstance(var, core.Literal) and var in made:
                last[var] = i
    for var, end in last.items():
        change[made[var] + 1] += _cheapest.nbytes(var)
        change[end + 1] -= _cheapest.nbytes(var)
    return [*accumulate(change)][: len(eqns) + 1]


def _candidates(
    program: Traced, crossing: Sequence[int], total: Sequence[float], num_stages: int
) -> list[int]:
    """Places that fewer bytes cross than others up to a quarter of a stage away.

    Of neighbours that are equal the first, right behind what makes the value that
    crosses: so equal blocks are divided alike. Around a call of many equations, such as
    a block in `jax.checkpoint`, places are no neighbours.
    """
    eqns, kinds = program.closed.jaxpr.eqns, program.kinds
    stage = [i for i, kind in enumerate(kinds) if kind == "stage"]
    window, found = total[-1] / num_stages / 2, []
    least = total[-1] / num_stages / _PARTS
    if not stage:
        return []
    for i in range(stage[0] + 1, stage[-1] + 1):
        begin = max(bisect_left(total, total[i] - window / 2), stage[0] + 1)
        end = min(bisect_left(total, total[i] + window / 2), stage[-1])
        around = crossing[begin : end + 1] or crossing[i : i + 1]
        is_first = not found or found[-1] != i - 1 or crossing[i] != crossing[i - 1]
        is_call = bool(_jaxpr.bodies(eqns[i - 1])) and total[i] - total[i - 1] >= least
        is_first = is_first or is_call
        if crossing[i] <= 1.01 * min(around) and kinds[i - 1] == "stage" and is_first:
            found.append(i)
    return found

"""Where a program is divided: at marks, or where it balances and few bytes cross.

A cut is kept as how often each parameter was read before it. So it means the same in
the trace of another batch size, whose equations may be others.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from jax.extend import core

from .._jaxprs import _cheapest, _flops, _jaxpr
from . import _marks
from ._program import Traced

# So many operations take as long as to move a byte.
_PER_BYTE = 10
# A piece is at least one of so many parts of a stage.
_PARTS = 8


def positions(program: Traced, num_stages: int | None, default: int) -> list[int]:
    """The numbers of the equations with which the stages but the first begin.

    Args:
      program: what is divided.
      num_stages: in how many stages; ``None``: as many as marks say.
      default: in how many where there are no marks either.

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
    return _balanced(program, default if num_stages is None else num_stages)


def _balanced(program: Traced, num_stages: int) -> list[int]:
    """The least largest cost of a stage among the cuts that few bytes cross."""
    if num_stages == 1:
        return []
    eqns, kinds = program.closed.jaxpr.eqns, program.kinds
    cost = _costs(program)
    _check_atoms(program, cost, num_stages)
    total = [0, *accumulate(cost)]
    crossing = crossing_bytes(program)
    places = _candidates(crossing, total, kinds, num_stages)
    if len(places) < num_stages - 1:
        raise ValueError(
            f"num_stages={num_stages}: the program can be divided in {len(places) + 1} "
            f"at most; take fewer stages"
        )
    # For each end, of so many stages before it: the largest cost, bytes, and the cuts.
    ends = [*places, len(eqns)]
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
    return list(best[-1][2])


def pieces(program: Traced, num_stages: int) -> list[int]:
    """The places where few bytes cross, at marks or else as for so many stages.

    Between two there is something to compute, at least a part of a stage.
    """
    if marks := _marks.positions(program.closed):
        return marks
    total = [0, *accumulate(_costs(program))]
    least, found = total[-1] / num_stages / _PARTS, [0]
    for at in _candidates(crossing_bytes(program), total, program.kinds, num_stages):
        if total[at] - total[found[-1]] >= least <= total[-1] - total[at]:
            found.append(at)
    return found[1:]


def _costs(program: Traced) -> list[float]:
    """Of each equation what it costs a stage, in operations."""
    return [
        (_flops.of_equation(eqn) + _PER_BYTE * sum(map(_cheapest.nbytes, eqn.outvars)))
        * (kind == "stage")
        for eqn, kind in zip(program.closed.jaxpr.eqns, program.kinds, strict=True)
    ]


def _joined(before: Any, cost: float, at: int, crossing: Sequence[int]) -> Any:
    """The largest cost, the bytes and the cuts of some stages and one more."""
    most, moved, cuts = before
    return max(most, cost), moved + crossing[at], (*cuts, at)


def _check_atoms(program: Traced, cost: Sequence[float], num_stages: int) -> None:
    """Checks that no equation is more than a stage."""
    largest = max(range(len(cost)), key=cost.__getitem__)
    eqn, share = program.closed.jaxpr.eqns[largest], cost[largest] / max(sum(cost), 1)
    if _jaxpr.inside(eqn) and share > 1.5 / num_stages:
        raise ValueError(
            f"num_stages={num_stages}: one operation, {eqn.primitive.name}, is "
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
    crossing: Sequence[int],
    total: Sequence[float],
    kinds: Sequence[str],
    num_stages: int,
) -> list[int]:
    """Places that fewer bytes cross than others within half a stage around them.

    Of neighbours that are equal the first, right behind what makes the value that
    crosses: so equal blocks are divided alike.
    """
    stage = [i for i, kind in enumerate(kinds) if kind == "stage"]
    window, found = total[-1] / num_stages / 2, []
    if not stage:
        return []
    for i in range(stage[0] + 1, stage[-1] + 1):
        begin = max(bisect_left(total, total[i] - window / 2), stage[0] + 1)
        end = min(bisect_left(total, total[i] + window / 2), stage[-1])
        around = crossing[begin : end + 1] or crossing[i : i + 1]
        is_first = not found or found[-1] != i - 1 or crossing[i] != crossing[i - 1]
        if crossing[i] <= 1.01 * min(around) and kinds[i - 1] == "stage" and is_first:
            found.append(i)
    return found


@dataclass(frozen=True)
class Cuts:
    """Where a program is divided, in numbers that mean the same in another trace.

    Attributes:
      positions: the numbers of the equations with which the stages but the first begin.
      size: how many equations there are.
      names: a digest of their primitives.
      reads: of each cut how often each parameter is read before it.
      totals: how often each is read at all.
    """

    positions: tuple[int, ...]
    size: int
    names: str
    reads: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]

    @classmethod
    def of(cls, program: Traced, positions: Sequence[int], count: int) -> "Cuts":
        """The cuts of a program.

        Args:
          program: what is divided.
          positions: where.
          count: how many of its parameters other traces have too.
        """
        size = len(program.closed.jaxpr.eqns)
        reads = _reads_before(program, {*positions, size})
        found = [reads[i][:count] for i in (*positions, size)]
        names = _names(program)
        return cls(tuple(positions), size, names, tuple(found[:-1]), found[-1])

    @classmethod
    def none(cls) -> "Cuts":
        """Those of one stage."""
        return cls((), 0, "", (), ())

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "Cuts":
        """The cuts of which `dataclasses.asdict` made these fields, and JSON lists."""
        reads = tuple(map(tuple, fields["reads"]))
        own = {name: tuple(fields[name]) for name in ("positions", "totals")}
        return cls(**{**fields, **own, "reads": reads})

    def some(self, chosen: Sequence[int]) -> "Cuts":
        """Those with some numbers."""
        positions = tuple(self.positions[i] for i in chosen)
        reads = tuple(self.reads[i] for i in chosen)
        return replace(self, positions=positions, reads=reads)

    def on(self, other: Traced) -> list[int]:
        """The same cuts in another trace: of another batch size, or with a loss."""
        if not self.positions:
            return []
        marks = _marks.positions(other.closed)
        if marks and len(marks) == len(self.positions):
            return marks
        if self.names == _names(other):
            return list(self.positions)
        places = range(len(other.closed.jaxpr.eqns) + 1)
        reads = _reads_before(other, places)
        totals = reads[places[-1]]
        # What dropout or a penalty reads another number of times tells nothing.
        alike = [i for i, total in enumerate(self.totals) if total == totals[i]]
        crossing, found = crossing_bytes(other), list[int]()
        for cut, own in zip(self.positions, self.reads, strict=True):

            def apart(i: int, cut: int = cut, own: Sequence[int] = own) -> Any:
                """By how many readings a place differs, by bytes, and by its share."""
                readings = sum(abs(reads[i][k] - own[k]) for k in alike)
                return readings, crossing[i], abs(i - cut / self.size * len(places))

            begin = found[-1] + 1 if found else 1
            end = len(places) - len(self.positions) + len(found)
            found.append(min(range(begin, end), key=apart))
        return found


def _names(program: Traced) -> str:
    """A digest of the primitives of a program."""
    names = "\n".join(eqn.primitive.name for eqn in program.closed.jaxpr.eqns)
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def _reads_before(
    program: Traced, places: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Of some places how often each parameter is read before it.

    A reading is one by an equation of a stage, directly or through what each stage
    computes for itself.
    """
    counts = [0] * program.num_params
    through: dict[core.Var, tuple[int, ...]] = {
        var: (i,) for i, var in enumerate(program.params)
    }
    found, eqns = dict[int, tuple[int, ...]](), program.closed.jaxpr.eqns
    for i, (eqn, kind) in enumerate(zip(eqns, program.kinds, strict=True)):
        if i in places:
            found[i] = tuple(counts)
        read = [a for a in eqn.invars if not isinstance(a, core.Literal)]
        params = tuple(dict.fromkeys(p for a in read for p in through.get(a, ())))
        if kind == "stage":
            for p in params:
                counts[p] += 1
        else:
            through |= dict.fromkeys(eqn.outvars, params)
    return found | {len(eqns): tuple(counts)}

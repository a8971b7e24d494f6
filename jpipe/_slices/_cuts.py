"""Cuts as numbers that mean the same in another trace of the same function.

A trace of another batch size, of evaluation, or with a loss has other equations. A cut
is known there by how often each parameter is read before it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from jax.extend import core

from . import _marks
from ._cut import crossing_bytes
from ._program import Traced

Reads = tuple[int, ...]


@dataclass(frozen=True)
class Cuts:
    """Where a program is divided.

    Attributes:
      positions: the numbers of the equations with which the stages but the first begin.
      size: how many equations there are.
      names: a digest of their primitives.
      reads: of each cut how often each parameter is read before it.
      around: how many equations of stages are between it and the last such reading, and
        between it and the next.
      totals: how often each parameter is read at all.
      about: for how many stages calls of `jax.checkpoint` were opened in that trace, so
        that they are in others: see `_checkpoints`.
    """

    positions: tuple[int, ...]
    size: int
    names: str
    reads: tuple[Reads, ...]
    around: tuple[tuple[int, int], ...]
    totals: Reads
    about: int

    @classmethod
    def of(
        cls, program: Traced, positions: Sequence[int], count: int, about: int
    ) -> "Cuts":
        """The cuts of a program.

        Args:
          program: what is divided.
          positions: where.
          count: how many of its parameters other traces have too.
          about: for how many stages it was traced.
        """
        if not positions:
            return cls.none(about)
        reads = _reads_before(program, count)
        around = _around(program, reads)
        at, total = reads[list(positions)].tolist(), reads[-1].tolist()
        return cls(
            tuple(positions),
            len(program.closed.jaxpr.eqns),
            _names(program),
            tuple(map(tuple, at)),
            tuple(around[i] for i in positions),
            tuple(total),
            about,
        )

    @classmethod
    def none(cls, about: int) -> "Cuts":
        """Those of one stage."""
        return cls((), 0, "", (), (), (), about)

    def faults(self) -> Iterator[str]:
        """Why these are no cuts, such as after they were read from a file."""
        ends = 0, *self.positions, self.size or 1
        if any(begin >= end for begin, end in pairwise(ends)):
            yield (
                f"cuts.positions={self.positions}: need to ascend, and to be equations "
                f"of {self.size}"
            )
        lengths = {len(self.positions), len(self.reads), len(self.around)}
        if len(lengths) > 1:
            yield (
                f"cuts has {len(self.positions)} positions, {len(self.reads)} reads, "
                f"{len(self.around)} around"
            )
        if any(len(counts) != len(self.totals) for counts in self.reads):
            yield f"cuts.reads need {len(self.totals)} numbers each, as totals has"
        if self.about < 1:
            yield f"cuts.about={self.about}: needs at least one stage"

    def some(self, chosen: Sequence[int]) -> "Cuts":
        """Those with some numbers."""
        names = "positions", "reads", "around"
        fields = {name: tuple(getattr(self, name)[i] for i in chosen) for name in names}
        return replace(self, **fields)

    def on(self, other: Traced) -> list[int]:
        """The same cuts in another trace."""
        if not self.positions:
            return []
        marks = _marks.positions(other.closed)
        if marks and len(marks) == len(self.positions):
            return marks
        if self.names == _names(other):
            return list(self.positions)
        reads = _reads_before(other, len(self.totals))
        # What dropout or a penalty reads another number of times tells nothing.
        alike = reads[-1] == np.asarray(self.totals)
        crossing, around = crossing_bytes(other), _around(other, reads)
        found, last = list[int](), len(other.closed.jaxpr.eqns)
        for cut, counts, distance in zip(
            self.positions, self.reads, self.around, strict=True
        ):
            readings = abs(reads - np.asarray(counts))[:, alike].sum(axis=1)

            def apart(
                i: int, cut: int = cut, readings: Any = readings, own: Any = distance
            ) -> Any:
                """How much a place differs: in readings, distance, bytes, position."""
                share = abs(i - cut / self.size * len(reads))
                return readings[i], around[i] != own, crossing[i], share

            # Stages of the loss alone have nothing to compute in evaluation; with a
            # loss each has something.
            after = (len(self.positions) - len(found)) * other.has_loss
            begin = min(found[-1] + 1 if found else 1, last - after)
            found.append(min(range(begin, last - after + 1), key=apart))
        return found


def _names(program: Traced) -> str:
    """A digest of the primitives of a program."""
    names = "\n".join(eqn.primitive.name for eqn in program.closed.jaxpr.eqns)
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def _reads_before(program: Traced, count: int) -> np.ndarray:
    """Before each equation, and before the end, how often each parameter is read.

    A reading is one by an equation of a stage, directly or through what each stage
    computes for itself.
    """
    through: dict[core.Var, Reads] = {
        var: (i,) for i, var in enumerate(program.params[:count])
    }
    eqns = program.closed.jaxpr.eqns
    found = np.zeros((len(eqns) + 1, count), np.int32)
    for after, eqn, kind in zip(found[1:], eqns, program.kinds, strict=True):
        read = [a for a in eqn.invars if not isinstance(a, core.Literal)]
        params = tuple(dict.fromkeys(p for a in read for p in through.get(a, ())))
        if kind == "stage":
            after[list(params)] = 1
        else:
            through |= dict.fromkeys(eqn.outvars, params)
    return found.cumsum(axis=0)


def _around(program: Traced, reads: np.ndarray) -> list[tuple[int, int]]:
    """The equations of stages since the last reading, and until the next.

    Behind the last reading there may be a loss or none: nothing is counted until then.
    """
    before = [0, *accumulate(kind == "stage" for kind in program.kinds)]
    numbers = reads.sum(axis=1).tolist()
    first = {own: before[i] for i, own in reversed([*enumerate(numbers)])}
    last = {own: before[i] for i, own in enumerate(numbers)}
    return [
        (at - first[own], 0 if own == numbers[-1] else last[own] - at)
        for at, own in zip(before, numbers, strict=True)
    ]

"""Cuts as numbers that mean the same in another trace of the same function.

A trace of another batch size, of evaluation, or with a loss has other equations. A cut
is recognized there by the number of times that each parameter is read before it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from jax.extend import core

from .._trace import _boundaries
from .._trace._traced_function import EqnKind, TracedFunction
from ._balanced_cuts import crossing_bytes

Reads = tuple[int, ...]


@dataclass(frozen=True)
class CutPoints:
    """The cuts between the stages of a program.

    Attributes:
      positions: the indices of the equations with which the stages but the first
        begin.
      size: the number of equations.
      names: a digest of their primitives.
      reads: for each cut, the number of reads of each parameter before it.
      around: for each cut, the number of equations of stages since the last read, and
        until the next.
      totals: the number of reads of each parameter in all.
      about: the number of stages for which calls of `jax.checkpoint` were opened in
        that trace, so that they are in others: see `_checkpoints`.
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
        cls,
        traced: TracedFunction,
        positions: Sequence[int],
        num_params: int,
        about: int,
    ) -> "CutPoints":
        """The cuts of a program.

        Args:
          traced: the function that is cut.
          positions: the indices of the equations with which stages begin.
          num_params: the number of its parameters that other traces have too.
          about: the number of stages for which it was traced.
        """
        if not positions:
            return cls.none(about)
        reads_before = _reads_before(traced, num_params)
        distances = _distances_to_reads(traced, reads_before)
        return cls(
            positions=tuple(positions),
            size=len(traced.closed.jaxpr.eqns),
            names=_primitives_digest(traced),
            reads=tuple(tuple(reads_before[index].tolist()) for index in positions),
            around=tuple(distances[index] for index in positions),
            totals=tuple(reads_before[-1].tolist()),
            about=about,
        )

    @classmethod
    def none(cls, about: int) -> "CutPoints":
        """The cuts of one stage: none."""
        return cls(
            positions=(),
            size=0,
            names="",
            reads=(),
            around=(),
            totals=(),
            about=about,
        )

    def faults(self) -> Iterator[str]:
        """Yields faults of the numbers, such as after they were read from a file."""
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

    def some(self, chosen: Sequence[int]) -> "CutPoints":
        """The cuts with the chosen indices."""
        return replace(
            self,
            positions=tuple(self.positions[index] for index in chosen),
            reads=tuple(self.reads[index] for index in chosen),
            around=tuple(self.around[index] for index in chosen),
        )

    def on(self, other: TracedFunction) -> list[int]:
        """The same cuts in another trace.

        Where the equations are the same, so are their indices. Elsewhere each cut is
        the place whose parameter reads before it are most alike; of several such
        places the one as many equations away from reads, then with the fewest bytes,
        then at the most similar share of the program.
        """
        if not self.positions:
            return []
        marks = _boundaries.boundary_positions(other.closed)
        if marks and len(marks) == len(self.positions):
            return marks
        if self.names == _primitives_digest(other):
            return list(self.positions)

        reads_before = _reads_before(other, len(self.totals))
        # Dropout or a penalty may read a parameter another number of times in all: its
        # reads tell nothing.
        is_comparable = reads_before[-1] == np.asarray(self.totals)
        distances = _distances_to_reads(other, reads_before)
        crossing = crossing_bytes(other)
        end = len(other.closed.jaxpr.eqns)
        positions = list[int]()
        for position, reads, distance in zip(
            self.positions, self.reads, self.around, strict=True
        ):
            differences = abs(reads_before - np.asarray(reads))
            read_differences = differences[:, is_comparable].sum(axis=1)
            expected = position / self.size * len(reads_before)
            # Stages of the loss alone have nothing to compute in evaluation; with a
            # loss each stage has something.
            num_stages_after = len(self.positions) - len(positions)
            last = end - num_stages_after if other.has_loss else end
            begin = min(positions[-1] + 1 if positions else 1, last)
            ranked = [
                (
                    read_differences[index],
                    distances[index] != distance,
                    crossing[index],
                    abs(index - expected),
                    index,
                )
                for index in range(begin, last + 1)
            ]
            positions.append(min(ranked)[-1])
        return positions


def _primitives_digest(traced: TracedFunction) -> str:
    """A digest of the primitives of a program."""
    names = "\n".join(eqn.primitive.name for eqn in traced.closed.jaxpr.eqns)
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def _reads_before(traced: TracedFunction, num_params: int) -> np.ndarray:
    """The number of reads of each parameter before each equation, and before the end.

    A read is one by an equation of a stage, directly or through the copies that each
    stage computes for itself.

    Returns:
      An array of shape ``(equations + 1, parameters)``.
    """
    # variable -> the parameters that it follows from by copies
    sources: dict[core.Var, tuple[int, ...]] = {
        var: (index,) for index, var in enumerate(traced.params[:num_params])
    }
    eqns = traced.closed.jaxpr.eqns
    reads = np.zeros((len(eqns) + 1, num_params), np.int32)
    for row, eqn, eqn_kind in zip(reads[1:], eqns, traced.eqn_kinds, strict=True):
        params: dict[int, None] = {}  # an ordered set
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                params |= dict.fromkeys(sources.get(atom, ()))
        if eqn_kind == EqnKind.STAGE:
            row[list(params)] = 1
        else:
            sources.update(dict.fromkeys(eqn.outvars, tuple(params)))
    return reads.cumsum(axis=0)


def _distances_to_reads(
    traced: TracedFunction, reads_before: np.ndarray
) -> list[tuple[int, int]]:
    """The equations of stages since the last read before a place, and until the next.

    Behind the last read of all there may be a loss or none: nothing is counted there.
    """
    is_of_stage = [eqn_kind == EqnKind.STAGE for eqn_kind in traced.eqn_kinds]
    stage_eqns_before = [0, *accumulate(is_of_stage)]
    num_reads = reads_before.sum(axis=1).tolist()
    # number of reads -> the equations before the first and last place with so many
    first_place: dict[int, int] = {}
    last_place: dict[int, int] = {}
    for count, num_eqns in zip(num_reads, stage_eqns_before, strict=True):
        first_place.setdefault(count, num_eqns)
        last_place[count] = num_eqns

    distances = []
    for count, num_eqns in zip(num_reads, stage_eqns_before, strict=True):
        is_behind_all = count == num_reads[-1]
        until_next = 0 if is_behind_all else last_place[count] - num_eqns
        distances.append((num_eqns - first_place[count], until_next))
    return distances

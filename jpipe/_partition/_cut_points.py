"""Cuts as numbers that mean the same in another trace of the same function.

A trace of another batch size, of evaluation, or with a loss has other equations: an
index means nothing there. Yet it reads the same parameters in the same order. So a cut
is found again by the number of times that each parameter was read before it:

    equations of stages:    read a | sin | read b | cos || mul | read c | read b
    reads of (a, b, c) before the cut ||:    (1, 1, 0)

There are as many reads before each gap between ``read b`` and ``read c``. Of these
the cut is the one as many equations of stages away from both reads:

    distances of the cut ||:    1 since the read of b (cos), 1 until that of c (mul)

Where no gap agrees in all of this, the one that differs least is taken: see
`CutPoints.find_stage_starts`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from jax.extend import core

from .._trace import _boundaries
from .._trace._layer_scans import UNDIVIDED, ScanDivision
from .._trace._traced_function import EqnKind, TracedFunction
from ._balanced_cuts import crossing_bytes

# The number of reads of each parameter.
ReadCounts = tuple[int, ...]


@dataclass(frozen=True)
class CutPoints:
    """The cuts between the stages of a program, and the pieces of its scans.

    Each piece of a parameter counts as a parameter.

    Attributes:
      positions: the stage starts in the trace that was cut: the index of the first
        equation of each stage but the first.
      num_eqns: the number of equations.
      primitives_digest: a digest of their primitives: programs with the same ones are
        cut at the same indices.
      reads_before: for each cut, the number of reads of each parameter before it.
      read_distances: for each cut, the number of equations of stages since the last
        read, and until the next.
      total_reads: the number of reads of each parameter in the whole program.
      num_traced_stages: the number of stages for which calls of `jax.checkpoint` were
        inlined in that trace, and have to be in others: see `_checkpoints`.
      division: the pieces of scans over layers, and of the parameters that these go
        along.
    """

    positions: tuple[int, ...]
    num_eqns: int
    primitives_digest: str
    reads_before: tuple[ReadCounts, ...]
    read_distances: tuple[tuple[int, int], ...]
    total_reads: ReadCounts
    num_traced_stages: int
    division: ScanDivision

    @classmethod
    def from_trace(
        cls,
        traced: TracedFunction,
        stage_starts: Sequence[int],
        *,
        num_params: int,
        num_traced_stages: int,
        division: ScanDivision,
    ) -> "CutPoints":
        """The cuts of a program.

        Args:
          traced: the function that is cut.
          stage_starts: the index of the first equation of each stage but the first.
          num_params: the number of its parameters that other traces have too.
          num_traced_stages: the number of stages for which it was traced.
          division: the pieces of its scans and parameters.
        """
        if not stage_starts:
            return cls.without_cuts(num_traced_stages, division)
        reads_before = count_reads_before(traced, num_params)
        distances = _distances_to_reads(traced, reads_before)
        return cls(
            positions=tuple(stage_starts),
            num_eqns=len(traced.closed.jaxpr.eqns),
            primitives_digest=_digest_primitives(traced),
            reads_before=tuple(tuple(reads_before[i].tolist()) for i in stage_starts),
            read_distances=tuple(distances[i] for i in stage_starts),
            total_reads=tuple(reads_before[-1].tolist()),
            num_traced_stages=num_traced_stages,
            division=division,
        )

    @classmethod
    def without_cuts(
        cls, num_traced_stages: int, division: ScanDivision = UNDIVIDED
    ) -> "CutPoints":
        """The cuts of a program in one stage: none."""
        return cls(
            positions=(),
            num_eqns=0,
            primitives_digest="",
            reads_before=(),
            read_distances=(),
            total_reads=(),
            num_traced_stages=num_traced_stages,
            division=division,
        )

    def faults(self) -> Iterator[str]:
        """Yields faults of the numbers, such as after they were read from a file."""
        ends = 0, *self.positions, self.num_eqns or 1
        if any(begin >= end for begin, end in pairwise(ends)):
            yield (
                f"cuts.positions={self.positions}: need to ascend, and to be equations "
                f"of {self.num_eqns}"
            )
        num_cuts = len(self.positions)
        if {len(self.reads_before), len(self.read_distances)} != {num_cuts}:
            yield (
                f"cuts has {num_cuts} positions, {len(self.reads_before)} "
                f"reads_before, {len(self.read_distances)} read_distances"
            )
        num_params = len(self.total_reads)
        if any(len(counts) != num_params for counts in self.reads_before):
            yield (
                f"cuts.reads_before need {num_params} numbers each, as total_reads has"
            )
        if self.num_traced_stages < 1:
            yield (
                f"cuts.num_traced_stages={self.num_traced_stages}: needs at least one "
                f"stage"
            )
        if self.positions:  # the reads of one stage are not counted
            num_outside = num_params - self.division.num_added
            for fault in self.division.faults(num_outside):
                yield f"cuts.division: {fault}"

    def select(self, indices: Sequence[int]) -> "CutPoints":
        """The cuts with some indices, without the others.

        Pieces of a parameter that are read between the same cuts are one piece.
        """
        cuts = replace(
            self,
            positions=tuple(self.positions[i] for i in indices),
            reads_before=tuple(self.reads_before[i] for i in indices),
            read_distances=tuple(self.read_distances[i] for i in indices),
        )
        return cuts._with_merged_pieces() if self.total_reads else cuts

    def _with_merged_pieces(self) -> "CutPoints":
        """The same cuts; pieces that are first read in one stage are one piece.

        A scan reads each of its pieces once, and reads what they become once too: the
        number of its reads is the most of theirs.
        """
        reads = np.array([*self.reads_before, self.total_reads])
        # For each parameter, the stage that reads it first: so many cuts are before it.
        first_stages = (reads[:-1] == 0).sum(axis=0)
        division, begins_piece = self.division.merge_pieces(first_stages.tolist())
        reads = np.maximum.reduceat(reads, np.flatnonzero(begins_piece), axis=1)
        *reads_before, total_reads = map(tuple, reads.tolist())
        return replace(
            self,
            reads_before=tuple(reads_before),
            total_reads=total_reads,
            division=division,
        )

    def find_stage_starts(self, traced: TracedFunction) -> list[int]:
        """Finds the same cuts in another trace.

        At marks of the user, the cuts are there. Where the primitives are the same, so
        are the indices. Elsewhere each cut is, of the gaps behind the cut before it,
        the one

        1. whose reads before it differ least from those before the cut,
        2. with the same distances to reads,
        3. that the fewest bytes cross,
        4. at the most similar share of the program.

        Returns:
          The index of the first equation of each stage but the first.
        """
        if not self.positions:
            return []
        marks = _boundaries.boundary_positions(traced.closed)
        if marks and len(marks) == len(self.positions):
            return marks
        if self.primitives_digest == _digest_primitives(traced):
            return list(self.positions)

        reads_before = count_reads_before(traced, len(self.total_reads))
        # Dropout or a penalty may read a parameter another number of times in all: its
        # reads tell nothing.
        is_comparable = reads_before[-1] == np.asarray(self.total_reads)
        distances = _distances_to_reads(traced, reads_before)
        crossing = crossing_bytes(traced)
        end = len(traced.closed.jaxpr.eqns)
        stage_starts = list[int]()
        for position, read_counts, cut_distances in zip(
            self.positions, self.reads_before, self.read_distances, strict=True
        ):
            differences = abs(reads_before - np.asarray(read_counts))
            read_differences = differences[:, is_comparable].sum(axis=1)
            expected = position / self.num_eqns * end
            # The cut is behind the one before it, and leaves an equation to each stage
            # after it. Without a loss, as in evaluation, it may be at the end: stages
            # of the loss alone have nothing to compute there.
            num_stages_after = len(self.positions) - len(stage_starts)
            last = end - num_stages_after if traced.has_loss else end
            first = stage_starts[-1] + 1 if stage_starts else 1
            ranked = [
                (
                    read_differences[index],
                    distances[index] != cut_distances,
                    crossing[index],
                    abs(index - expected),
                    index,
                )
                for index in range(min(first, last), last + 1)
            ]
            stage_starts.append(min(ranked)[-1])
        return stage_starts


def _digest_primitives(traced: TracedFunction) -> str:
    """A digest of the primitives of a program, in order."""
    names = "\n".join(eqn.primitive.name for eqn in traced.closed.jaxpr.eqns)
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def count_reads_before(traced: TracedFunction, num_params: int) -> np.ndarray:
    """Counts the reads of each parameter before each equation, and before the end.

    A read is one by an equation of a stage, directly or through the copies that each
    stage computes for itself.

    Returns:
      An array of shape ``(equations + 1, parameters)``.
    """
    # variable -> the parameters that it follows from by copies
    params_of: dict[core.Var, tuple[int, ...]] = {
        var: (index,) for index, var in enumerate(traced.params[:num_params])
    }
    eqns = traced.closed.jaxpr.eqns
    reads = np.zeros((len(eqns) + 1, num_params), np.int32)
    for row, eqn, eqn_kind in zip(reads[1:], eqns, traced.eqn_kinds, strict=True):
        params: dict[int, None] = {}  # an ordered set
        for atom in eqn.invars:
            if not isinstance(atom, core.Literal):
                params |= dict.fromkeys(params_of.get(atom, ()))
        if eqn_kind == EqnKind.STAGE:
            row[list(params)] = 1
        else:
            params_of.update(dict.fromkeys(eqn.outvars, tuple(params)))
    return reads.cumsum(axis=0)


def _distances_to_reads(
    traced: TracedFunction, reads_before: np.ndarray
) -> list[tuple[int, int]]:
    """The equations of stages between a gap and the reads before and behind it.

    Behind the last read of all there may be a loss or none: nothing is counted there.

    Returns:
      For each equation, and for the end, the number of equations of stages since the
      last read before it, and until the next.
    """
    is_of_stage = [eqn_kind == EqnKind.STAGE for eqn_kind in traced.eqn_kinds]
    stage_eqns_before = [0, *accumulate(is_of_stage)]
    num_reads = reads_before.sum(axis=1).tolist()
    # number of reads -> the equations before the first and last gap with so many
    first_gap: dict[int, int] = {}
    last_gap: dict[int, int] = {}
    for count, num_eqns in zip(num_reads, stage_eqns_before, strict=True):
        first_gap.setdefault(count, num_eqns)
        last_gap[count] = num_eqns

    distances = []
    for count, num_eqns in zip(num_reads, stage_eqns_before, strict=True):
        is_behind_all = count == num_reads[-1]
        until_next = 0 if is_behind_all else last_gap[count] - num_eqns
        distances.append((num_eqns - first_gap[count], until_next))
    return distances

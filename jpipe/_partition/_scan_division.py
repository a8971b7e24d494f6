"""Chooses the pieces in which stages run scans, and hold what these go along.

Each iteration of a scan is a piece of its own at first. Such a program is cut as any
other; the iterations of a scan that one stage runs become one piece. Equal pieces are
preferred where they cost little: a parameter in equal pieces is one sharded array.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from .._jaxprs._pieces import first_inner_indices
from .._messages import WarnOnce
from .._trace import _boundaries, _eqn_order
from .._trace._layer_scans import UNDIVIDED, LayerScan, ScanDivision, find_layer_scans
from .._trace._traced_function import TracedFunction
from . import _balanced_cuts
from ._cut_points import count_reads_before

# ``division -> the function with its scans in pieces``
Divide = Callable[[ScanDivision], TracedFunction]
# A scan of a smaller part of a stage stays whole, which makes the largest stage larger
# by no more than this. So its parameters may be read as a whole too.
_LEAST_PART = 0.5
# Equal pieces may make the largest stage larger by this: a choice of one array for
# the user, `jax.Array`, over a tenth of a step. Of 32 layers in four stages before a
# loss that adds a number of each layer these are 8 each, and not 10, 10, 11 and 1.
_EQUAL_PIECES_COST = 1.1


def choose_division(
    traced: TracedFunction, most_stages: int, divide: Divide
) -> ScanDivision:
    """Chooses the pieces of scans over layers, and of parameters that they go along.

    Args:
      traced: the function, traced on whole parameters.
      most_stages: the number of stages; there are fewer if the program has fewer gaps.
      divide: ``division -> the function with its scans in pieces``.
    """
    layer_scans = _find_divided_scans(traced, most_stages)
    if not layer_scans:
        return UNDIVIDED
    trial = _Trial(traced, layer_scans, most_stages, divide)
    best_sizes = trial.sizes_of_stages()
    largest_allowed = _EQUAL_PIECES_COST * trial.largest_cost(best_sizes)
    # The best equal pieces: as many as stages, or fewer if a stage has other work.
    equal_sizes = best_sizes
    equal_cost = math.inf
    for num_pieces in range(trial.num_stages, 1, -1):
        sizes = [_equalize(sizes, num_pieces) for sizes in best_sizes]
        cost = trial.largest_cost(sizes)
        if sizes != best_sizes and cost < equal_cost:
            equal_sizes = sizes
            equal_cost = cost
    return trial.division(equal_sizes if equal_cost <= largest_allowed else best_sizes)


def divide_by_iteration(traced: TracedFunction, num_stages: int) -> ScanDivision:
    """The finest pieces: each iteration of a scan along parameters is one.

    Args:
      traced: the function, traced on whole parameters.
      num_stages: the number of stages, of which a smaller part is not divided.
    """
    division = UNDIVIDED
    for scan in _find_divided_scans(traced, num_stages):
        division = division.union(scan.divide(traced, (1,) * scan.length))
    return ScanDivision(params=division.params, scans={})


def _find_divided_scans(traced: TracedFunction, num_stages: int) -> list[LayerScan]:
    """Finds the scans over layers that are divided, for so many stages."""
    has_marks = bool(_boundaries.boundary_positions(traced.closed))
    if num_stages == 1 or has_marks:
        return []
    scan_indices = _balanced_cuts.find_scans(traced, _LEAST_PART / num_stages)
    return find_layer_scans(traced, scan_indices)


def _equalize(sizes: Sequence[int], num_pieces: int) -> tuple[int, ...]:
    """Equal sizes for so many pieces, if there are such; else the sizes as they are."""
    length = sum(sizes)
    if length % num_pieces:
        return tuple(sizes)
    return (length // num_pieces,) * num_pieces


class _Trial:
    """The function with its scans in pieces of some sizes, cut into stages.

    Args:
      traced: the function of whole parameters.
      layer_scans: the scans that are divided.
      most_stages: the number of stages; there are fewer if the program has fewer gaps.
      divide: ``division -> the function with its scans in pieces``.

    Attributes:
      num_stages: the number of stages, if it is cut between any iterations.
    """

    def __init__(
        self,
        traced: TracedFunction,
        layer_scans: Sequence[LayerScan],
        most_stages: int,
        divide: Divide,
    ) -> None:
        self.num_stages = most_stages
        self._traced = traced
        self._layer_scans = layer_scans
        self._divide = divide
        self._num_params = traced.num_params - len(traced.captured_arrays)
        self._finest_division = self.division(
            [(1,) * scan.length for scan in layer_scans]
        )
        self._finest_cut = self._cut(self._finest_division)
        _, stage_starts = self._finest_cut
        self.num_stages = len(stage_starts) + 1

    def division(self, sizes_of_scans: Sequence[Sequence[int]]) -> ScanDivision:
        """The pieces of parameters and scans, for scans in pieces of such sizes."""
        division = UNDIVIDED
        for scan, sizes in zip(self._layer_scans, sizes_of_scans, strict=True):
            if len(sizes) > 1:
                division = division.union(scan.divide(self._traced, sizes))
        return division

    def sizes_of_stages(self) -> list[tuple[int, ...]]:
        """For each scan the numbers of iterations that stages run, if cut anywhere."""
        division = self._finest_division
        traced, stage_starts = self._finest_cut
        first_pieces = first_inner_indices(self._num_params, division.params)
        reads_before = count_reads_before(traced, self._num_params + division.num_added)
        # For each parameter inside, the equation that reads it first: row i + 1 is the
        # first that counts the reads of equation i.
        first_readers = np.argmax(reads_before > 0, axis=0) - 1

        sizes_of_scans = list[tuple[int, ...]]()
        for scan in self._layer_scans:
            stages = list[int]()
            for iteration in range(scan.length):
                params = [first_pieces[i] + iteration for i in scan.axes]
                if scan.layer_params:
                    params += [first_pieces[i] for i in scan.layer_params[iteration]]
                # The scan reads all of them, and some may be read before it.
                reader = max(first_readers[params])
                stages.append(sum(start <= reader for start in stage_starts))
            sizes_of_scans.append(tuple(len(list(run)) for _, run in groupby(stages)))
        return sizes_of_scans

    def largest_cost(self, sizes_of_scans: Sequence[Sequence[int]]) -> float:
        """The operations of the largest stage, for scans in pieces of such sizes."""
        traced, stage_starts = self._cut(self.division(sizes_of_scans))
        if len(stage_starts) + 1 < self.num_stages:  # the pieces are too few
            return math.inf
        return _balanced_cuts.largest_stage_cost(traced, stage_starts)

    def _cut(self, division: ScanDivision) -> tuple[TracedFunction, list[int]]:
        """The function with its scans in pieces, and the starts of its stages."""
        (traced,) = _eqn_order.sink_equations({0: self._divide(division)}).values()
        stage_starts = _balanced_cuts.choose_stage_starts(
            traced,
            None,
            most_stages=self.num_stages,
            warnings=WarnOnce(is_muted=True),
        )
        return traced, stage_starts

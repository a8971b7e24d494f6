"""Sums over stages as matrices: entry (i, j) is of the stage of layers i to j - 1."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def sums(numbers: Sequence[float] | Matrix, none: float = 0.0) -> Matrix:
    """Sums of numbers i to j - 1, and something else where there are none."""
    ends = np.concatenate([[0.0], np.cumsum(np.array(numbers, float))])
    found = ends[None, :] - ends[:, None]
    found[np.tril_indices(len(ends))] = none
    return found


def copied(found: Matrix, first: int, readers: Sequence[int], size: float) -> None:
    """Adds what each stage has once that begins at a layer or later and reads it.

    Args:
      found: to this.
      first: the layer.
      readers: the layers that read it, in order.
      size: how much it is.
    """
    # Of several readers in a stage the first brings it.
    for before, reader in itertools.pairwise([first - 1, *readers]):
        found[max(first, before + 1) : reader + 1, reader + 1 :] += size

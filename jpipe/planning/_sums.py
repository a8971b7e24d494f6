"""Sums over stages as matrices: entry [i, j] is of the stage of layers i to j - 1.

sums[i, j] = prefix[j] - prefix[i]        prefix[j]: the sum over the layers before j
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def sum_stages(numbers: Sequence[float] | Matrix, *, empty: float = 0.0) -> Matrix:
    """Sums one number per layer over each stage.

    Args:
      numbers: one per layer.
      empty: the entry of a stage without layers.
    """
    prefix_sums = np.concatenate([[0.0], np.cumsum(np.array(numbers, float))])
    stage_sums = prefix_sums[None, :] - prefix_sums[:, None]
    stage_sums[np.tril_indices(len(prefix_sums))] = empty
    return stage_sums


def add_copies(
    stage_bytes: Matrix, *, first_layer: int, readers: Sequence[int], num_bytes: float
) -> None:
    """Adds the bytes of an array to each stage that has a copy of it.

    A stage has one copy, however many of its layers read the array. A stage that begins
    before ``first_layer`` has none: it holds the array itself.

    Args:
      stage_bytes: the matrix to which they are added.
      first_layer: the first layer with which a stage that has a copy can begin.
      readers: the layers that read the array, in order.
      num_bytes: the size of the array.
    """
    # A stage is counted at the first of its readers: it begins behind the one before.
    for previous_reader, reader in itertools.pairwise([first_layer - 1, *readers]):
        begin = max(first_layer, previous_reader + 1)
        stage_bytes[begin : reader + 1, reader + 1 :] += num_bytes

"""An array as its pieces: a concatenation along an axis, not done yet."""

from typing import NamedTuple

import jax

from ._pieces import Pieces


class Concatenation(NamedTuple):
    """An array as its pieces.

    Attributes:
      arrays: the pieces.
      axis: the axis along which they are concatenated.
      input_indices: the inputs in pieces that it follows from piece by piece.
    """

    arrays: list[jax.Array]
    axis: int
    input_indices: frozenset[int]

    @property
    def pieces(self) -> Pieces:
        """The sizes of the pieces."""
        return Pieces(self.axis, tuple(x.shape[self.axis] for x in self.arrays))

    def slice(self, begin: int, end: int) -> "Concatenation":
        """A slice along the axis, in as many pieces as it spans."""
        arrays = list[jax.Array]()
        pieces = self.pieces
        for array, first, last in zip(
            self.arrays, pieces.starts, pieces.ends, strict=True
        ):
            start = max(begin, first)
            stop = min(end, last)
            if start == first and stop == last:
                arrays.append(array)
            elif start < stop:
                arrays.append(
                    jax.lax.slice_in_dim(
                        array, start - first, stop - first, axis=self.axis
                    )
                )
        return self._replace(arrays=arrays)

    def slice_whole(self, begin: int, end: int) -> jax.Array:
        """A slice along the axis as one array."""
        return self.slice(begin, end).whole()

    def whole(self) -> jax.Array:
        """The array."""
        if len(self.arrays) == 1:
            return self.arrays[0]
        return jax.lax.concatenate(self.arrays, self.axis)

    def regroup(self, pieces: Pieces) -> "Concatenation":
        """The same array in other pieces along the axis."""
        bounds = zip(pieces.starts, pieces.ends, strict=True)
        arrays = [self.slice_whole(begin, end) for begin, end in bounds]
        return self._replace(arrays=arrays)

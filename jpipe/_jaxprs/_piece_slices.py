"""Cuts whole arrays into pieces: where a piece starts is a constant, or an input.

    piece = x[3:5]                                 constants: a program for each piece
    piece = dynamic_slice(x, start, size=2)        inputs: equal pieces are one program

The inputs come with the batch. What follows from parameters alone, such as a penalty,
is computed without a batch: it is cut at constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from . import _axis_maps, _jaxpr
from ._pieces import Pieces


@dataclass(frozen=True)
class PieceSlices:
    """The slices of whole arrays that are their pieces.

    Attributes:
      fixed_vars: the variables that follow from parameters.
      batch_vars: the variables that follow from the batch.
      start_args: start of a piece -> the input that is this number.
    """

    fixed_vars: set[core.Var]
    batch_vars: set[core.Var]
    start_args: Mapping[int, jax.Array]

    def cut(
        self, array: jax.Array, pieces: Pieces, *, atom: Any, eqn: core.JaxprEqn | None
    ) -> list[jax.Array]:
        """Cuts an array.

        Args:
          array: the array.
          pieces: its pieces.
          atom: the variable or literal that it is.
          eqn: the equation that reads the pieces; ``None`` if they are a result.
        """
        is_cut_at_inputs = self._is_cut_at_inputs(atom, eqn)
        slices = list[jax.Array]()
        for start, size in zip(pieces.starts, pieces.sizes, strict=True):
            start_arg = self.start_args.get(start)
            if not is_cut_at_inputs or start_arg is None:
                slices.append(
                    jax.lax.slice_in_dim(array, start, start + size, axis=pieces.axis)
                )
                continue
            start_indices: list[Any] = [np.int32(0)] * array.ndim
            start_indices[pieces.axis] = start_arg
            slice_sizes = _axis_maps.with_size(array.shape, pieces.axis, size)
            slices.append(
                jax.lax.dynamic_slice(
                    array, start_indices, slice_sizes, allow_negative_indices=False
                )
            )
        return slices

    def is_fixed(self, atom: Any) -> bool:
        """True for what follows from parameters."""
        return not isinstance(atom, core.Literal) and atom in self.fixed_vars

    def follows_from_inputs(self, atom: Any) -> bool:
        """True unless an atom is a constant."""
        if isinstance(atom, core.Literal):
            return False
        return atom in self.fixed_vars or atom in self.batch_vars

    def _is_cut_at_inputs(self, atom: Any, eqn: core.JaxprEqn | None) -> bool:
        """True for what follows from the batch, and for constants read beside that."""
        if isinstance(atom, core.Literal):
            return False
        if atom in self.batch_vars:
            return True
        is_constant = not self.follows_from_inputs(atom)
        operands = set[core.Var]() if eqn is None else _jaxpr.variables(eqn.invars)
        return is_constant and not operands.isdisjoint(self.batch_vars)

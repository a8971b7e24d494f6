"""Tied parameters: leaves that stages use and the entry of another layer holds.

There is one value, one gradient, one update, counted once in every norm. A stage that
borrows a leaf is given a copy where it runs, moved once per mini-batch, and its sum of
gradients is moved back and added, in the order of the layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from .._functions._weights import Weights
from .._layers._stage import StageFunction
from . import _transfer
from ._transfer import Device


class Ties:
    """Which leaves of which stages are borrowed.

    Args:
      stages: all stages, in order.
      weights: what each stage is given, borrowed leaves included.
      order: of each stage the positions of these leaves among those of all variables.
      layer_of: of each leaf of all variables the layer in whose entry it stands.
    """

    def __init__(
        self,
        stages: Sequence[StageFunction],
        weights: Sequence[Weights],
        order: Sequence[Sequence[int]],
        layer_of: Sequence[int],
    ) -> None:
        # Of each stage the positions of what it borrows among all its leaves.
        self._borrowed: list[list[int]] = []
        # Of each stage what it keeps among its gradients, in the order of all leaves.
        self._kept: list[list[int]] = []
        # By borrowing stage and home: which gradients are added to which.
        self._added: dict[tuple[int, int], list[tuple[int, int]]] = {}
        own: dict[int, tuple[int, int]] = {}
        others: list[tuple[int, int, int]] = []
        for stage, given, leaves in zip(stages, weights, order, strict=True):
            borrowed, kept, number = [], {}, 0
            for position, (leaf, path) in enumerate(
                zip(leaves, given.paths, strict=True)
            ):
                is_own = stage.first + path[0].idx == layer_of[leaf]
                if not is_own:
                    borrowed.append(position)
                if not given.trainable[position]:
                    continue
                if is_own:
                    own[leaf] = stage.index, number
                    kept[leaf] = number
                else:
                    others.append((stage.index, number, leaf))
                number += 1
            self._borrowed.append(borrowed)
            self._kept.append([kept[leaf] for leaf in sorted(kept)])
        for stage, number, leaf in others:
            home, at = own[leaf]
            self._added.setdefault((stage, home), []).append((number, at))

    def own(self, weights: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The leaves of each stage without those that it borrows."""
        if not any(self._borrowed):
            return weights
        owned = []
        for leaves, positions in zip(weights, self._borrowed, strict=True):
            borrowed = set(positions)
            owned.append([x for i, x in enumerate(leaves) if i not in borrowed])
        return owned

    def gradient_dtypes(self, weights: Sequence[Weights]) -> list[tuple[Any, ...]]:
        """The dtypes of what `gather` returns, once no longer sums."""
        specs = [given.trainable_specs for given in weights]
        return [
            tuple(of_stage[i].dtype for i in kept)
            for of_stage, kept in zip(specs, self._kept, strict=True)
        ]

    def bring(self, weights: Sequence[list[Any]], devices: Sequence[Device]) -> None:
        """Replaces what is borrowed by copies where they are used. Never waits."""
        for leaves, borrowed, device in zip(
            weights, self._borrowed, devices, strict=True
        ):
            away = [i for i in borrowed if leaves[i].device != device]
            moved = _transfer.put([leaves[i] for i in away], device)
            for i, leaf in zip(away, moved, strict=True):
                leaves[i] = leaf

    def gather(
        self, grads: Sequence[Sequence[Any]], devices: Sequence[Device]
    ) -> Sequence[Sequence[Any]]:
        """Adds the gradients of borrowed leaves to those of their owners.

        Args:
          grads: the sums of each stage.
          devices: the device of each stage.

        Returns:
          The sums of the leaves that each stage owns.
        """
        if not self._added:
            return grads
        sums = [list(leaves) for leaves in grads]
        for (stage, home), pairs in self._added.items():
            moved = _transfer.put([sums[stage][i] for i, _ in pairs], devices[home])
            # Several layers of a stage may borrow one leaf.
            owned = list(dict.fromkeys(at for _, at in pairs))
            places = tuple(owned.index(at) for _, at in pairs)
            totals = _add([sums[home][at] for at in owned], moved, places)
            for at, total in zip(owned, totals, strict=True):
                sums[home][at] = total
        return [
            [leaves[i] for i in kept]
            for leaves, kept in zip(sums, self._kept, strict=True)
        ]


@partial(jax.jit, static_argnums=2)
def _add(
    totals: Sequence[jax.Array], more: Sequence[jax.Array], places: tuple[int, ...]
) -> list[jax.Array]:
    """Adds leaves, one after the other, each to the total at its place."""
    sums = list(totals)
    for leaf, at in zip(more, places, strict=True):
        sums[at] = sums[at] + leaf
    return sums

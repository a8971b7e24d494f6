"""Tied parameters: layers that list the same module share its parameters.

The first layer that lists a module owns its variables; the entries of the others are
empty, so that there is one value, one gradient, one update, counted once in every
norm. A stage that borrows is given a copy where it runs, moved once per mini-batch,
and its sum of gradients is moved back and added, in the order of the layers.
"""

from collections.abc import Sequence
from typing import Any

import jax

from . import _transfer
from ._stage import StageFunction
from ._transfer import Device
from ._weights import Weights

PyTree = Any


def owners(stages: Sequence[StageFunction]) -> tuple[int, ...]:
    """For each layer the first one that lists the same module: itself, mostly."""
    layers = [layer for stage in stages for layer in stage.layers]
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(layer.identity, number) for number, layer in enumerate(layers)
    )


def shared(variables: Sequence[PyTree], owners: Sequence[int]) -> tuple[PyTree, ...]:
    """What each layer uses: its own entry or that of the owner."""
    return tuple(variables[owner] for owner in owners)


class Ties:
    """Which leaves of which stages are borrowed.

    Args:
      stages: all stages, in order.
      owners: the owner of each layer.
      weights: what each stage is given, borrowed leaves included.
    """

    def __init__(
        self,
        stages: Sequence[StageFunction],
        owners: Sequence[int],
        weights: Sequence[Weights],
    ) -> None:
        self._stage_of = [stage.index for stage in stages for _ in stage.layers]
        # Of each stage the positions of what it borrows among all its leaves.
        self._borrowed: list[list[int]] = []
        # Among the gradients: of each stage what it keeps, and what is added to what.
        self._kept: list[list[int]] = []
        self._added: list[tuple[int, int, int, int]] = []
        own: dict[Any, tuple[int, int]] = {}
        for stage, given in zip(stages, weights, strict=True):
            borrowed, kept, number = [], [], 0
            for position, path in enumerate(given.paths):
                layer = stage.first + path[0].idx
                leaf = owners[layer], path[1:]
                if owners[layer] != layer:
                    borrowed.append(position)
                if not given.trainable[position]:
                    continue
                if owners[layer] == layer:
                    own[leaf] = stage.index, number
                    kept.append(number)
                else:
                    self._added.append((stage.index, number, *own[leaf]))
                number += 1
            self._borrowed.append(borrowed)
            self._kept.append(kept)

    def own(self, weights: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """The leaves of each stage without those that it borrows."""
        if not any(self._borrowed):
            return weights
        return [
            [leaf for i, leaf in enumerate(leaves) if i not in borrowed]
            for leaves, borrowed in zip(weights, self._borrowed, strict=True)
        ]

    def gradient_dtypes(self, weights: Sequence[Weights]) -> list[tuple[Any, ...]]:
        """The dtypes of what `gather` returns, once no longer sums."""
        return [
            tuple(
                [
                    s.dtype
                    for s, t in zip(given.specs, given.trainable, strict=True)
                    if t
                ][i]
                for i in kept
            )
            for given, kept in zip(weights, self._kept, strict=True)
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
          grads: the sums of each stage; those of owners are overwritten.
          devices: the device of each stage.

        Returns:
          The sums of the leaves that each stage owns.
        """
        if not self._added:
            return grads
        sums = [list(leaves) for leaves in grads]
        for stage, number, home, at in self._added:
            (moved,) = _transfer.put([sums[stage][number]], devices[home])
            sums[home][at] = _add(sums[home][at], moved)
        return [
            [leaves[i] for i in kept]
            for leaves, kept in zip(sums, self._kept, strict=True)
        ]


@jax.jit
def _add(total: jax.Array, more: jax.Array) -> jax.Array:
    return total + more

"""A stage: neighbouring layers."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._messages import raise_all
from ._layer import LayerAdapter

PyTree = Any


# So many runs of equal names are listed; of more the first and the last.
_MOST_NAMES = 6


@dataclass(frozen=True)
class StageLayers:
    """The layers of one stage, one after the other.

    Attributes:
      index: the number of the stage.
      first: the number of its first layer in the user's list.
      layers: its layers.
    """

    index: int
    first: int
    layers: tuple[LayerAdapter, ...]

    @property
    def span(self) -> slice:
        """Where its layers stand in a tuple with one entry per layer."""
        return slice(self.first, self.first + len(self.layers))

    def __str__(self) -> str:
        if not self.layers:  # of a model that is divided by itself
            return f"stage {self.index}"
        names = abbreviate([layer.name for layer in self.layers])
        return f"layers {self.first} to {self.span.stop - 1} ({names})"


def check_balance(balance: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage.

    Args:
      balance: a sequence of positive ints that sum to the number of layers, or
        ``None`` for one layer per stage.
      num_layers: the number of layers.

    Raises:
      ValueError: with every fault of the numbers.
      TypeError: if it is not a sequence of ints.
    """
    if balance is None:
        return (1,) * num_layers
    sizes = list(balance) if hasattr(balance, "__iter__") else [balance, None]
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in sizes):
        raise TypeError(
            f"balance={balance!r}: needs a sequence of ints, the number of layers of "
            f"each stage, such as [3, 2, 4] or what jpipe.partition(jpipe.profile("
            f"layers, x, num_microbatches=8), 4) returns for equal times of 4 stages"
        )
    sizes = [operator.index(n) for n in sizes]
    faults = []
    if any(n < 1 for n in sizes):
        faults.append("every stage needs at least one layer")
    if sum(sizes) != num_layers:
        faults.append(f"its sum is {sum(sizes)}, the model has {num_layers} layers")
    raise_all(f"balance={sizes}", faults)
    return tuple(sizes)


def fuse(
    layers: Sequence[LayerAdapter], balance: Sequence[int]
) -> tuple[StageLayers, ...]:
    """Groups neighbouring layers into stages of the given sizes."""
    stages = []
    first = 0
    for index, size in enumerate(balance):
        stages.append(StageLayers(index, first, tuple(layers[first : first + size])))
        first += size
    return tuple(stages)


def abbreviate(names: Sequence[str]) -> str:
    """Names in one line: ``Block x 3, Dense``, or ``Conv, relu, ..., Dense (93)``."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    shown = [name if n == 1 else f"{name} x {n}" for name, n in runs]
    if len(shown) > _MOST_NAMES:
        half = _MOST_NAMES // 2
        shown = [*shown[:half], "...", f"{', '.join(shown[-half:])} ({len(names)})"]
    return ", ".join(shown)


def shapes(tree: PyTree) -> str:
    """A pytree as text: ``float32[8,16]`` in place of each array."""
    return str(jax.tree.map(_Shape, tree))


class _Shape:
    def __init__(self, leaf: Any) -> None:
        shape = ",".join(map(str, getattr(leaf, "shape", ())))
        self.text = f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"

    def __repr__(self) -> str:
        return self.text

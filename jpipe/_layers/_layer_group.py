"""Groups of neighbouring layers, one for each stage."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._messages import raise_all
from ._adapter import LayerAdapter
from ._text import abbreviate

PyTree = Any


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one stage, in order.

    Attributes:
      index: the index of the stage.
      first: the index of its first layer in the user's list.
      layers: its layers.
    """

    index: int
    first: int
    layers: tuple[LayerAdapter, ...]

    @property
    def span(self) -> slice:
        """The slice of its layers in a sequence with one entry per layer."""
        return slice(self.first, self.first + len(self.layers))

    @property
    def layer_names(self) -> list[str]:
        """The names of its layers."""
        return [layer.name for layer in self.layers]

    def __str__(self) -> str:
        if not self.layers:  # a stage of a model
            return f"stage {self.index}"
        names = abbreviate(self.layer_names)
        return f"layers {self.first} to {self.span.stop - 1} ({names})"


def check_balance(balance: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage, checked.

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
    sizes = list(balance) if hasattr(balance, "__iter__") else None
    if sizes is None or not all(map(_is_int, sizes)):
        raise TypeError(
            f"balance={balance!r}: needs a sequence of ints, the number of layers of "
            f"each stage, such as [3, 2, 4] or what jpipe.partition(jpipe.profile("
            f"layers, x, num_microbatches=8), 4) returns for equal times of 4 stages"
        )
    sizes = [operator.index(size) for size in sizes]
    faults = []
    if any(size < 1 for size in sizes):
        faults.append("every stage needs at least one layer")
    if sum(sizes) != num_layers:
        faults.append(f"its sum is {sum(sizes)}, the model has {num_layers} layers")
    raise_all(f"balance={sizes}", faults)
    return tuple(sizes)


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def group_layers(
    layers: Sequence[LayerAdapter], balance: Sequence[int]
) -> tuple[LayerGroup, ...]:
    """Groups neighbouring layers into stages.

    Args:
      layers: all layers.
      balance: the number of layers of each stage.
    """
    groups = []
    first = 0
    for index, size in enumerate(balance):
        stage_layers = tuple(layers[first : first + size])
        groups.append(LayerGroup(index=index, first=first, layers=stage_layers))
        first += size
    return tuple(groups)

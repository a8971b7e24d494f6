"""A stage: neighbouring layers as one pure function, with abstract shapes."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from .._faults import refuse
from . import _batchnorm, _rng, _skip
from ._advice import advice
from ._layer import Layer

PyTree = Any


# So many runs of equal names are listed; of more the first and the last.
_MOST_NAMES = 6


@dataclass(frozen=True)
class StageFunction:
    """The layers of one stage, one after the other.

    Attributes:
      index: the number of the stage.
      first: the number of its first layer in the user's list.
      layers: its layers.
    """

    index: int
    first: int
    layers: tuple[Layer, ...]

    @property
    def span(self) -> slice:
        """Where its layers stand in a tuple with one entry per layer."""
        return slice(self.first, self.first + len(self.layers))

    def __call__(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        rngs: _rng.Rngs = None,
        numbers: Sequence[jax.Array | int] | None = None,
        train: bool = False,
        skips: dict[_skip.Key, PyTree] | None = None,
    ) -> tuple[PyTree, tuple[dict[str, PyTree], ...]]:
        """Applies the layers.

        Args:
          variables: one entry per layer of the stage.
          x: the input of its first layer.
          rngs: the keys of the step, or ``None``.
          numbers: of the micro-batch and of the first layer.
          train: whether this is training.
          skips: what its layers may pop; in the end what they stashed for later stages.

        Returns:
          The output of the last layer, and the collections that each layer changed.
        """
        changed = []
        microbatch, first = (0, self.first) if numbers is None else numbers
        skips = {} if skips is None else skips
        for offset, (layer, entry) in enumerate(
            zip(self.layers, variables, strict=True)
        ):
            number = self.first + offset
            numbers = microbatch, first + offset
            _batchnorm.enter_layer(number)
            with naming(self.index, number, layer, x), jax.named_scope(layer.name):
                x, change = applied(layer, entry, x, rngs, numbers, train, skips)
            changed.append(change)
        return x, tuple(changed)

    def __str__(self) -> str:
        if not self.layers:  # of a model that is divided by itself
            return f"stage {self.index}"
        names = abbreviate([layer.name for layer in self.layers])
        return f"layers {self.first} to {self.span.stop - 1} ({names})"


def applied(
    layer: Layer,
    variables: PyTree,
    x: PyTree,
    rngs: _rng.Rngs,
    numbers: tuple[jax.Array | int, jax.Array | int],
    train: bool,
    skips: dict[_skip.Key, PyTree],
    guess: PyTree = None,
    frames: list[_skip.Frame] | None = None,
) -> tuple[PyTree, dict[str, PyTree]]:
    """Applies a layer with its own keys, where it may stash and pop.

    Args:
      layer: the layer.
      variables: its variables.
      x: its input.
      rngs: the keys of the step.
      numbers: of the micro-batch and of the layer.
      train: whether this is training.
      skips: what it may pop; in the end what may be popped after it.
      guess: what an unknown name pops, while faults are collected.
      frames: receives what the layer does with skips, even if it raises.

    Returns:
      Its output, and the collections that it changed.
    """
    keys = _rng.layer_rngs(rngs, *numbers)
    with _skip.applying(skips, layer.namespace, guess=guess) as frame:
        if frames is not None:
            frames.append(frame)
        return layer.apply(variables, x, keys, train)


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
            f"each stage"
        )
    sizes = [operator.index(n) for n in sizes]
    faults = []
    if any(n < 1 for n in sizes):
        faults.append("every stage needs at least one layer")
    if sum(sizes) != num_layers:
        faults.append(f"its sum is {sum(sizes)}, the model has {num_layers} layers")
    refuse(f"balance={sizes}", faults)
    return tuple(sizes)


def fuse(layers: Sequence[Layer], balance: Sequence[int]) -> tuple[StageFunction, ...]:
    """Groups neighbouring layers into stages of the given sizes."""
    stages = []
    first = 0
    for index, size in enumerate(balance):
        stages.append(StageFunction(index, first, tuple(layers[first : first + size])))
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


@contextmanager
def naming(stage: int, number: int, layer: Layer, x: PyTree) -> Iterator[None]:
    """Adds to any exception which layer raised it, where, and on what input."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by layer {number} ({layer.name}) of stage {stage}, "
            f"whose input was {shapes(x)}"
        )
        if text := advice(error, layer, x):
            error.add_note(text)
        raise


def shapes(tree: PyTree) -> str:
    """A pytree as text: ``float32[8,16]`` in place of each array."""
    return str(jax.tree.map(_Shape, tree))


class _Shape:
    def __init__(self, leaf: Any) -> None:
        shape = ",".join(map(str, getattr(leaf, "shape", ())))
        self.text = f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"

    def __repr__(self) -> str:
        return self.text

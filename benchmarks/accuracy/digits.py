"""The small version: a thin ResNet on scanned digits, on one device and in stages.

The images are the 1,797 digits of 8 x 8 pixels that come with scikit-learn. The recipe
is the large one with its epochs shortened. Each batch size is trained on one device
with the whole batch at once, then in pipelines, where batch norm sees micro-batches:
whether the error differs is what the table shows. That nothing else differs is what
`train.apart` shows, against one device with the same micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from ..models.resnet import resnet101
from .recipe import Recipe
from .train import Batch, Experiment

# The same images are to test in every run: seeds change what is done with the others.
NUM_TRAINING = 1437


@dataclass(frozen=True)
class Setting:
    """The sizes of a scale.

    Attributes:
      recipe: how to train.
      chunks: the number of micro-batches by batch size.
      blocks: bottlenecks per group of the model.
      width: channels of its stem.
      balances: layers per stage by number of stages.
      scale: pixels of an image that each pixel of a digit becomes, along a side.
      images: how many to train on, and how many to test on.
    """

    recipe: Recipe
    chunks: dict[int, int]
    blocks: tuple[int, ...]
    width: int
    balances: dict[int, tuple[int, ...]]
    scale: int
    images: tuple[int, int]

    @property
    def experiments(self) -> dict[str, Experiment]:
        """One device with the whole batch, and pipelines, for each batch size."""
        found = {}
        for batch, chunks in self.chunks.items():
            for stages, balance in self.balances.items():
                name = f"pipeline-{stages}" if stages > 1 else "one-device"
                number = chunks if stages > 1 else 1
                found[f"{name}-{batch}"] = Experiment(batch, number, balance)
        return found

    def layers(self) -> list[Any]:
        """The model."""
        return resnet101(10, width=self.width, blocks=self.blocks)


# The balances cut through bottlenecks, so that shortcuts cross stages.
SETTINGS = {
    "small": Setting(
        recipe=replace(Recipe(), batch=64).shortened(18),
        chunks={64: 4, 128: 8, 256: 16},
        blocks=(1, 1),
        width=8,
        balances={1: (29,), 2: (13, 16), 4: (9, 6, 6, 8)},
        scale=4,
        images=(NUM_TRAINING, 360),
    ),
    "tiny": Setting(
        recipe=replace(Recipe(), batch=32).shortened(2),
        chunks={32: 4},
        blocks=(1,),
        width=4,
        balances={1: (18,), 4: (4, 4, 5, 5)},
        scale=2,
        images=(128, 64),
    ),
}


class Digits:
    """Digits in batches ``[batch, side, side, 1]``.

    Args:
      scale: pixels of an image that each pixel of a digit becomes, along a side.
      images: how many to train on, and how many to test on.
    """

    num_classes = 10

    def __init__(self, scale: int, images: tuple[int, int]) -> None:
        pixels, labels = map(np.asarray, load_digits(return_X_y=True))
        rows = np.random.default_rng(0).permutation(len(labels))
        pixels = pixels[rows].reshape(-1, 8, 8, 1).astype(np.float32)
        labels = labels[rows].astype(np.int32)
        self.num_training, num_test = images
        known, end = self.num_training, NUM_TRAINING + num_test
        mean, std = pixels[:known].mean(), pixels[:known].std()
        # Around a digit the paper goes on.
        self._x = np.pad(pixels, ((0, 0), (1, 1), (1, 1), (0, 0))) - mean
        self._x /= std
        self._labels = labels
        self._test = np.arange(NUM_TRAINING, end)
        self._scale = scale
        self.shape = (8 * scale, 8 * scale, 1)

    def training(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The whole batches of an epoch, in random order, each digit randomly shifted.

        By up to one pixel of the digit, in steps of one of the image.
        """
        rng = np.random.default_rng([seed, epoch])
        rows = rng.permutation(self.num_training)
        for start in range(0, len(rows) - batch + 1, batch):
            chosen = rows[start : start + batch]
            offsets = rng.integers(2 * self._scale + 1, size=(batch, 2))
            yield self._view(chosen, offsets), self._labels[chosen]

    def test(self, batch: int) -> Iterator[Batch]:
        """The digits to test on, as they are; the last batch may be smaller."""
        for start in range(0, len(self._test), batch):
            rows = self._test[start : start + batch]
            middle = np.full((len(rows), 2), self._scale)
            yield self._view(rows, middle), self._labels[rows]

    def _view(self, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """What is seen of digits in a window that begins at offsets from the corner."""
        places = offsets[:, :, None] + np.arange(8 * self._scale)
        down, right = np.moveaxis(places // self._scale, 1, 0)
        return self._x[rows[:, None, None], down[:, :, None], right[:, None, :]]

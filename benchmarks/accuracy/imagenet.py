"""ImageNet as a folder of JPEGs, one folder per class: read, cropped and normalized.

References:
  Goyal et al., `Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour
  <https://arxiv.org/abs/1706.02677>`_ (2017), section 5.1.
  Szegedy et al., `Going Deeper with Convolutions
  <https://arxiv.org/abs/1409.4842>`_ (2014), section 6: the random crop.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from .train import Batch

View = Callable[[Image.Image, int], Image.Image]

SIZE = 224
SUFFIXES = (".jpeg", ".jpg", ".png")
# Of all training images, in red, green and blue; pixels in [0, 1].
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
# The part of the image's area that a random crop has, and its width by its height.
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# A crop that does not fit is drawn again, and at last taken from the middle.
DRAWS = 10
# Batches that are read while one is trained on.
AHEAD = 2

NEEDED = """\
needs a folder with an image per file and a folder per class, the same classes in both:
  train/<class>/<image>.JPEG
  val/<class>/<image>.JPEG
type
  python -m benchmarks run resnet101-accuracy --scale full --data /path/to/imagenet
or, without ImageNet, --scale small: digits that come with scikit-learn"""


class Split(NamedTuple):
    """The images to train on, or to test on.

    Attributes:
      paths: of the files, class by class.
      labels: the number of each file's class: its place among the sorted names.
    """

    paths: list[Path]
    labels: np.ndarray


class ImageFolder:
    """Images to train on and to test on, in batches ``[batch, 224, 224, 3]``.

    Args:
      root: the folder in which ``train`` and ``val`` are.

    Raises:
      ValueError: if the folder is not such a one.
    """

    shape: tuple[int, ...] = (SIZE, SIZE, 3)

    def __init__(self, root: Path | None) -> None:
        if root is None:
            raise ValueError(f"data=None: no images were given; {NEEDED}")
        classes = {part: _classes(root / part) for part in ("train", "val")}
        if not classes["train"] or classes["train"] != classes["val"]:
            counts = ", ".join(f"{part}/ {len(own)}" for part, own in classes.items())
            raise ValueError(
                f"data={str(root)!r} cannot be used: classes with images in {counts}; "
                f"{NEEDED}"
            )
        self.num_classes = len(classes["train"])
        self._train = _read_split(root / "train", classes["train"])
        self._val = _read_split(root / "val", classes["val"])
        self.num_training = len(self._train.paths)

    def training(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch: in random order, randomly cropped and flipped.

        Only whole batches, so that one program serves all; which images are left out
        is another draw in each epoch. What an image becomes depends on seed, epoch
        and image, not on the threads.
        """
        rows = np.random.default_rng([seed, epoch]).permutation(self.num_training)

        def view(image: Image.Image, row: int) -> Image.Image:
            return random_view(image, np.random.default_rng([seed, epoch, row]))

        count = len(rows) // batch
        groups = np.split(rows[: count * batch], count) if count else []
        return _batches(self._train, groups, view)

    def test(self, batch: int) -> Iterator[Batch]:
        """All images to test on, in order; the last batch may be smaller."""
        rows = np.arange(len(self._val.paths))
        groups = np.split(rows, range(batch, len(rows), batch))
        return _batches(self._val, groups, lambda image, _: central_view(image))


def _classes(folder: Path) -> list[str]:
    """The sorted names of folders that have an image; none if there is no folder."""
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path.name for path in folders if path.is_dir() and _images(path)]


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _read_split(folder: Path, classes: Sequence[str]) -> Split:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = _images(folder / name)
        paths += images
        labels += [label] * len(images)
    return Split(paths, np.array(labels, np.int32))


def _batches(split: Split, groups: Sequence[np.ndarray], view: View) -> Iterator[Batch]:
    """Reads batches with threads, some ahead of the one that is asked for."""

    def read(row: int) -> np.ndarray:
        # A few files of ImageNet are gray or CMYK.
        with Image.open(split.paths[row]) as image:
            pixels = np.asarray(view(image.convert("RGB"), row), np.float32)
        return (pixels / 255 - MEAN) / STD

    pool = ThreadPoolExecutor(os.cpu_count())
    waiting = deque()
    try:
        for rows in groups:
            images = [pool.submit(read, int(row)) for row in rows]
            waiting.append((images, split.labels[rows]))
            if len(waiting) > AHEAD:
                images, labels = waiting.popleft()
                yield np.stack([image.result() for image in images]), labels
        for images, labels in waiting:
            yield np.stack([image.result() for image in images]), labels
    finally:
        pool.shutdown(cancel_futures=True)


def random_view(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A random part of an image, scaled to a square, half of the times mirrored."""
    box = random_box(*image.size, rng)
    part = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return part


def random_box(
    width: int, height: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom: of random area, shape and place inside the image."""
    for _ in range(DRAWS):
        area = width * height * rng.uniform(*SCALE)
        # Uniform in the logarithm: as often twice as wide as twice as high.
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            top = int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return _central_box(width, height, w, h)


def central_view(image: Image.Image) -> Image.Image:
    """The middle square of an image whose shorter side is 256 pixels."""
    width, height = (side * 256 // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return image.crop(_central_box(width, height, SIZE, SIZE))


def _central_box(width: int, height: int, w: int, h: int) -> tuple[int, int, int, int]:
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h

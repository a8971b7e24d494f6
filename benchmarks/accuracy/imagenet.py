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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

Batch = tuple[np.ndarray, np.ndarray]
Box = tuple[int, int, int, int]
View = Callable[[Image.Image, int], Image.Image]

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


@dataclass(frozen=True)
class Split:
    """The images to train on, or to test on.

    Attributes:
      paths: of the files, class by class.
      labels: the number of each one's class: its place among the sorted names.
    """

    paths: Sequence[str]
    labels: np.ndarray


class ImageFolder:
    """Images to train on and to test on, in batches ``[batch, size, size, 3]``.

    Args:
      root: the folder in which ``train`` and ``val`` are.
      size: pixels along an image that the model sees.
      workers: threads that decode; default: one per core.

    Raises:
      ValueError: if the folder is not such a one, with all that is missing.
    """

    def __init__(
        self, root: Path | None, *, size: int = 224, workers: int | None = None
    ) -> None:
        if root is None:
            raise ValueError(f"data=None: no images were given; {NEEDED}")
        if faults := list(_faults(Path(root))):
            listed = "".join(f"\n  * {fault}" for fault in faults)
            raise ValueError(f"data={str(root)!r} cannot be used:{listed}\n{NEEDED}")
        self.classes = _folders(Path(root, "train"))
        self.shape = (size, size, 3)
        self._size = size
        self._workers = workers or os.cpu_count() or 1
        self._train, self._val = (
            _read_split(Path(root, part), self.classes) for part in ("train", "val")
        )

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def num_training(self) -> int:
        """How many images there are to train on."""
        return len(self._train.paths)

    def training(self, batch: int, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch: in random order, randomly cropped and flipped.

        Only whole batches, so that one program serves all; which images are left out
        is another draw in each epoch. What an image becomes depends on seed, epoch
        and image, not on the threads.
        """
        rows = np.random.default_rng([seed, epoch]).permutation(self.num_training)
        whole = len(rows) // batch
        groups = np.split(rows[: whole * batch], whole) if whole else []

        def view(image: Image.Image, row: int) -> Image.Image:
            rng = np.random.default_rng([seed, epoch, row])
            return random_view(image, self._size, rng)

        return self._batches(self._train, groups, view)

    def test(self, batch: int) -> Iterator[Batch]:
        """All images to test on, in order; the last batch may be smaller."""
        rows = np.arange(len(self._val.paths))
        groups = np.split(rows, range(batch, len(rows), batch))
        return self._batches(
            self._val, groups, lambda image, _: central_view(image, self._size)
        )

    def _batches(
        self, split: Split, groups: Iterable[np.ndarray], view: View
    ) -> Iterator[Batch]:
        """Reads batches with threads, some ahead of the one that is asked for."""
        pool = ThreadPoolExecutor(self._workers)
        waiting: deque[tuple[np.ndarray, np.ndarray, list[Future[None]]]] = deque()

        def finish() -> Batch:
            images, rows, futures = waiting.popleft()
            for future in futures:
                future.result()
            return images, split.labels[rows]

        try:
            for rows in groups:
                # Each thread writes into the batch: stacking would copy it once more.
                images = np.empty((len(rows), *self.shape), np.float32)
                futures = [
                    pool.submit(_read_into, images[i], split.paths[row], view, row)
                    for i, row in enumerate(map(int, rows))
                ]
                waiting.append((images, rows, futures))
                if len(waiting) > AHEAD:
                    yield finish()
            while waiting:
                yield finish()
        finally:
            pool.shutdown(cancel_futures=True)


def _read_into(out: np.ndarray, path: str, view: View, row: int) -> None:
    """Decodes one file, and writes what the model sees of it."""
    try:
        with Image.open(path) as image:
            # A few files of ImageNet are gray or CMYK.
            seen = view(image.convert("RGB"), row)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    normalize(np.asarray(seen), out)


def normalize(pixels: np.ndarray, out: np.ndarray) -> None:
    """Writes ``(pixels / 255 - MEAN) / STD`` in single precision."""
    np.multiply(pixels, 1 / (255 * STD), out=out)
    out -= MEAN / STD


def random_view(image: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """A random part of an image, scaled to a square, half of the times mirrored."""
    part = image.crop(random_box(*image.size, rng))
    part = part.resize((size, size), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return part


def random_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Left, top, right, bottom: of random area, shape and place inside the image."""
    for _ in range(DRAWS):
        area = width * height * rng.uniform(*SCALE)
        # Uniform in the logarithm: as often twice as wide as twice as high.
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w + 1))
            top = int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return _central_box(width, height, w, h)


def central_view(image: Image.Image, size: int) -> Image.Image:
    """The middle square of an image whose shorter side is 8/7 of it: 224 of 256."""
    shorter, target = min(image.size), round(size * 256 / 224)
    width, height = (side * target // shorter for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return image.crop(_central_box(width, height, size, size))


def _central_box(width: int, height: int, w: int, h: int) -> Box:
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _faults(root: Path) -> Iterator[str]:
    """What keeps a folder from being used."""
    if not root.is_dir():
        yield "there is no such folder"
        return
    names = {}
    for part in ("train", "val"):
        folder = root / part
        names[part] = set(_folders(folder)) if folder.is_dir() else set()
        if not folder.is_dir():
            yield f"it has no folder {part}/"
        elif not names[part]:
            yield f"{part}/ has no folders, one per class"
        elif empty := [name for name in _folders(folder) if not _files(folder / name)]:
            yield f"{part}/ has classes without a JPEG or PNG: {_listed(empty)}"
    train, val = names["train"], names["val"]
    if train and val and (odd := sorted(train ^ val)):
        yield f"classes are in one of train/ and val/ only: {_listed(odd)}"


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _files(folder: Path) -> list[str]:
    found = (entry for entry in os.scandir(folder) if entry.is_file())
    return sorted(e.path for e in found if e.name.lower().endswith(SUFFIXES))


def _read_split(folder: Path, classes: Sequence[str]) -> Split:
    files = [_files(folder / name) for name in classes]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, files)))
    return Split([path for group in files for path in group], labels)

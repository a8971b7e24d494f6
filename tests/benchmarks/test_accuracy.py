"""The accuracy benchmark: its recipe, its images, and that both together train."""

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn
from PIL import Image
from rich.progress import Progress

from benchmarks import accuracy
from benchmarks.accuracy import digits, imagenet
from benchmarks.accuracy.recipe import Recipe
from benchmarks.accuracy.train import Experiment, Outcome, Training
from benchmarks.models import resnet

FEW = Recipe().shortened(2)  # with ten steps an epoch it drops at 6.7, 13.3 and 17.8
WARM = [(0, 0.1), (1, 0.1075), (39, 0.3925), (40, 0.4), (41, 0.4)]
DROPS = [(299, 0.4), (300, 0.04), (301, 0.04), (599, 0.04), (600, 4e-3), (601, 4e-3)]


COURSES = [
    # A batch of 1024, ten steps an epoch: from 0.1 to 0.4 in 40 steps.
    (Recipe(), 1024, 10, [*WARM, *DROPS, (799, 4e-3), (800, 4e-4), (801, 4e-4)]),
    # 1,281,167 images are 5004 batches of 256, and 312 of 4096.
    (Recipe(), 256, 5004, [(0, 0.1), (20_016, 0.1), (150_119, 0.1), (150_120, 0.01)]),
    (Recipe(), 4096, 312, [(0, 0.1), (624, 0.85), (1248, 1.6), (28_079, 0.0016)]),
    (FEW, 512, 10, [(0, 0.1), (1, 0.2), (6, 0.2), (7, 0.02), (14, 2e-3), (18, 2e-4)]),
]


@pytest.mark.parametrize(("recipe", "batch", "steps", "course"), COURSES)
def test_the_learning_rate_at_the_corners(recipe, batch, steps, course):
    schedule = recipe.learning_rate(batch, steps)
    rates = [schedule(step) for step, _ in course]
    np.testing.assert_allclose(rates, [rate for _, rate in course], rtol=1e-6)


def test_the_optimizer_is_that_of_torch():
    # SGD(momentum=0.9, weight_decay=1e-4, nesterov=True) written out.
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "scale": rng.normal(size=2)}
    tx = Recipe(warmup=2, drops=(5,), batch=128).optimizer(256, steps_per_epoch=1)
    actual = jax.tree.map(np.float32, params)
    state, update = tx.init(actual), jax.jit(tx.update)
    velocity = dict.fromkeys(params, 0)
    for rate in [0.1, 0.15, 0.2, 0.2, 0.2, 0.02, 0.02]:
        grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
        updates, state = update(jax.tree.map(np.float32, grads), state, actual)
        for name, grad in grads.items():
            actual[name] = actual[name] + np.asarray(updates[name])
            grad = grad + 1e-4 * params[name]
            velocity[name] = 0.9 * velocity[name] + grad
            params[name] = params[name] - rate * (grad + 0.9 * velocity[name])
    for name in params:
        np.testing.assert_allclose(actual[name], params[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def quick():
    """These tests ask for numbers, not for programs: those compile in half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


CLASSES = {"n03": (230, 30, 30), "n01": (30, 230, 30), "n02": (30, 30, 230)}
SIZES = [(40, 20), (16, 48), (30, 30), (21, 17)]


def save(image, *path):
    file = Path(*path)
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three classes of one color each: 12 images to train on, 7 to test on."""
    root = tmp_path_factory.mktemp("images")
    for name, color in CLASSES.items():
        for part, count in [("train", 4), ("val", 3 if name == "n01" else 2)]:
            for i in range(count):
                # No two are alike, so that each can be told from its pixels.
                shade = tuple(c + 5 * i for c in color)
                save(Image.new("RGB", SIZES[i], shade), root, part, name, f"{i}.JPEG")
        (root / "train" / name / "read me.txt").write_text("no image")
    return root


def colors(x):
    """The mean color of each image, in [0, 255]."""
    return (x.mean((1, 2)) * imagenet.STD + imagenet.MEAN) * 255


def test_labels_follow_the_sorted_names_and_pixels_are_normalized(folder):
    images = imagenet.ImageFolder(folder, size=14)
    batches = list(images.test(3))
    assert [x.shape for x, _ in batches] == [(3, 14, 14, 3)] * 2 + [(1, 14, 14, 3)]
    x, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert images.classes == ["n01", "n02", "n03"]
    assert (x.dtype, labels.dtype) == (np.float32, np.int32)
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2]
    numbers = [0, 1, 2, 0, 1, 0, 1]
    known = [CLASSES[images.classes[label]] for label in labels]
    expected = np.array(known) + 5 * np.array(numbers)[:, None]
    np.testing.assert_allclose(colors(x), expected, atol=3)  # JPEG rounds
    np.testing.assert_array_less(x.std((1, 2)), 1e-4)


def test_an_epoch_has_each_image_once_in_whole_batches(folder):
    images = imagenet.ImageFolder(folder, size=14)
    xs, labels = zip(*images.training(4, seed=0, epoch=0), strict=True)
    seen, labels = colors(np.concatenate(xs)), np.concatenate(labels)
    assert sorted(labels) == [0] * 4 + [1] * 4 + [2] * 4
    np.testing.assert_array_equal(np.argmax(seen, -1), np.array([1, 2, 0])[labels])
    shades = (np.median(seen, -1) - 30) / 5
    assert sorted(shades.round()) == sorted([0, 1, 2, 3] * 3)
    assert [len(x) for x, _ in images.training(5, 0, 0)] == [5, 5]
    assert list(images.training(13, 0, 0)) == []


def test_the_seed_decides_and_the_threads_do_not(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for i in range(8):  # noise: every crop is another
            pixels = rng.integers(256, size=(40, 50, 3), dtype=np.uint8)
            save(Image.fromarray(pixels), tmp_path, part, "ab"[i % 2], f"{i}.png")

    def epoch(seed, number, workers):
        images = imagenet.ImageFolder(tmp_path, size=8, workers=workers)
        xs, labels = zip(*images.training(2, seed, number), strict=True)
        return np.concatenate(xs), np.concatenate(labels)

    x, labels = epoch(0, 0, 1)
    again, same = epoch(0, 0, 4)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(labels, same)
    for other, _ in (epoch(1, 0, 1), epoch(0, 1, 1)):
        assert not any(np.array_equal(a, b) for a in x for b in other)
    # Whoever stops early waits for no thread.
    batches = imagenet.ImageFolder(tmp_path, size=8).training(1, 0, 0)
    next(batches)
    batches.close()


SHAPES = [(500, 375), (375, 500), (1, 1), (1, 300), (300, 1), (3, 2), (2000, 100)]


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_random_boxes_are_inside(width, height):
    rng = np.random.default_rng(0)
    boxes = np.array([imagenet.random_box(width, height, rng) for _ in range(500)])
    left, top, right, bottom = boxes.T
    assert np.all((left >= 0) & (left < right) & (right <= width))
    assert np.all((top >= 0) & (top < bottom) & (bottom <= height))
    w, h = right - left, bottom - top
    if min(width, height) > 300:
        area, ratio = w * h / (width * height), w / h
        assert 0.079 < area.min() < 0.1 < 0.9 < area.max() <= 1
        assert 0.74 < ratio.min() < 0.78 < 1.28 < ratio.max() < 1.35
    if width == 2000:  # what is drawn never fits: the middle, as wide as allowed
        assert {tuple(box) for box in boxes.tolist()} == {(933, 0, 1066, 100)}


def test_half_of_the_views_are_mirrored():
    rising = np.arange(64, dtype=np.uint8)[None, :, None] + np.zeros((64, 1, 3), "u1")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rising)
    views = [np.asarray(imagenet.random_view(image, 8, rng), int) for _ in range(200)]
    assert 75 < sum(view[0, -1, 0] > view[0, 0, 0] for view in views) < 125


def test_the_central_view():
    pixels = np.random.default_rng(0).integers(256, size=(256, 300, 3), dtype=np.uint8)
    view = imagenet.central_view(Image.fromarray(pixels), 224)
    np.testing.assert_array_equal(view, pixels[16:240, 38:262])
    for size in [(301, 97), (50, 1000), (1, 1)]:
        assert imagenet.central_view(Image.new("RGB", size), 224).size == (224, 224)


@pytest.mark.parametrize("mode", ["L", "CMYK", "1", "RGBA", "P"])
def test_images_of_all_kinds_become_rgb(mode, tmp_path):
    suffix = {"L": "JPEG", "CMYK": "jpg"}.get(mode, "png")
    for part in ("train", "val"):
        image = Image.new("L", (30, 20), 255).convert(mode)
        save(image, tmp_path, part, "a", f"0.{suffix}")
    ((x, _),) = imagenet.ImageFolder(tmp_path, size=8).test(4)
    np.testing.assert_allclose(colors(x), [[255] * 3], atol=2)


@pytest.mark.parametrize("end", [0, 200])
def test_a_file_that_is_no_image_is_named(end, folder, tmp_path):
    whole = (folder / "train" / "n01" / "0.JPEG").read_bytes()
    for name in ["train/a/cut.JPEG", "val/a/0.JPEG"]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(whole[:end])
    with pytest.raises(ValueError, match=r"train/a/cut.JPEG cannot be read as an im"):
        list(imagenet.ImageFolder(tmp_path, size=8).training(1, 0, 0))


FAULTS = {
    "": "it has no folder train/\n  * it has no folder val/",
    "train/a/0.jpg": "it has no folder val/",
    "train/a/0.jpg val/0.jpg": "val/ has no folders, one per class",
    "train/a/0.jpg val/a/x.txt": "val/ has classes without a JPEG or PNG: a",
    "train/a/0.jpg train/b/0.jpg val/a/0.jpg": "in one of train/ and val/ only: b",
}


@pytest.mark.parametrize("files", FAULTS)
def test_what_is_missing_is_said(files, tmp_path):
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="cannot be used") as caught:
        imagenet.ImageFolder(tmp_path)
    for part in (FAULTS[files], str(tmp_path), "val/<class>/<image>", "--data /path"):
        assert part in str(caught.value)


def thin(num_classes):
    """The large model without its middle, and without norms of two images each."""
    stem = [nn.Conv(8, (3, 3), (2, 2)), nn.relu, resnet.max_pool]
    return [*stem, resnet.average_pool, resnet.flatten, resnet.linear(num_classes, 8)]


def test_the_whole_recipe_trains_on_a_folder(folder, quick):
    images = imagenet.ImageFolder(folder, size=14)
    recipe = replace(Recipe(), batch=4).shortened(10)
    experiment = Experiment(batch=4, chunks=2, balance=(2, 4))
    training = Training(experiment, thin(images.num_classes), images, recipe)
    reports = []
    first = training.run(3, lambda *args: reports.append(args[:2]))
    assert reports == [(3, epoch + 1) for epoch in range(10)]
    assert first.error < 34  # of three colors it has learned two, at least
    assert first.throughput > 0
    # Seven images in batches of four: what fills up the last batch does not count.
    sevenths = np.array(first.errors) * 7 / 100
    np.testing.assert_allclose(sevenths, sevenths.round(), atol=1e-9)
    assert training.run(3, lambda *_: None).errors == first.errors


def test_the_error_is_the_median_of_the_last_five_epochs():
    assert Outcome([90, 80, 5, 1, 2, 3, 4], 1.0).error == 3
    assert Outcome([90, 80], 1.0).error == 85


def test_the_experiments_of_the_published_table_are_pipelines():
    layers = resnet.resnet101()
    pipes = [e.pipeline(layers) for e in accuracy.IMAGENET.values()]
    assert [(p.num_stages, p.num_microbatches) for p in pipes] == [
        *[(2, 4), (8, 64), (8, 64)]
    ]
    peaks = [Recipe().peak(e.batch) for e in accuracy.IMAGENET.values()]
    np.testing.assert_allclose(peaks, [0.1, 0.4, 1.6])


def run(scale, **options):
    defaults = {"experiments": None, "seeds": 1, "data": None}
    with Progress(disable=True) as progress:
        return accuracy.run(scale, **defaults | options, progress=progress)


MISFITS = [
    ("huge", {}, "scale='huge': needs one of full, small, tiny"),
    ("tiny", {"seeds": 0}, "seeds=0: needs at least 1"),
    ("tiny", {"experiments": ["x", "one-device-32"]}, "no experiment x at scale"),
    ("full", {}, "data=None: no images were given; needs a folder"),
    ("full", {"data": Path("nowhere")}, "data='nowhere' cannot be used"),
]


@pytest.mark.parametrize(("scale", "options", "said"), MISFITS)
def test_options_that_do_not_fit(scale, options, said):
    with pytest.raises(ValueError, match=said):
        run(scale, **options)


def test_the_full_scale_reads_its_folder_and_counts_its_devices(folder, monkeypatch):
    with pytest.raises(ValueError, match="a batch has 256 images, there are 12"):
        run("full", data=folder)
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    with pytest.raises(ValueError, match=r"are 2 devices.*pipeline-1k 8, pipeline-4k"):
        run("full", data=folder)


def test_digits_are_enlarged_and_shifted():
    data = digits.Digits(4, (100, 50))
    x, labels = (np.concatenate(p) for p in zip(*data.test(20), strict=True))
    assert (x.shape, labels.shape) == ((50, 32, 32, 1), (50,))
    np.testing.assert_array_equal(x, x[:, ::4, ::4].repeat(4, 1).repeat(4, 2))
    first, again = (list(data.training(32, seed=0, epoch=0)) for _ in range(2))
    assert [x.shape for x, _ in first] == [(32, 32, 32, 1)] * 3
    np.testing.assert_array_equal(again[0][0], first[0][0])
    other = next(data.training(32, seed=0, epoch=1))
    assert not np.array_equal(other[0], first[0][0])


def test_the_tiny_scale_fills_all_cells(quick):
    rows = run("tiny", seeds=2)
    assert list(rows) == accuracy.EXPERIMENTS["tiny"]
    json.dumps({name: list(map(asdict, row.values())) for name, row in rows.items()})
    for name in islice(rows, 2):
        error, throughput = rows[name]["error"], rows[name]["throughput"]
        assert (error.kind, throughput.kind) == ("measured", "measured")
        assert (error.unit, throughput.unit) == ("%", "samples/s")
        assert 0 <= error.value <= 100
        assert error.spread is not None
        assert len(error.detail["by seed"]) == len(error.detail["by epoch"]) == 2
        assert throughput.value > 0
    assert 0 <= rows[digits.APART]["difference"].value < 1e-3

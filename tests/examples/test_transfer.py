"""The recipe of `examples/transfer.py`: its images, its runs, its table."""

import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from PIL import Image
from rich.progress import Progress

import jpipe

from ..programs import ROOT, run

# Of the extra `tasks`, which `make test-all` installs in an environment of its own.
for package in ("mlxtend", "fontpkg_roboto"):
    pytest.importorskip(package)

EXAMPLES = ROOT / "examples"


@pytest.fixture
def modules(monkeypatch):
    """The modules of examples by name, as the programs import them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_letters_that_are_tested_are_of_families_that_nothing_trains_on(modules):
    images = modules("images")
    task = images.draw_script("Greek", 16)
    assert task.num_classes == 24
    assert task.x.shape[1:] == task.x_test.shape[1:] == (16, 16, 1)
    for pixels, labels in ((task.x, task.labels), (task.x_test, task.labels_test)):
        counts = np.bincount(labels)
        assert len(pixels) == len(labels)
        assert len({*counts}) == 1  # each letter in each face, in both cases
        assert len(counts) == 24
        assert counts[0] % 2 == 0
    trained = {image.tobytes() for image in task.x}
    assert not trained & {image.tobytes() for image in task.x_test}
    families = images.list_families()
    assert families.keys() & images.HELD_OUT
    assert families.keys() - images.HELD_OUT


def test_a_script_that_too_few_families_have_is_refused(modules, monkeypatch):
    images = modules("images")
    monkeypatch.setattr(images, "HELD_OUT", set())
    with pytest.raises(ValueError, match=r"Greek: too few families.*\.\[tasks\]"):
        images.draw_script.__wrapped__("Greek", 16)


def test_images_move_a_little_and_stay_where_nothing_shall_move(modules, monkeypatch):
    images = modules("images")
    pixels = images.read_scikit_digits(16).x[:6]
    moved = images.augment(jax.random.key(0), pixels)
    assert moved.shape == (6, 16, 16, 3)
    np.testing.assert_array_equal(moved, images.augment(jax.random.key(0), pixels))
    still = images.normalize(pixels)
    assert jnp.abs(moved - still).max() > 0.1
    assert jnp.abs(moved.mean() - still.mean()) < 0.1
    for name in ("TURN", "GROWTH", "SHIFT"):
        monkeypatch.setattr(images, name, 0.0)
    unmoved = images.augment.__wrapped__(jax.random.key(0), pixels)
    np.testing.assert_allclose(unmoved, still, atol=1e-6)


def save_image(path, mode, color, size=(9, 7)):
    path.parent.mkdir(exist_ok=True)
    Image.new(mode, size, color).save(path)


def test_a_folder_of_images_is_a_task_in_colour(modules, tmp_path):
    colors = {"blue": (0, 0, 255), "red": (255, 0, 0)}
    for name, color in colors.items():
        for number in range(5):
            path = tmp_path / name / f"{number}.png"
            save_image(path, "RGB", color, size=(9 + number, 7))
        (tmp_path / name / "notes.txt").write_text("no image")
    save_image(tmp_path / ".thumbnails" / "0.png", "RGB", (0, 255, 0))
    images = modules("images")
    task = images.read_folder(tmp_path, 4)
    assert (len(task.x), len(task.x_test), task.num_classes) == (8, 2, 2)
    pixels = np.concatenate([task.x, task.x_test])
    labels = np.concatenate([task.labels, task.labels_test])
    for number, color in enumerate(colors.values()):
        expected = np.broadcast_to(np.array(color, np.uint8), (5, 4, 4, 3))
        np.testing.assert_array_equal(pixels[labels == number], expected)


def test_images_in_other_modes_look_the_same_in_three_channels(modules, tmp_path):
    images = modules("images")
    for mode, color, expected in (
        ("L", 100, (100, 100, 100)),
        ("I;16", 256 * 100 + 7, (100, 100, 100)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
    ):
        save_image(tmp_path / "an image.png", mode, color)
        pixels = images.read_image(tmp_path / "an image.png", 4)
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels, np.broadcast_to(expected, (4, 4, 3)))


def test_a_folder_without_two_classes_is_refused(modules, tmp_path):
    images = modules("images")
    with pytest.raises(ValueError, match=r"has 0 images in 0 folders: --data needs"):
        images.read_folder(tmp_path, 4)
    for number in range(6):
        save_image(tmp_path / "one" / f"{number}.JPEG", "L", 1)
    with pytest.raises(ValueError, match=r"has 6 images in 1 folders.* two classes"):
        images.read_folder(tmp_path, 4)


class Small:
    """A learner of three layers, which `Runs` trains."""

    num_steps = 5
    recipe = "five steps"

    def __init__(self):
        layers = [nn.Dense(4), nn.tanh, nn.Dense(3)]
        devices = jax.devices()[:2]
        self.pipe = jpipe.pipeline(layers, 2, balance=[1, 2], devices=devices)
        self.tx = optax.adam(0.1)
        self.train_step = self.pipe.train_step(self.loss, self.tx)

    @staticmethod
    def loss(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    def init(self, seed, variables=None):
        key, x = jax.random.key(seed), jnp.ones((4, 2))
        return self.pipe.init_train_state(key, x, self.tx, variables=variables)

    def step(self, state, seed, position):
        x = jax.random.normal(jax.random.key(100 * seed + position), (4, 2))
        return self.train_step(state, x, x[:, :1] * jnp.ones((1, 3)))

    def test(self, state):
        return 0.5


def test_a_run_that_was_stopped_goes_on_to_the_same_losses(modules, tmp_path):
    learner = Small()
    first = tmp_path / "whole"
    second = tmp_path / "stopped"
    first.mkdir()
    second.mkdir()
    with Progress(disable=True) as bars:

        def runs(folder, stop_after=None):
            return modules("runs").Runs(folder, lambda step: step == stop_after, bars)

        whole = runs(first).fit(learner, "run", seed=1)
        # Twice: after two steps, and after two more.
        for number in (2, 4):
            with pytest.raises(SystemExit) as stop:
                runs(second, stop_after=2).fit(learner, "run", seed=1)
            record = json.loads((second / "run.json").read_text())
            assert stop.value.code == 75
            assert record["losses"] == whole["losses"][:number]
            steps = [path.name for path in second.glob("run-step*")]
            assert steps == [f"run-step_{number:06}"]
        last = runs(second)
        continued = last.fit(learner, "run", seed=1)
        assert last.num_steps == 1
        assert last.fit(learner, "run", seed=1) == continued
        assert last.num_steps == 1  # it is finished, and not trained anew
    del continued["seconds"], whole["seconds"]
    assert continued == whole
    assert len({*whole["losses"]}) == 5
    assert [*whole["tests"]] == ["2", "3", "4", "5"]
    assert [path.name for path in second.iterdir()] == ["run.json"]


def test_a_run_of_another_recipe_is_not_taken_for_this_one(modules, tmp_path):
    learner = Small()
    with Progress(disable=True) as bars:
        runs = modules("runs").Runs(tmp_path, lambda step: False, bars)
        runs.fit(learner, "run", seed=1)
        learner.recipe = "ten steps"
        with pytest.raises(ValueError, match=r"of five steps, not of ten .* --folder"):
            runs.fit(learner, "run", seed=1)


def test_a_run_begins_with_the_layers_of_another_but_for_the_last(modules, tmp_path):
    learner = Small()
    first_states = []
    step = learner.step

    def watch(state, seed, position):
        if position == 0:
            first_states.append(jax.device_get(state.params))
        return step(state, seed, position)

    learner.step = watch
    with Progress(disable=True) as bars:
        runs = modules("runs").Runs(tmp_path, lambda step: False, bars)
        runs.fit(learner, "first", seed=1, keep="body")
        runs.fit(learner, "tuned", seed=2, body="body")
        runs.fit(learner, "scratch", seed=2)
    _, tuned, scratch = first_states
    like = list(learner.init(0).variables[:-1])
    kept = jax.device_get(jpipe.checkpoint.restore(tmp_path / "body", like))
    jax.tree.map(np.testing.assert_array_equal, tuned[0], kept[0]["params"])
    jax.tree.map(np.testing.assert_array_equal, tuned[2], scratch[2])
    assert np.any(tuned[0]["kernel"] != scratch[0]["kernel"])


def test_the_page_shows_the_table_of_the_report(modules):
    report = modules("transfer_report")
    record = {"losses": [1.0], "tests": {"1": 0.5}, "seconds": 60.0}
    other = {**record, "tests": {"1": 0.7}}
    row = report.Row("Greek", 1000, 20, 24, {"tuned": [record, other], "scratch": []})
    losses = {"pipelined": [2.0], "unpipelined": [2.5]}
    text = report.describe([row], losses=losses, command="python x.py", model="a model")
    assert "| Greek | 1,000 | 20 | 24 | 60.0 ± 14.1 | - |\n" in text
    assert "| 1 | 2.000000 | 2.500000 |\n" in text
    assert "`python x.py`: a model; 2 runs, 2.0 minutes" in text
    page = (ROOT / "docs" / "transfer.md").read_text()
    for line in text.splitlines():
        if re.match(r"\| (images|step|-)", line):
            assert line in page, line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the program runs, so that what one run compiled the next one reads."""
    return tmp_path_factory.mktemp("transfer")


# The program with five quick layers, of which three have batch norms.
QUICK = """
import sys
import learner
import transfer
from benchmarks.models.amoebanet import ReluConvNorm
from flax import linen as nn

def small(num_classes, **sizes):
    convolutions = [ReluConvNorm(4, (3, 3), (4, 4)) for _ in range(3)]
    return [*convolutions, lambda x: x.mean((1, 2)), nn.Dense(num_classes)]

learner.amoebanetd = small
sys.exit(transfer.main())
"""


def transfer(folder, *options, **expected):
    return run("-c", QUICK, "--tiny", *options, folder=folder, **expected)


@pytest.fixture(scope="module")
def whole(folder):
    """The table of five seeds: what its command prints, and its results."""
    printed = transfer(folder, "--table")
    return printed, read_results(folder / "build/transfer")


def read_results(folder):
    return json.loads((folder / "tiny" / "results.json").read_text())


@pytest.mark.slow
def test_the_table_has_five_seeds_in_both_ways(folder, whole):
    printed, results = whole
    first, second = results["rows"]
    assert [len(records) for records in first["records"].values()] == [1]
    seeds = [
        tuple(record["losses"])
        for records in second["records"].values()
        for record in records
    ]
    assert [len(losses) for losses in seeds] == 10 * [4]
    assert len({*seeds}) == 10
    assert re.search(r"Hebrew .* 462 .* 242 .* 22 .*\d ± \d.*\d ± \d", printed)
    losses = results["losses"]
    assert len(losses["pipelined"]) == 5
    np.testing.assert_allclose(losses["pipelined"], losses["unpipelined"], rtol=1e-5)
    for name in ("results.md", "curves.png", "images.png"):
        assert (folder / "build/transfer/tiny" / name).stat().st_size > 500
    assert {path.name for path in folder.iterdir()} == {"build"}


@pytest.mark.slow
def test_a_recipe_that_was_stopped_goes_on_to_the_same_results(folder, whole):
    stopped = transfer(folder, "--folder=build/stopped", "--preempt-after=6", status=75)
    assert "scikit-learn digits: 4 steps" in stopped
    assert "Hebrew-tuned-1: 2 steps" in stopped
    continued = transfer(folder, "--folder=build/stopped")
    assert "scikit-learn digits: 4 steps" not in continued
    _, results = whole
    rows = read_results(folder / "build/stopped")["rows"]
    for row, whole_row in zip(rows, results["rows"], strict=True):
        for arm, records in row["records"].items():
            assert len(records) == 1
            whole_record = whole_row["records"][arm][0]
            for name in ("recipe", "losses", "tests"):
                assert records[0][name] == whole_record[name]


@pytest.mark.slow
def test_a_folder_of_images_is_learnt_from_the_layers_of_the_first_task(folder, whole):
    """Ten classes of noise about a shade, in colour and grey, of several sizes."""
    data = folder / "build" / "shades"
    data.mkdir()
    rng = np.random.default_rng(0)
    for shade in range(10):
        (data / f"shade {shade}").mkdir()
        for number in range(4):
            channels = [3] if number % 2 else []
            shape = (20 + 3 * number, 40 - number, *channels)
            pixels = rng.integers(25 * shade, 25 * shade + 25, shape, np.uint8)
            Image.fromarray(pixels).save(data / f"shade {shade}" / f"{number}.png")
    printed = transfer(folder, f"--data={data}")
    assert "scikit-learn digits: 4 steps" not in printed  # it is learnt already
    for arm in ("tuned", "scratch"):
        assert re.search(rf"shades-{arm}-1: 4 steps, loss \d", printed)
    assert re.search(r"shades .* 32 .* 8 .* 10 ", printed)
    rows = read_results(folder / "build/transfer")["rows"]
    assert [row["name"] for row in rows] == ["scikit-learn digits", "shades"]


@pytest.mark.slow
def test_amoebanet_learns_the_same_in_four_stages_and_in_one(modules, quick, tmp_path):
    transfer = modules("transfer")
    form = transfer.FORMS["tiny"]
    task = modules("images").read_task(form.source, form.size)
    learner = transfer.Learner(task, form, form.source_steps)
    losses = transfer.compare(learner, tmp_path / "losses.json")
    assert len({*losses["pipelined"]}) == 5
    np.testing.assert_allclose(losses["pipelined"], losses["unpipelined"], rtol=1e-5)


@pytest.mark.slow
def test_the_plan_of_the_paper_is_the_one_of_the_page(folder):
    printed = run(str(EXAMPLES / "transfer.py"), "--plan=paper", folder=folder)
    page = (ROOT / "docs" / "transfer.md").read_text()
    block = page.split("```text\n")[1].split("```")[0]
    for line in block.splitlines():
        assert line.rstrip() in printed or line == "...", line
    assert "481,268,200 params" in printed

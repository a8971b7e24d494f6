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


def test_a_folder_of_images_is_a_task_in_colour(modules, tmp_path):
    colors = {"blue": (0, 0, 255), "red": (255, 0, 0)}
    for name, color in colors.items():
        (tmp_path / name).mkdir()
        for number in range(5):
            image = Image.new("RGB", (9, 7), color)
            image.save(tmp_path / name / f"{number}.png")
    images = modules("images")
    task = images.read_folder(tmp_path, 4)
    assert (len(task.x), len(task.x_test), task.num_classes) == (8, 2, 2)
    pixels = np.concatenate([task.x, task.x_test])
    labels = np.concatenate([task.labels, task.labels_test])
    for number, color in enumerate(colors.values()):
        expected = np.broadcast_to(np.array(color, np.uint8), (5, 4, 4, 3))
        np.testing.assert_array_equal(pixels[labels == number], expected)
    (tmp_path / "one").mkdir()
    with pytest.raises(ValueError, match=r"has 0 folders: --data needs a folder with"):
        images.read_folder(tmp_path / "one", 4)


class Small:
    """A learner of three layers, which `Runs` trains."""

    num_steps = 5

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
    runs = modules("runs")
    learner = Small()
    names = ("whole", "stopped")
    for name in names:
        (tmp_path / name).mkdir()
    with Progress(disable=True) as bar:
        never = runs.Runs(tmp_path / "whole", lambda step: False, bar)
        whole = never.fit(learner, "run", seed=1)
        second = runs.Runs(tmp_path / "stopped", lambda step: step == 2, bar)
        with pytest.raises(SystemExit) as stop:
            second.fit(learner, "run", seed=1)
        record = json.loads((tmp_path / "stopped" / "run.json").read_text())
        assert stop.value.code == 75
        assert record["losses"] == whole["losses"][:2]
        third = runs.Runs(tmp_path / "stopped", lambda step: False, bar)
        continued = third.fit(learner, "run", seed=1)
        assert third.steps == 3
        assert third.fit(learner, "run", seed=1)["losses"] == continued["losses"]
        assert third.steps == 3  # it is finished, and not trained anew
    assert continued["losses"] == whole["losses"]
    assert [*map(str, continued["tests"])] == [*map(str, whole["tests"])]
    assert len({*whole["losses"]}) == 5


def test_a_run_begins_with_the_layers_of_another_but_for_the_last(modules, tmp_path):
    learner = Small()
    first_states = []
    step = learner.step

    def watch(state, seed, position):
        if position == 0:
            first_states.append(jax.device_get(state.params))
        return step(state, seed, position)

    learner.step = watch
    with Progress(disable=True) as bar:
        runs = modules("runs").Runs(tmp_path, lambda step: False, bar)
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
    text = report.describe([row], losses, "python x.py", "a model")
    assert "| Greek | 1,000 | 20 | 24 | 60.0 ± 14.1 | - |\n" in text
    assert "| 1 | 2.000000 | 2.500000 |\n" in text
    assert "`python x.py`: a model; 2 runs, 2.0 minutes" in text
    page = (ROOT / "docs" / "transfer.md").read_text()
    for line in text.splitlines():
        if re.match(r"\| (images|step|-)", line):
            assert line in page, line


@pytest.mark.slow
def test_the_recipe_is_stopped_and_goes_on_to_the_same_results(tmp_path):
    command = [str(EXAMPLES / "transfer.py"), "--tiny"]
    whole = run(*command, folder=tmp_path)
    stopped = run(
        *command,
        "--folder=build/stopped",
        "--interrupt-after=6",
        status=75,
        folder=tmp_path,
    )
    assert "Latin: 4 steps" in stopped
    assert "scikit-learn digits-tuned-1: 2 steps" in stopped
    continued = run(*command, "--folder=build/stopped", folder=tmp_path)
    assert "Latin" not in continued.split("AmoebaNet")[0]
    results = [
        json.loads((tmp_path / "build" / name / "tiny" / "results.json").read_text())
        for name in ("transfer", "stopped")
    ]
    for row, same in zip(*(result["rows"] for result in results), strict=True):
        for arm, records in row["records"].items():
            for record, twin in zip(records, same["records"][arm], strict=True):
                assert record["losses"] == twin["losses"]
                assert record["tests"] == twin["tests"]
    losses = results[0]["losses"]
    np.testing.assert_allclose(losses["pipelined"], losses["unpipelined"], rtol=1e-5)
    assert re.search(r"Greek .* 24 ", whole)
    names = {path.name for path in (tmp_path / "build/transfer/tiny").iterdir()}
    assert {"results.json", "results.md", "curves.png"} <= names

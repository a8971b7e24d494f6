"""States on disk: saved by one pipeline, gone on with by another, or refused."""

import gc
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe import checkpoint

from .. import reference as ref

# Its programs are tried once: XLA need not optimize them.
pytestmark = pytest.mark.usefixtures("quick")

TX = optax.adamw(1e-3)
X, TARGETS = ref.regression(16)
KEY = jax.random.key(0)


def layers(width=4):
    # A norm takes a bias away: Adam would make a step of the noise in its gradient.
    first = nn.Dense(8, use_bias=False)
    return [first, nn.BatchNorm(), nn.Dropout(0.5), jnp.tanh, ref.dense(width)]


@pytest.fixture(scope="module")
def pipe():
    return jpipe.pipeline(layers(), 4, balance=[2, 3])


@pytest.fixture(scope="module")
def state(pipe):
    return pipe.init_train_state(KEY, X, TX)


def test_a_state_and_the_position_in_the_data_are_restored(
    state, tmp_path, monkeypatch
):
    """Into the layout of ``like=``; numbers and keys with their types."""
    monkeypatch.chdir(tmp_path)  # a relative path
    position = {
        "epoch": 3,
        "seconds": 1.5,
        "shuffled": True,
        "examples": np.int64(2**40),
        "order": np.arange(4)[::-1],
        "key": jax.random.key(7),
    }
    checkpoint.save("all", {"state": state, "position": position})
    twin = jpipe.sequential(layers(), 4)
    zeros = jax.tree.map(lambda leaf: leaf * 0, position | {"key": 0})
    zeros |= {"shuffled": False, "key": jax.random.key(0)}
    like = {
        "state": twin.init_train_state(jax.random.key(1), X, TX),
        "position": zeros,
    }
    restored = checkpoint.restore("all", like)
    ref.assert_equal(restored["state"], state)
    assert {leaf.device for leaf in jax.tree.leaves(restored["state"].params)} == {
        *twin.devices
    }
    restored_position = restored["position"]
    ref.assert_equal(restored_position.pop("key"), position.pop("key"))
    np.testing.assert_array_equal(restored_position.pop("order"), position.pop("order"))
    assert restored_position == position
    assert all(
        type(restored_position[name]) is type(position[name])
        for name in restored_position
    )
    with pytest.raises(ValueError, match=r"position/epoch is int64.*, like= has float"):
        checkpoint.restore("all", {**like, "position": position | {"epoch": 1.5}})


def test_the_last_step_is_restored_and_the_oldest_deleted(tmp_path):
    """A folder without states gives ``like`` back, so that one line starts a job."""
    folder = tmp_path / "runs" / "first"
    like = {"w": jnp.zeros(2)}
    assert checkpoint.restore_latest(folder, like) is like
    folder.mkdir(parents=True)
    (folder / "notes").mkdir()
    assert checkpoint.restore_latest(folder, like) is like
    for step in (9, 10, 11):
        checkpoint.save(folder, {"w": jnp.full(2, float(step))}, step=step, keep=2)
        restored = checkpoint.restore_latest(folder, like)
        ref.assert_equal(restored, {"w": jnp.full(2, float(step))})
    assert sorted(os.listdir(folder)) == ["10", "11", "notes"]
    ref.assert_equal(checkpoint.restore(folder / "10", like), {"w": jnp.full(2, 10.0)})


def test_a_state_without_a_step_is_not_taken_for_none(tmp_path):
    path = tmp_path / "state"
    checkpoint.save(path, {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"one state.*checkpoint\.restore\(path, like"):
        checkpoint.restore_latest(path, {"w": jnp.zeros(2)})
    with pytest.raises(TypeError, match=r"\['e'\] .* shape \(0, 3\), without any"):
        checkpoint.save(tmp_path / "empty", {"e": np.zeros((0, 3)), "w": jnp.ones(2)})


def test_what_is_whole_is_never_overwritten(tmp_path):
    path, values = tmp_path / "state", [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}]
    checkpoint.save(path, values[0])
    with pytest.raises(FileExistsError, match="give another path, or step="):
        checkpoint.save(path, values[1])
    ref.assert_equal(checkpoint.restore(path, values[1]), values[0])
    assert os.listdir(tmp_path) == ["state"]

    folder = tmp_path / "run"
    checkpoint.save(folder, values[0], step=np.int32(5))
    for step in (5, 4):
        says = f"run/5 is there already, and step={step} is not later: go on from it"
        with pytest.raises(FileExistsError, match=says):
            checkpoint.save(folder, values[1], step=step)
    ref.assert_equal(checkpoint.restore_latest(folder, values[1]), values[0])
    with pytest.raises(checkpoint.DamagedError, match=r"type restore_latest\('.*/run'"):
        checkpoint.restore(folder, values[1])


def test_a_save_in_the_background_is_there_when_the_program_ends(tmp_path):
    """Though it waits for nothing, and overwrites what it has saved."""
    # Later versions of Python start no thread when a program ends.
    last_line = "" if sys.version_info < (3, 12) else "jpipe.checkpoint.wait()"
    program = f"""
import jax, jax.numpy as jnp, numpy as np, jpipe
save = lambda tree, step: jpipe.checkpoint.save(
    {str(tmp_path)!r}, tree, step=step, background=True)
overwrite = jax.jit(lambda x: x + 1.0, donate_argnums=0)
array = jnp.zeros(1_000_000)
numpy = np.zeros(1_000_000, np.float32)
for step in range(3):
    save({{"jax": array, "numpy": numpy}}, step)
    array = overwrite(array)
    numpy += 1.0
{last_line}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
    like = dict.fromkeys(("jax", "numpy"), jnp.ones(1_000_000))
    for step in range(3):
        restored = checkpoint.restore(tmp_path / str(step), like)
        ref.assert_equal(restored, jax.tree.map(lambda x, s=step: x * s, like))


def run_dying(folder, **numbers):
    """What is left by programs that are killed, or find no room, while they save."""
    root = pathlib.Path(__file__).parents[2]
    arguments = [str(folder), *map(str, numbers.values())]
    command = [sys.executable, "-m", "tests.train.dying", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are what is killed")
@pytest.mark.parametrize(
    ("stride", "num_random"), [(13, 0), pytest.param(1, 30, marks=pytest.mark.slow)]
)
def test_a_save_that_is_killed_or_finds_no_room_leaves_a_whole_state(
    tmp_path, stride, num_random
):
    """Killed between its changes to the disk. The next save removes what it left."""
    report = run_dying(tmp_path, stride=stride, num_random=num_random)
    for ending in ("", " in background"):
        killed = report[f"killed{ending}"]
        steps = [left["step"] for left in killed]
        assert steps == sorted(steps)
        assert {*steps} == {1, 2}
        assert killed[-1]["files"] == ["2"]
        (full,) = report[f"full{ending}"]
        assert (full["step"], full["files"]) == (1, ["1"])
        assert "run/2 could not be written, and what was there" in full["error"]
        assert "File too large" in full["error"]
        assert not any(left["warnings"] for left in [*killed, full])
    for number in (1, 2) if num_random else ():
        assert len(report[f"{number} at random in background"]) == num_random
    for left in [left for group in report.values() for left in group]:
        # Two at a time may damage a state, but not unnoticed.
        last = max(int(name) for name in left["files"] if name.isdecimal())
        assert left["step"] == last or left["warnings"]
        assert left["next_step"] == left["step"] + 1
        assert left["next_files"] == [str(left["next_step"])]


def test_all_that_differs_from_like_is_named(state, tmp_path):
    checkpoint.save(tmp_path / "state", state)
    wide = jpipe.pipeline(layers(5), 2).init_train_state(KEY, X, optax.sgd(0.1))
    with pytest.raises(ValueError, match="another state than like=") as refusal:
        checkpoint.restore(tmp_path / "state", wide)
    for says in (
        "make like= with the model and the optimizer of the state that was saved",
        "params/4/bias is float32[4], like= has float32[5]",
        "surplus: opt_state/0/mu/0",
    ):
        assert says in str(refusal.value)
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        checkpoint.restore(tmp_path / "nowhere", state)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        checkpoint.DamagedError, match=r"holds no state that jpipe.checkpoint.save"
    ):
        checkpoint.restore(tmp_path / "empty", state)


def test_a_state_of_adamw_goes_on_with_adam(pipe, state, tmp_path):
    """Both have the same arrays, in other containers."""
    checkpoint.save(tmp_path / "state", state)
    like = pipe.init_train_state(jax.random.key(1), X, optax.adam(1e-3))
    restored = checkpoint.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    ref.assert_equal(jax.tree.leaves(restored), jax.tree.leaves(state))


def test_a_run_on_four_devices_goes_on_on_two_and_three_as_if_on_four(tmp_path):
    """Each job plans for the devices that are there, from one profile in a file."""
    loss = {"loss_fn": ref.mse, "targets": TARGETS}
    text = jpipe.profile(
        layers(), X, num_microbatches=4, measure=False, peak_flops=1e6, **loss
    ).to_json()

    def start(num_devices):
        plan = jpipe.plan(
            *(layers(), X, TX),
            profile=jpipe.Profile.from_json(text),
            num_devices=num_devices,
            num_microbatches=4,
            data=1,
            **loss,
        )
        pipe = jpipe.pipeline(layers(), plan=plan, devices=jax.devices()[:num_devices])
        assert len({*pipe.devices}) == num_devices
        return pipe.train_step(ref.mse, TX), pipe.init_train_state(KEY, X, TX)

    step, expected = start(4)
    for _ in range(3):
        expected, _ = step(expected, X, TARGETS)
    for number, num_devices in enumerate((4, 2, 3)):
        step, state = start(num_devices)
        state = checkpoint.restore_latest(tmp_path, state)
        assert int(state.step) == number
        state, _ = step(state, X, TARGETS)
        checkpoint.save(tmp_path, state, step=number + 1)
    ref.assert_close(state, expected, 1e-4)


def test_like_may_be_a_state_that_a_step_has_overwritten(pipe, state, tmp_path):
    checkpoint.save(tmp_path / "state", state)
    like = pipe.init_train_state(jax.random.key(1), X, TX)
    step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), TX)
    step(like, X, TARGETS)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(like))
    restored = checkpoint.restore(tmp_path / "state", like)
    ref.assert_equal(restored, state)
    devices = [leaf.devices() for leaf in jax.tree.leaves(restored)]
    assert devices == [leaf.devices() for leaf in jax.tree.leaves(state)]


def flip(content, bit):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


# What is done to a file -> its new contents, of which it has some.
DAMAGES = {
    "cut": lambda content, _: [content[: len(content) // 2]],
    "emptied": lambda content, _: [b""],
    "removed": lambda content, _: [None],
    "flipped": lambda content, numbers: [
        flip(content, bit) for bit in numbers.integers(8 * len(content), size=5)
    ],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_where_a_file_is_damaged_the_state_before_is_restored(tmp_path, damage):
    """With a warning; what is damaged and not read, such as a log, does no harm."""
    numbers = np.random.default_rng(0)
    states = [
        {"w": numbers.normal(size=(30, 10)), "step": np.int32(step), "b": jnp.ones(3)}
        for step in range(2)
    ]
    for step, tree in enumerate(states):
        checkpoint.save(tmp_path, tree, step=step)
    noticed = set[str]()
    for file in [file for file in (tmp_path / "1").rglob("*") if file.is_file()]:
        content = file.read_bytes()
        for damaged in DAMAGES[damage](content, numbers):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                restored = checkpoint.restore_latest(tmp_path, states[0])
            messages = [str(warning.message) for warning in caught]
            warned = [text for text in messages if "Training goes on from" in text]
            ref.assert_equal(restored, states[0 if warned else 1])
            assert all(str(tmp_path / "1") in text for text in warned)
            if warned:
                noticed.add(file.relative_to(tmp_path / "1").parts[1])
                with pytest.raises(checkpoint.DamagedError, match=f"{tmp_path}/1 "):
                    checkpoint.restore(tmp_path / "1", states[0])
            file.write_bytes(content)
    gc.collect()  # and what Orbax had begun to read: it warns of that
    assert noticed >= {"_METADATA", "manifest.ocdbt", "d"}


def test_the_steps_after_a_damaged_one_are_taken_again(tmp_path):
    """It is replaced; where no state is whole, the reason for each is given."""
    states = [{"w": jnp.full(300, float(step))} for step in range(4)]
    for step in (1, 2):
        checkpoint.save(tmp_path, states[step], step=step)
    (tmp_path / "2" / "default" / "_METADATA").unlink()
    with pytest.warns(UserWarning, match="/2 holds no state .* goes on from .*/1"):
        ref.assert_equal(checkpoint.restore_latest(tmp_path, states[0]), states[1])
    checkpoint.save(tmp_path, states[2], step=2)
    ref.assert_equal(checkpoint.restore_latest(tmp_path, states[0]), states[2])

    for step in (1, 2):
        metadata = tmp_path / str(step) / "default" / "_METADATA"
        entries = metadata.read_text()
        digest = re.search(r'"w": \["float32\[300\]", "(\w)', entries)
        letter = "0" if digest[1] != "0" else "1"
        metadata.write_text(
            entries[: digest.start(1)] + letter + entries[digest.end(1) :]
        )
    with pytest.raises(checkpoint.DamagedError, match="no state that is whole") as all_:
        checkpoint.restore_latest(tmp_path, states[0])
    assert str(all_.value).count("its metadata are not what was saved") == 2
    checkpoint.save(tmp_path / "other", states[1], step=1)
    with pytest.raises(ValueError, match="another state than like="):
        checkpoint.restore_latest(tmp_path / "other", {"v": jnp.ones(300)})


def test_a_url_is_never_a_local_folder(tmp_path, monkeypatch):
    """Where its file system is not installed, that is said."""
    monkeypatch.chdir(tmp_path)
    tree = {"w": jnp.ones(2)}
    is_s3_installed = importlib.util.find_spec("s3fs") is not None
    for path, error, says in (
        (pathlib.Path("gs://bucket/state"), ValueError, r"as a str, gs://\.\.\., or"),
        ("ftp://host/state", ValueError, "ftp:// is none of the schemes"),
        ("s3://bucket/state", ImportError, "(?i)install s3fs"),
    )[: 2 if is_s3_installed else 3]:
        with pytest.raises(error, match=says):
            checkpoint.save(path, tree)
        with pytest.raises(error, match=says):
            checkpoint.restore(path, tree)
    assert not os.listdir(tmp_path)


def test_keys_with_slashes_are_told_from_trees(tmp_path):
    tree = {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    checkpoint.save(tmp_path / "state", tree)
    ref.assert_equal(checkpoint.restore(tmp_path / "state", tree), tree)


def test_arguments_that_are_swapped_or_no_state_are_named(state, tmp_path):
    pipe, path = jpipe.pipeline(layers(), 2), tmp_path / "state"
    checkpoint.save(path, {"w": jnp.ones(2)})
    for call, says in (
        (lambda: checkpoint.save(state, path), r"TrainState; .* first: .*save\(path"),
        (lambda: checkpoint.save(b"state", state), "bytes; needs a str or a pathlib"),
        (lambda: checkpoint.restore(state, path), r"TrainState; .*restore\(path"),
        (lambda: checkpoint.save(path, pipe), r"\n  \* state is <jpipe.Pipeline.*"),
        (lambda: checkpoint.restore(path, pipe), r"\n  \* like is <jpipe.Pipeline.*"),
        (lambda: checkpoint.restore(path, None), "such as the .*like is None, without"),
    ):
        with pytest.raises(TypeError, match=f"(?s){says}"):
            call()


def threads_of_saves():
    """The threads that are alive, but for the one that Orbax makes once and keeps."""
    threads = threading.enumerate()
    return {t for t in threads if not t.name.startswith("metadata_store")}


def test_a_failed_save_leaves_nothing_behind(state, tmp_path):
    donated = jnp.ones(2)
    donated.delete()
    (tmp_path / "file").touch()
    threads = threads_of_saves()
    for path, tree, error, says in (
        ("state", {"w": donated}, ValueError, "this state was donated"),
        ("state", {"name": "a"}, TypeError, r"\['name'\] is 'a', a str"),
        ("state", {"c": 2**70}, TypeError, r"\['c'\] is 118059.*more than 64 bits"),
        ("state", {"c": np.array(["a"])}, TypeError, r"a ndarray of dtype <U1"),
        ("state", {"c": jnp.ones(2, jnp.uint2)}, OSError, r"could not be.* \"uint2\""),
        (
            "file/state",
            {"w": jnp.ones(2)},
            NotADirectoryError,
            "Not a directory: .*file",
        ),
        ("file", {"w": jnp.ones(2)}, NotADirectoryError, "file is a file; give"),
        ("run[1]", {"w": jnp.ones(2)}, ValueError, "has a bracket: Orbax could not"),
    ):
        for step in (None, 1):
            with pytest.raises(error, match=says):
                checkpoint.save(tmp_path / path, tree, step=step)
        if (tmp_path / path).is_dir():
            (tmp_path / path).rmdir()
    for options, says in (
        ({"step": -1}, "step=-1 is no whole number from 0 on"),
        ({"step": 1.5}, "step=1.5 is no whole number"),
        ({"step": 1, "keep": 0}, "keep=0 is no whole number from 1 on"),
        ({"background": True}, "background=True needs step="),
    ):
        with pytest.raises(ValueError, match=says):
            checkpoint.save(tmp_path / "state", {"w": jnp.ones(2)}, **options)
    assert os.listdir(tmp_path) == ["file"]
    # Those of Orbax end soon: some that wait would hold up the end of the program.
    until = time.monotonic() + 10
    while threads_of_saves() - threads and time.monotonic() < until:
        time.sleep(0.05)
    assert threads_of_saves() <= threads

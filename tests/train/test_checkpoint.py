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


def test_nothing_is_overwritten_unless_overwrite_is_given(tmp_path):
    path, values = tmp_path / "state", [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}]
    checkpoint.save(path, values[0])
    with pytest.raises(FileExistsError, match="give another path, or overwrite=True"):
        checkpoint.save(path, values[1])
    ref.assert_equal(checkpoint.restore(path, values[1]), values[0])
    for value in values[::-1]:
        checkpoint.save(path, value, overwrite=True)
        ref.assert_equal(checkpoint.restore(path, values[0]), value)
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are what is killed")
def test_a_save_that_is_killed_or_finds_no_room_leaves_a_whole_state(tmp_path):
    """Killed before each of its changes to the disk. The next save does its work."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.train.dying", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    *killed, ended = report["killed"]
    steps = [left["step"] for left in killed]
    assert steps == sorted(steps)
    assert min(steps.count(1), steps.count(2)) > 3
    assert ended["step"] == 2
    assert ended["files"] == ["latest"]

    full = report["full"]
    assert full["step"] == 1
    assert full["files"] == ["error", "latest"]
    assert "latest could not be written, and what was there before" in full["error"]
    assert "File too large" in full["error"]
    for left in (*killed, ended, full):
        assert left["is_there"]
        assert left["next_step"] == 3
        assert {*left["next_files"]} <= {"latest", "error"}


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
    with pytest.raises(ValueError, match=r"holds no state that jpipe.checkpoint.save"):
        checkpoint.restore(tmp_path / "empty", state)


def test_a_state_of_adamw_goes_on_with_adam(pipe, state, tmp_path):
    """Both have the same arrays, in other containers."""
    checkpoint.save(tmp_path / "state", state)
    like = pipe.init_train_state(jax.random.key(1), X, optax.adam(1e-3))
    restored = checkpoint.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    ref.assert_equal(jax.tree.leaves(restored), jax.tree.leaves(state))


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed"])
def test_a_damaged_file_is_named(tmp_path, damage):
    """Where its damage can be noticed: some files of Orbax are never read again."""
    path = tmp_path / "state"
    like = {"w": jnp.arange(300.0)}
    checkpoint.save(path, like)
    unnoticed = set[str]()
    for file in [file for file in path.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        file.unlink()
        if damage != "removed":
            file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
        refusal = ""
        try:
            ref.assert_equal(checkpoint.restore(path, like), like)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert re.search("restore another state|no file _METADATA", refusal)
            names_file = damage != "removed" or file.name != "manifest.ocdbt"
            assert (file.name if names_file else str(path)) in refusal
        else:
            unnoticed.add(str(file.relative_to(path)).partition("/")[0])
        file.write_bytes(content)
        gc.collect()  # and what Orbax had begun to read: it warns of that
    never = {"_CHECKPOINT_METADATA", "commit_success.txt", "ocdbt.process_0"}
    when_removed = {"_sharding", "array_metadatas"}
    assert unnoticed == never | (when_removed if damage == "removed" else set())


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


def test_a_failed_save_leaves_nothing_behind(state, tmp_path):
    donated = jnp.ones(2)
    donated.delete()
    (tmp_path / "file").touch()
    threads = threading.active_count()
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
        with pytest.raises(error, match=says):
            checkpoint.save(tmp_path / path, tree)
    assert os.listdir(tmp_path) == ["file"]
    # Those of Orbax end soon: some that wait would hold up the end of the program.
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= threads, threading.enumerate()

"""States on disk: saved by one pipeline, gone on with by another, or refused."""

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
    checkpoint.save(path, values[1], overwrite=True)
    ref.assert_equal(checkpoint.restore(path, values[0]), values[1])


def test_all_that_differs_from_like_is_named(state, tmp_path):
    checkpoint.save(tmp_path / "state", state)
    wide = jpipe.pipeline(layers(5), 2).init_train_state(KEY, X, optax.sgd(0.1))
    with pytest.raises(ValueError, match="another state than like=") as refusal:
        checkpoint.restore(tmp_path / "state", wide)
    for says in (
        "params/4/bias is float32[4], like= has float32[5]",
        "surplus: opt_state/0/mu/0",
    ):
        assert says in str(refusal.value)
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        checkpoint.restore(tmp_path / "nowhere", state)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no state that jpipe.checkpoint.save"):
        checkpoint.restore(tmp_path / "empty", state)


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
        (
            "file/state",
            {"w": jnp.ones(2)},
            NotADirectoryError,
            "Not a directory: .*file",
        ),
    ):
        with pytest.raises(error, match=says):
            checkpoint.save(tmp_path / path, tree)
    assert not (tmp_path / "state").exists()
    # Those of Orbax end soon: some that wait would hold up the end of the program.
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= threads, threading.enumerate()

"""States on disk: saved by one pipeline, gone on with by another, or refused."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jpipe
from jpipe import checkpoint

from .. import reference as ref

TX = optax.adamw(1e-3)
X, TARGETS = ref.regression(16)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        # A norm takes a bias away: Adam would make a step of the noise in its gradient.
        x = nn.BatchNorm(not train)(nn.Dense(8, use_bias=False)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def layers(width=4):
    return [Normed(), jnp.tanh, ref.dense(width)]


def state_of(pipe, key=0, tx=TX):
    return pipe.init_train_state(jax.random.key(key), X, tx)


def step(pipe, state):
    return pipe.train_step(ref.mse, TX, donate=False)(state, X, TARGETS)


def rows(path, leaf):
    return P("data") if leaf.ndim == 2 and leaf.shape[0] % 2 == 0 else None


def test_it_goes_on_elsewhere_to_the_bit(tmp_path):
    first = jpipe.pipeline(layers(), 4, balance=[1, 2])
    state, _ = step(first, state_of(first))
    checkpoint.save(tmp_path / "state", state)
    others = [
        jpipe.sequential(layers(), 4),
        jpipe.pipeline(
            layers(),
            2,
            balance=[2, 1],
            mesh=jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]),
            sharding=rows,
        ),
    ]
    expected = step(first, state)
    for other in others:
        like = state_of(other, key=1)
        restored = checkpoint.restore(tmp_path / "state", like)
        ref.assert_equal(restored, state)
        for own, wanted in zip(
            jax.tree.leaves(restored), jax.tree.leaves(like), strict=True
        ):
            assert own.sharding == wanted.sharding
        ref.assert_close(step(other, restored), expected, 1e-5)


def test_variables_too_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe = jpipe.pipeline(layers(), 2)
    variables = pipe.init(jax.random.key(0), X)
    checkpoint.save("variables", variables)
    like = pipe.init(jax.random.key(1), X)
    ref.assert_equal(checkpoint.restore("variables", like), variables)


def test_the_position_in_the_data_is_a_part_of_it(tmp_path):
    state = state_of(jpipe.pipeline(layers(), 2))
    position = {
        "epoch": 3,
        "seconds": 1.5,
        "shuffled": True,
        "examples": np.int64(2**40),
        "order": np.arange(4)[::-1],
        "key": jax.random.key(7),
    }
    saved = {"state": state, "position": position}
    checkpoint.save(tmp_path / "all", saved)
    like = {
        "state": state_of(jpipe.sequential(layers(), 2), key=1),
        "position": jax.tree.map(lambda leaf: leaf * 0, position | {"key": 0}),
    }
    like["position"] |= {"shuffled": False, "key": jax.random.key(0)}
    restored = checkpoint.restore(tmp_path / "all", like)
    ref.assert_equal(restored["state"], state)
    found = restored["position"]
    ref.assert_equal(found.pop("key"), position.pop("key"))
    np.testing.assert_array_equal(found.pop("order"), position.pop("order"))
    assert found == position
    assert all(type(found[name]) is type(position[name]) for name in found)
    with pytest.raises(ValueError, match=r"position/epoch is int64.*, like= has float"):
        checkpoint.restore(
            tmp_path / "all", {**like, "position": position | {"epoch": 1.5}}
        )


def test_what_is_neither_array_nor_number_is_named(tmp_path):
    match = r"\['name'\] is 'run 3', a str"
    with pytest.raises(TypeError, match=match):
        checkpoint.save(tmp_path / "state", {"w": jnp.ones(2), "name": "run 3"})
    assert not (tmp_path / "state").exists()


def test_nothing_is_overwritten_unless_asked(tmp_path):
    pipe = jpipe.pipeline(layers(), 2)
    state = state_of(pipe)
    checkpoint.save(tmp_path / "state", state)
    with pytest.raises(FileExistsError, match="give another path, or overwrite=True"):
        checkpoint.save(tmp_path / "state", state)
    later, _ = step(pipe, state)
    checkpoint.save(tmp_path / "state", later, overwrite=True)
    ref.assert_equal(checkpoint.restore(tmp_path / "state", state), later)


def test_what_differs_is_told_all_of_it(tmp_path):
    state = state_of(jpipe.pipeline(layers(), 2))
    checkpoint.save(tmp_path / "state", state)
    wide = state_of(jpipe.pipeline(layers(5), 2), tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="another state than like=") as refusal:
        checkpoint.restore(tmp_path / "state", wide)
    said = str(refusal.value)
    assert "params/2/bias is float32[4], like= has float32[5]" in said
    assert "surplus: opt_state/0/mu/0" in said
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state
    )
    with pytest.raises(ValueError, match=r"is float32\[8\], like= has bfloat16\[8\]"):
        checkpoint.restore(tmp_path / "state", half)
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        checkpoint.restore(tmp_path / "nowhere", state)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no state that jpipe.checkpoint.save"):
        checkpoint.restore(tmp_path / "empty", state)


def test_an_overwritten_state_is_not_saved(tmp_path):
    pipe = jpipe.pipeline(layers(), 2)
    state = state_of(pipe)
    pipe.train_step(ref.mse, TX)(state, X, TARGETS)
    with pytest.raises(ValueError, match="this state was donated"):
        checkpoint.save(tmp_path / "state", state)
    assert not (tmp_path / "state").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    threads = threading.active_count()
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        checkpoint.save(tmp_path / "file" / "state", {"a": jnp.ones(3)})
    # Orbax would leave some that wait, and hold up the end of the program.
    assert threading.active_count() <= threads

"""A pipeline in several processes has the bits that it has in one."""

import os

import jax
import numpy as np
import pytest

import jpipe

from . import jobs, work

PARTS = {
    # As many processes, the pipelines that they run, who is given the mini-batch, how
    # many devices each has, and how arrays pass. The last of three has no stage.
    2: ("gpipe,1f1b,zb_h1,zb_v,mesh", "own", 2, "transfer"),
    4: ("1f1b,zb_v,replicas", "all", 1, "transfer"),
    3: ("1f1b,zb_v", "own", 2, "device_put"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes, then four, and three have written."""
    folder = tmp_path_factory.mktemp("processes")
    for count, (names, *how) in PARTS.items():
        own = folder / str(count)
        own.mkdir()
        if count != 2:
            os.symlink(folder / "2" / "state", own / "state")
        done = jobs.run(count, "worker", str(own), names, *map(str, how))
        assert (done.status, done.left) == (0, []), str(done)
    return folder


@pytest.fixture(scope="module")
def alone():
    """The same in this process, each pipeline once."""
    found = {}

    def results(name):
        if name not in found:
            with jax.enable_x64(True):
                found[name] = work.results(work.pipelines()[name](), name in work.WHOLE)
        return found[name]

    jax.config.update("jax_disable_most_optimizations", True)
    yield results
    jax.config.update("jax_disable_most_optimizations", False)


def test_every_leaf_has_the_same_bits(folder, alone):
    for count, (names, *_) in PARTS.items():
        for name in names.split(","):
            expected, seen = alone(name), set()
            for process in range(count):
                found = np.load(folder / str(count) / f"{name}-{process}.npz")
                for path in found:
                    same = np.array_equal(found[path], expected[path], equal_nan=True)
                    assert same, (count, name, process, path)
                seen |= set(found)
                # Metrics are everywhere, what is on devices where it is used.
                assert "metric 0" in found
                assert ("norm" in found) == (name in work.WHOLE)
                assert set(found) < set(expected)
            assert seen == set(expected), (count, name)


def test_a_state_goes_on_in_more_processes_and_in_one(folder, alone):
    with jax.enable_x64(True):
        pipe = work.pipelines()["1f1b"]()
        like = {"state": work.start(pipe), "position": 0}
        restored = jpipe.checkpoint.restore(folder / "2" / "state", like)
        state, position = restored["state"], restored["position"]
        assert int(state.step) == position == 2
        saved = work.here((state.step, state.params, state.opt_state))
        state, told = work.go_on(pipe, state, 4)
        whole, uninterrupted = work.go_on(pipe, work.start(pipe), 4)
    for process in range(2):
        found = np.load(folder / "2" / f"meshed-{process}.npz")
        assert "[0]" in found  # the number of the step, which each device has
        for path in found:
            np.testing.assert_array_equal(found[path], saved[path])
    expected = work.here(whole.params)
    assert work.here(state.params).keys() == expected.keys()
    half = len(uninterrupted) // 2
    for one, other in zip(told, uninterrupted[half:], strict=True):
        np.testing.assert_array_equal(one, other)
    for count, process in [(4, 0), (4, 1), (4, 2), (4, 3), (3, 0), (3, 1), (3, 2)]:
        found = np.load(folder / str(count) / f"restored-{process}.npz")
        np.testing.assert_array_equal(found["loss"], told[0])
        for path in set(found) - {"loss"}:
            np.testing.assert_array_equal(found[path], expected[path])

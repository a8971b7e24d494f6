"""A pipeline in several processes has the bits that it has in one."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jpipe

from ..slow import slow
from . import jobs, work


class Job(NamedTuple):
    """Some pipelines in several processes.

    Attributes:
      processes: how many there are.
      pipelines: the names of the pipelines, with commas between them.
      feeds: ``"all"`` or ``"own"``: who is given the mini-batch.
      devices: how many each process has.
      transport: how arrays pass between them.
    """

    processes: int
    pipelines: str
    feeds: str = "own"
    devices: int = 2
    transport: str = "transfer"


JOBS = {
    "two": Job(2, "mesh,function,whole batch,model of 7,decoding"),
    "two, of more pipelines": Job(
        2, "1f1b,zb_h1,model,model on a mesh,keys,model of 4,scanned function"
    ),
    # The last of three has no stage.
    "three": Job(
        3, "1f1b,zb_v,model,keys,model of 4,model of 7", transport="device_put"
    ),
    "four": Job(
        4, "1f1b,zb_v,replicas,scanned function,decoding", feeds="all", devices=1
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """``(name of a job) -> folder`` in which its processes have written."""

    @functools.cache
    def run(name):
        processes, *words = JOBS[name]
        folder = tmp_path_factory.mktemp("processes")
        done = jobs.run(processes, "worker", str(folder), *map(str, words))
        return folder, done

    def folder_of(name):
        folder, done = run(name)
        assert (done.status, done.left) == (0, []), str(done)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def alone():
    """The same in this process, each pipeline once."""
    found = {}

    def results(name):
        if name not in found:
            with jax.enable_x64(True):
                found[name] = work.run(name)
        return found[name]

    jax.config.update("jax_disable_most_optimizations", True)
    yield results
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("job", ["two", *map(slow, list(JOBS)[1:])])
def test_every_leaf_has_the_same_bits(written, alone, job):
    for name in JOBS[job].pipelines.split(","):
        expected, seen = alone(name), set()
        for process in range(JOBS[job].processes):
            found = np.load(written(job) / f"{name}-{process}.npz")
            for path in found:
                same = np.array_equal(found[path], expected[path], equal_nan=True)
                assert same, (name, process, path)
            seen |= set(found)
            # Metrics are everywhere, what is on devices where it is used. A forward
            # pass has none.
            assert ("metric 0" in found) == (name != "decoding")
            assert ("norm" in found) == (name in work.WHOLE)
            assert set(found) < set(expected)
        assert seen == set(expected), name


@pytest.mark.slow
def test_a_state_of_two_processes_goes_on_in_one(written):
    folder = written("two, of more pipelines")
    state = restored(folder)
    saved = work.here((state.step, state.params, state.opt_state))
    with jax.enable_x64(True):
        pipe = work.pipelines()["1f1b"]()
        state, metrics = work.go_on(pipe, state, 4)
        whole, uninterrupted = work.go_on(pipe, work.start(pipe), 4)
    for process in range(2):
        found = np.load(folder / f"restored by mesh-{process}.npz")
        assert "[0]" in found  # the number of the step, which each device has
        for path in found:
            np.testing.assert_array_equal(found[path], saved[path])
    assert work.here(state.params).keys() == work.here(whole.params).keys()
    half = len(uninterrupted) // 2
    for one, other in zip(metrics, uninterrupted[half:], strict=True):
        np.testing.assert_array_equal(one, other)


def restored(folder):
    """The state that two processes have saved there after two steps."""
    with jax.enable_x64(True):
        like = {"state": work.start(work.pipelines()["1f1b"]()), "position": 0}
        found = jpipe.checkpoint.restore(folder / "state of 1f1b", like)
    assert int(found["state"].step) == found["position"] == 2
    return found["state"]


@pytest.mark.parametrize(
    ("name", "job"),
    [("model of 7", "two"), slow("model of 4", "two, of more pipelines")],
)
def test_pieces_of_two_processes_are_saved_as_one_array(written, name, job):
    with jax.enable_x64(True):
        pipe = work.pipelines()[name]()
        state, _ = work.go_on(pipe, work.start(pipe), 1)
        like = {"state": work.start(pipe), "position": 0}
        found = jpipe.checkpoint.restore(written(job) / f"state of {name}", like)
    expected = work.here((state.step, state.params, state.opt_state))
    whole = found["state"]
    restored = work.here((whole.step, whole.params, whole.opt_state))
    seen = set()
    for process in range(2):
        pieces = np.load(written(job) / f"restored by {name}-{process}.npz")
        seen |= set(pieces)
        for path in pieces:
            np.testing.assert_array_equal(pieces[path], restored[path])
            np.testing.assert_allclose(pieces[path], expected[path], rtol=1e-12)
    assert seen == set(expected) == set(restored)


def test_pieces_of_other_processes_are_refused_with_what_to_type(written):
    for process in range(2):
        on_host, in_other_stages = np.load(written("two") / f"refused-{process}.npy")
        assert "pieces in other processes; compute with it in pipe.jit" in on_host
        assert "pieces for other stages, some of them in other pro" in in_other_stages

"""Which mesh a pipeline takes, what it says of others, and what its step exchanges."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
from benchmarks.overhead.wide import exchanges

from .. import reference as ref
from .stages import dense, mesh

LAYERS = [dense(8), np.tanh, dense(8), dense(4)]


def reductions(found):
    """Those of sums over shards."""
    return {
        name: n
        for (name, op), n in found.items()
        if op in ("all-reduce", "reduce-scatter")
    }


def test_gradients_are_reduced_once_in_a_mini_batch():
    """One for each stage with weights, and nothing else in any micro-batch."""
    found = exchanges(None, 4)
    assert reductions(found) == {"reduce_sums": 2}
    assert {name for name, _ in found} == {"reduce_sums"}


def test_sharded_weights_are_gathered_once_in_a_step_or_for_each_use():
    once = exchanges("step", 4)
    assert once["gather", "all-gather"] == 2 + 1  # as many arrays
    assert reductions(once)["reduce_sums"] >= 2
    assert not any("backward" in name for name, _ in once)
    often = exchanges("microbatch", 4)
    uses = sum(n for (_, op), n in often.items() if op == "all-gather")
    assert uses >= 3 * 4
    assert ("gather", "all-gather") not in often


def test_axes_of_a_mesh_stand_in_any_order():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    layers = [ref.dense(8), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 2, mesh=Mesh(devices, ("data", "stage")))
    assert [list(own.devices) for own in pipe.devices] == devices.T.tolist()
    assert "cpu:0 to cpu:2 (data=2)" in str(pipe)
    alone = jpipe.pipeline(layers, 2, mesh=mesh(2, 1))
    assert alone.devices == tuple(jax.devices()[:2])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"mesh": jax.devices()},
            TypeError,
            r"mesh=.* is a list; needs a jax.sharding.Mesh, such as jax.make_mesh",
        ),
        (
            {"mesh": mesh(2, 2, names=("pipe", "data"))},
            ValueError,
            r"the axes \['pipe', 'data'\], none is called 'stage'",
        ),
        (
            {"mesh": mesh(2, 2), "balance": [2, 1, 1]},
            ValueError,
            "3 stages need a mesh of at least as many along 'stage', which has 2",
        ),
        (
            {"sharding": lambda path, spec: None},
            ValueError,
            "sharding= and gather= are for stages of several devices; give mesh= too",
        ),
        (
            {"devices": mesh(2, 2)},
            TypeError,
            r"type mesh= in place of devices=, as in mesh=jax.make_mesh\(\(2, 2\), "
            r"\('stage', 'data'\)\)$",
        ),
        (
            {"devices": mesh(2, 2, names=("data", "model"))},
            TypeError,
            r"one Mesh, with the axes \('data', 'model'\); type mesh= for all ranks, "
            r"such as mesh=jax.make_mesh\(.*\), or devices=\[mesh, ...\] with one",
        ),
        (
            {"devices": [mesh(2, 2)]},
            ValueError,
            r"the mesh of one rank has an axis 'stage', .* type mesh=jax.make_mesh",
        ),
    ],
)
def test_meshes_without_the_axes_or_sizes_of_stages_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        jpipe.pipeline(LAYERS, 2, **{"balance": [2, 2], **options})


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_mesh_that_is_advised_can_be_made(monkeypatch, count):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    with pytest.raises(TypeError, match=r"such as jax\.make_mesh") as refusal:
        jpipe.pipeline(LAYERS, 2, mesh=jax.devices())
    typed = re.search(r"jax\.make_mesh.*$", str(refusal.value))[0]
    assert eval(typed, {"jax": jax}).size == count


def test_batches_that_shards_do_not_divide_are_refused():
    pipe = jpipe.pipeline([ref.dense(8), ref.dense(4)], 2, mesh=mesh(2, 2))
    x, targets = ref.regression(9)
    variables = pipe.init(jax.random.key(0), ref.regression(8)[0])
    with pytest.raises(
        ValueError,
        match="a batch of 9 examples over 2 devices along the axis 'data', in "
        "num_microbatches=2; needs a multiple of 2, 4 at least, such as 8",
    ):
        pipe.value_and_grad(ref.mse)(variables, x, targets)


def test_a_step_is_profiled_and_compiled_ahead():
    pipe = jpipe.pipeline([ref.dense(8), ref.dense(4)], 2, mesh=mesh(2, 2))
    x, targets = ref.regression(8)
    state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
    step = pipe.train_step(ref.mse, optax.sgd(0.1))
    report = step.compile(state, x, targets)
    assert "cpu:2 to cpu:3 (data=2)" in str(report)
    assert step.profile(state, x, targets).makespan > 0

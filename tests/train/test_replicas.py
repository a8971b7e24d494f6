"""Ranks that take turns at a stage: the numbers of one device each."""

import jax
import optax
import pytest

import jpipe
from jpipe.planning._profile import LayerProfile, Profile

from .. import reference as ref
from ..mesh.stages import Normed, batch, compare, dense, mesh

TX = optax.sgd(0.1, momentum=0.9)


def normed():
    return [Normed(), Normed(), dense(8), dense(4)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"), [([3, 2, 2, 1], 12), ([2, 3, 1, 2], 5)]
)
def test_norms_dropout_and_sums_are_those_of_one_device(replicas, num_microbatches):
    pipe = jpipe.pipeline(normed(), num_microbatches, replicas=replicas)
    compare(normed, pipe, num_microbatches, *batch())


@pytest.mark.usefixtures("double")
def test_each_replica_may_have_a_mesh():
    pipe = jpipe.pipeline(normed(), 3, balance=[2, 2], replicas=[3, 1], mesh=mesh(4, 2))
    compare(normed, pipe, 6, *batch())


@pytest.mark.usefixtures("double")
def test_a_replica_without_micro_batches_adds_nothing():
    with pytest.warns(UserWarning, match="E12 rank 2 runs nothing"):
        pipe = jpipe.pipeline(
            normed(), 2, balance=[2, 2], replicas=[3, 1], devices=jax.devices()[:4]
        )
    compare(normed, pipe, 2, *batch(8))


def test_the_plan_of_pipedream_runs_as_it_is():
    times = zip("abcd", (3.0, 2.0, 2.0, 1.0), strict=True)
    layers = tuple(LayerProfile(name, t, t) for name, t in times)
    plan = jpipe.replicate(Profile(layers), 8)
    assert plan.replicas == (3, 2, 2, 1)
    own = [ref.dense(8), ref.dense(8), ref.dense(8), ref.dense(4)]
    pipe = jpipe.pipeline(own, 12, plan=plan)
    assert pipe.schedule == plan.schedule(12)
    ref.compare(pipe, own, *ref.regression(24), ref.FLOAT32)
    assert "cpu:0, cpu:1, cpu:2" in str(pipe)
    state = pipe.init_train_state(jax.random.key(0), ref.regression(24)[0], TX)
    measured = pipe.profile_step(state, ref.regression(24), ref.mse)
    assert measured.replicas == pipe.schedule.replicas
    assert [len(row) for row in measured.rows] == [8, 8, 8, 12, 12, 12, 12, 24]


def test_weights_are_sent_and_gradients_added_once_in_a_step():
    layers = [ref.dense(8), ref.dense(4)]
    pipe = jpipe.pipeline(layers, 6, replicas=[3, 1])
    x, targets = ref.regression(12)
    state = pipe.init_train_state(jax.random.key(0), x, TX)
    step = pipe.train_step(ref.mse, TX)
    program = step.program(state, x, targets)
    weights = [
        (program.places[i.reads[0]], i.place, len(i.reads))
        for i in program.instructions
        if i.is_move and i.label == "arguments" and i.source == 0
    ]
    assert [count for *_, count in weights] == [2, 2]
    names = [i.run.name for i in program.instructions if not i.is_move]
    assert names.count("reduce_gradients") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "gpipe"}, "with schedule='gpipe': choose '1f1b' or"),
        ({"replicas": [2]}, r"replicas=\[2\] are for 1 stages, the pipeline has 2"),
        ({"replicas": [0, 1]}, r"replicas\[0\]=0: needs ints of at least 1"),
        ({"replicas": [8, 8]}, "16 ranks need 16 devices, there are 8"),
    ],
)
def test_other_replicas_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        jpipe.pipeline([ref.dense(8)] * 2, 16, **{"replicas": [2, 1], **options})


def test_other_plans_are_refused():
    layers = tuple(LayerProfile(name, 1.0, 1.0) for name in "ab")
    steady = jpipe.replicate(Profile(layers), 3)
    own = [ref.dense(8), ref.dense(4)]
    with pytest.raises(ValueError, match="does not say num_microbatches; give it too"):
        jpipe.pipeline(own, plan=steady)
    with pytest.raises(ValueError, match="it is for 2 layers, there are 3"):
        jpipe.pipeline([*own, ref.dense(4)], 4, plan=steady)
    with pytest.raises(ValueError, match="it decides balance, which was given too"):
        jpipe.pipeline(own, 4, plan=steady, balance=[1, 1])

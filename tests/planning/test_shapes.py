"""Several devices per stage: which shape of a mesh is planned, foretold and built."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh

import jpipe
from jpipe import draw
from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._profile import LayerProfile, Profile
from jpipe.planning._shapes import shapes
from jpipe.schedules import lower_bound, one_f_one_b

from .. import reference as ref
from ..mesh.stages import compare

SAMPLE = jax.ShapeDtypeStruct((16, 8), float)


def model():
    return [layer for _ in range(3) for layer in (nn.Dense(32), nn.tanh)] + [
        nn.Dense(4)
    ]


@functools.cache
def planned(**options):
    given = {
        "num_devices": 4,
        "num_microbatches": (2, 4),
        "schedules": "1f1b",
        "measure": False,
        "action_seconds": 0.0,
        "bandwidth": 1e11,
    }
    return jpipe.plan(model(), SAMPLE, optax.adam(1e-3), **given | options)


def reason(plan, name):
    (line,) = (x for x in plan.forecast.reasons if x.startswith(f"{name}: "))
    return line


def test_the_best_of_all_shapes_is_chosen():
    bandwidth = 1e11
    best = planned(bandwidth=bandwidth)
    each = [planned(bandwidth=bandwidth, data=data) for data in (1, 2, 4)]
    seconds = [plan.forecast.seconds for plan in each]
    # What is interpolated is so from other profiles.
    assert best.forecast.seconds == pytest.approx(min(seconds), rel=1e-12)
    assert best.data == (1, 2, 4)[seconds.index(min(seconds))]
    rival = min(seconds[1:]) if best.data == 1 else seconds[0]
    assert f"{rival / min(seconds) - 1:.1%} more" in reason(best, "shape")


def test_the_shape_hangs_on_what_an_exchange_takes():
    slow, fast, free = (planned(bandwidth=b) for b in (1e9, 1e12, None))
    assert slow.data == 1 < fast.data
    says = reason(slow, "shape")
    assert says.startswith("shape: one device per stage; the best with several takes")
    assert "devices (data)" in says
    assert "; the best with one device per stage takes " in reason(fast, "shape")
    assert reason(free, "exchange").endswith("; that was taken to cost no time")
    assert not any("no time" in line for line in fast.forecast.reasons)


def test_gradients_are_exchanged_in_a_ring_when_a_stage_has_all_of_them():
    layers = tuple(
        LayerProfile(name, 1.0, 2.0, param_bytes=60, kept_bytes={"min_cut": 1})
        for name in "ab"
    )
    hardware, modes = Hardware(6, None, bandwidth=10.0, latency=0.5), ["min_cut"] * 2
    given = Profile(layers), [7, 7], [1, 1], modes, one_f_one_b(2, 4), hardware
    made = evaluate(*given, 3)
    one = evaluate(*given)
    # Four hops: a third of 60 bytes, and a latency.
    assert [x.end - x.start for x in made.timeline.exchanges] == [4 * (2 + 0.5)] * 2
    assert made.seconds == one.seconds + 10
    assert made.num_devices == 6
    assert [m.parameters for m in made.memory] == [m.parameters for m in one.memory]
    assert [m.optimizer for m in made.memory] == [7, 7]
    costs = made.timeline.costs
    assert lower_bound(costs, 2, 4) == lower_bound(one.timeline.costs, 2, 4) + 10
    # A sum of shards stands beside what it is of.
    assert all(m.held >= 60 for m in made.memory)


def test_each_device_holds_what_was_foretold():
    data = 2
    plan = planned(schedules="zb_v", data=data, num_microbatches=4)
    pipe = jpipe.pipeline(model(), plan=plan)
    tx = optax.adam(1e-3)
    x, targets = jnp.ones(SAMPLE.shape), jnp.ones(16)
    state = pipe.init_train_state(jax.random.key(1), x, tx)
    step = pipe.train_step(lambda y, t: y.mean() - t.mean(), tx)
    pipe.compile(step, state, x, targets)
    memory = plan.forecast.memory
    stages = pipe.plan.stages
    params = [
        sum(s.param_bytes for s in stages if s.rank == rank)
        for rank in range(len(memory))
    ]
    assert [own.parameters for own in memory] == params
    assert [own.gradients for own in memory] == params
    held = [stage.held_bytes for stage in stages]
    # The pipeline has a loss, whose residuals are a few numbers.
    assert [s.held_bytes for s in plan.stages] == pytest.approx(held, abs=32)
    for (_, peak), own in zip(pipe.plan.peak_bytes, memory, strict=True):
        assert own.lasting + own.held == pytest.approx(peak, abs=64)
    slots = dict.fromkeys(jax.devices()[: len(memory) * data], 0)
    for leaf in jax.tree.leaves(state.opt_state):
        for shard in leaf.addressable_shards:
            slots[shard.device] += shard.data.nbytes
    each = [own.optimizer for own in memory for _ in range(data)]
    assert each == list(slots.values())
    assert (pipe.plan.data, pipe.plan.forecast) == (data, plan.forecast)


def test_a_plan_trains_with_the_numbers_of_as_many_parts_on_one_device(double):
    def layers():
        return [ref.dense(8, float), jnp.tanh, ref.dense(4, float)]

    x, targets = ref.regression(24, float)
    plan = jpipe.plan(
        layers(),
        x,
        optax.sgd(0.1),
        num_devices=4,
        data=2,
        num_microbatches=3,
        schedules="1f1b",
        balance=[2, 1],
        measure=False,
    )
    pipe = jpipe.pipeline(layers(), plan=plan)
    meshes = [list(own.devices) for own in pipe.devices]
    assert meshes == [jax.devices()[:2], jax.devices()[2:4]]
    compare(layers, pipe, 6, x, targets, relative=1e-12)


def test_it_is_printed_saved_and_drawn():
    plan = planned(data=2, balance=(3, 4))
    assert str(plan).startswith("2 stages x 2 devices (data)\nstage  device  ")
    assert [stage.device for stage in plan.stages] == [
        "rank 0 (data=2)",
        "rank 1 (data=2)",
    ]
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    one = planned(data=1, balance=(3, 4))
    assert "(data" not in str(one)
    assert "2 x 2 devices, " in draw.svg(plan)
    assert "memory of each device at the peak" in draw.svg(plan)
    assert "exchange of gradients" in draw.svg(plan)
    assert "devices, " not in draw.svg(one)


def test_a_mesh_and_devices_have_to_have_its_shape():
    plan = planned(data=2, balance=(3, 4))
    last = jax.devices()[:3:-1]
    built = jpipe.pipeline(model(), plan=plan, devices=last)
    assert [list(own.devices) for own in built.devices] == [last[:2], last[2:]]
    mesh = Mesh(np.array(last).reshape(2, 2).T, ("data", "stage"))
    for options in ({"mesh": mesh}, {"devices": mesh}):
        pipe = jpipe.pipeline(model(), plan=plan, **options)
        assert pipe.devices == built.devices
    sharded = jpipe.pipeline(model(), plan=plan, sharding=lambda path, spec: None)
    assert sharded.plan.data == 2
    other = Mesh(np.array(last), ("stage",))
    says = (
        "plan: it is for 2 x 2 devices along 'stage' and 'data', the mesh has 1 along "
        "'data'; leave out mesh=, or type "
        'mesh=jax.make_mesh((2, 2), ("stage", "data"))'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        jpipe.pipeline(model(), plan=plan, mesh=other)
    with pytest.raises(ValueError, match=r"for 2 x 1 devices .* the mesh has 2 along"):
        jpipe.pipeline(model(), plan=planned(data=1, balance=(3, 4)), mesh=mesh)
    for devices in (last[:3], last[:1] * 4):
        with pytest.raises(ValueError, match=r"for 2 x 2 .* there are \d different"):
            jpipe.pipeline(model(), plan=plan, devices=devices)
    with pytest.raises(TypeError, match=r"devices: \['cpu'.* are not jax.Device"):
        jpipe.pipeline(model(), plan=plan, devices=["cpu"] * 4)


def test_shapes_are_those_that_the_examples_allow():
    assert shapes(None, [4], 8, 16, None) == ((4, 1), (4, 2), (4, 4))
    assert shapes(None, [2], 6, 15, None) == ((2, 1), (2, 3))
    assert shapes([2], None, 4, 64, None) == ((2, 2), (4, 2), (8, 2), (16, 2))
    # Parts of the same sizes, so that no other profile is needed.
    sizes = {shape.parts for shape in shapes(None, None, 8, 64, None)}
    assert sizes == {1, 8, 16, 32, 64}
    assert shapes(None, None, 4, 16, 4) == ((4, 1), (2, 2), (1, 4))
    assert shapes(None, [2], 4, 16, 4) == ((2, 2),)
    assert shapes(None, None, 1, 3, None) == tuple(itertools.product((1, 2, 3), (1,)))


def test_a_profile_is_of_a_part_of_a_shard():
    given = {"num_microbatches": 4, "measure": False, "action_seconds": 0.0}
    profile = jpipe.profile(model(), SAMPLE, **given)
    own = {"num_microbatches": None, "measure": False, "action_seconds": 0.0}
    made = planned.__wrapped__(profile=profile, data=2, **own)
    assert (made.data, made.schedule.num_microbatches) == (2, 2)
    again = planned(data=2, num_microbatches=2)
    assert made.forecast == again.forecast
    with pytest.raises(
        ValueError, match=r"data=\(\) .* leave nothing to choose for 16"
    ):
        planned.__wrapped__(profile=profile, data=(), **own)
    with pytest.raises(ValueError, match="the profile was made on something else"):
        planned.__wrapped__(profile=profile, **own | {"num_microbatches": 2, "data": 1})

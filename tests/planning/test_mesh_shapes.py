"""Several devices per stage: which shape of a mesh is planned, foretold and built."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jpipe
from jpipe import draw

from . import models

model = functools.partial(models.dense, 3)
planned = functools.partial(
    models.planned,
    3,
    num_devices=4,
    num_microbatches=(2, 4),
    schedules="1f1b",
    bandwidth=1e11,
)


def reason(plan, name):
    (line,) = (x for x in plan.forecast.reasons if x.startswith(f"{name}: "))
    return line


def test_the_shape_hangs_on_what_an_exchange_takes():
    slow, fast, free = (planned(bandwidth=b) for b in (1e9, 1e12, None))
    assert slow.data == 1 < fast.data
    assert reason(free, "transfers").endswith("add up its gradients in the last 0 s")
    assert not any("no time" in line for line in fast.forecast.reasons)
    assert "add up" not in reason(slow, "transfers")


def test_a_plan_of_a_mesh_is_printed_saved_and_drawn():
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
    assert jpipe.pipeline(model(), plan=plan, mesh=mesh).devices == built.devices
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


def test_gradients_are_exchanged_in_a_ring_when_a_stage_has_all_of_them():
    options = {"data": 2, "balance": (3, 4), "latency": 0.5, "bandwidth": 1e3}
    plan, alone = planned(**options), planned(**options | {"data": 1})
    # Two hops: half of the gradients each, and a latency.
    sizes = [own.gradients for own in plan.forecast.memory]
    assert plan.forecast.costs.exchange == [2 * (n / 2 / 1e3 + 0.5) for n in sizes]
    assert alone.forecast.costs.exchange in (0.0, [0.0, 0.0])

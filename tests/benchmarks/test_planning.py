"""What published cuts would take, beside plans; plans and their rivals in a table."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from benchmarks.planning.__main__ import rows_of, summary
from benchmarks.planning.cuts import MODELS, PUBLISHED, Run, plans, row
from benchmarks.planning.layers_and_stages import OnOneDevice
from benchmarks.planning.ways import (
    MICROBATCHES,
    RANKS,
    RIVALS,
    Link,
    Way,
    Ways,
    plan_way,
)

from .. import reference as ref


def test_a_backward_that_computes_forwards_again_needs_more_workspace():
    layers = [nn.Sequential([nn.Dense(64), nn.gelu]) for _ in range(4)]
    x = jnp.ones((8 * MICROBATCHES, 64))
    stores_all, stores_inputs = (
        OnOneDevice(layers, x, 2, remat) for remat in ("none", "full")
    )
    least = stores_all.backward_workspace()
    assert stores_inputs.backward_workspace() > least
    assert stores_inputs.median_seconds(1) > 0


def test_published_cuts_are_of_all_layers():
    for model, runs in PUBLISHED.items():
        layers = MODELS[model]()
        for num_devices, run in runs.items():
            assert len(run.balance) == num_devices
            assert sum(run.balance) == len(layers)


def test_cuts_are_planned_and_printed():
    layers = [ref.dense(8) for _ in range(5)]
    run = Run([1, 4], examples=16, num_microbatches=4)
    made = dict(plans(layers, 4, run, 2**30))
    assert list(made) == [
        "equal layers",
        "torchgpipe's",
        "jpipe.partition",
        "jpipe.plan",
    ]
    balances = [plan.balance for plan in made.values()]
    assert balances[:2] == [[3, 2], [1, 4]]
    assert isinstance(made["jpipe.plan"], jpipe.Plan)
    line = row(2, "torchgpipe's", made["torchgpipe's"], limit=1)
    assert line.startswith("      2 | torchgpipe's    | ")
    assert line.endswith("too much | [1, 4], 1f1b")
    refusal = dict(plans(layers, 4, run, 1))["jpipe.plan"]
    assert isinstance(refusal, ValueError)
    assert str(refusal) in row(2, "jpipe.plan", refusal, limit=1)


def test_rivals_are_all_schedules_and_two_cuts_each_once():
    layers = [ref.dense(8) for _ in range(5)]
    x = jnp.ones((16, 8))
    profile = jpipe.profile(layers, x, num_microbatches=MICROBATCHES, measure=False)
    link = Link(latency=1e-5, bandwidth=1e9)
    ways = Ways(profile, link)
    plan = jpipe.plan(
        layers,
        x,
        optax.sgd(0.1),
        profile=profile,
        num_devices=RANKS,
        data=1,
        num_microbatches=MICROBATCHES,
        balance=[3, 2],
        schedules="1f1b",
        remat="min_cut",
        bandwidth=link.bandwidth,
        latency=link.latency,
    )
    index = ways.add(plan_way(plan))
    ways.add_rivals()
    # The plan does what the equal split does: it is measured once.
    assert "equal" in ways.ways[index].rivals
    assert len({way.work for way in ways.ways}) == len(ways.ways)
    rivals = {rival for way in ways.ways for rival in way.rivals}
    assert rivals == set(RIVALS)
    names = set()
    for way in ways.ways:
        pipe = Way(**json.loads(json.dumps(dataclasses.asdict(way)))).build(layers)
        assert [len(stage.layers) for stage in pipe.plan.stages] == way.balance
        assert pipe.plan.remat == way.remat
        assert len(set(pipe.devices)) == RANKS <= len(jax.devices())
        names.add(pipe.schedule.name)
    assert names >= {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"}


def result_of_two_ways(loss=1.0):
    """What is measured of a plan of 2 s, and of a rival of 3 s and 60 bytes."""
    schedule = jpipe.schedules.one_f_one_b(2, 8).to_json()
    plan = Way([2, 3], ["min_cut"] * 2, schedule, seconds=1.0, plan="{}")
    rival = Way([3, 2], ["min_cut"] * 2, schedule, seconds=1.0, rivals=["equal"])
    first = [
        {"seconds": [9.0, 2.0, 2.0, 2.0], "loss": 1.0, "bytes": {"cpu:0": 30}},
        {"seconds": [1.0, 3.0, 3.0, 3.0], "loss": loss, "bytes": {"cpu:0": 50}},
    ]
    second = [
        {"seconds": [], "loss": 1.0, "bytes": {"cpu:1": 40}},
        {"seconds": [], "loss": loss, "bytes": {"cpu:1": 60}},
    ]
    planned = [
        {"limit": None, "plan_seconds": 1.0, "way": 0, "refusal": ""},
        {"limit": 50, "plan_seconds": 1.0, "way": 0, "refusal": ""},
        {"limit": 20, "plan_seconds": 1.0, "way": None, "refusal": "no plan fits"},
    ]
    return {
        "profile_seconds": 1.0,
        "planned": planned,
        "ways": [dataclasses.asdict(plan), dataclasses.asdict(rival)],
        "measured": [first, second],
    }


def test_rows_compare_a_plan_with_the_rivals_that_fit():
    free, limited, refused = rows_of("model", result_of_two_ways())
    assert free.ratio("equal") == 1.5
    assert free.predicted == 0.5
    assert limited.ratio("equal") is None  # 60 bytes are more than 50
    assert "0.80" in limited.cells()  # 40 of 50
    assert refused.plan is None
    assert "nothing fits" in refused.cells()
    assert summary([free, limited, refused]) == (
        "equal: median 1.50, worst 1.50 of 1; predicted by measured: median 0.50; "
        "bytes by limit: most 0.80"
    )


def test_ways_that_train_differently_are_refused():
    with pytest.raises(ValueError, match=r"model: \[3, 2\] 1f1b has a loss of 2"):
        rows_of("model", result_of_two_ways(loss=2.0))

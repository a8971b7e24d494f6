"""What published cuts would take, beside plans; plans and their rivals in a table."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from benchmarks.planning import pair
from benchmarks.planning.comparison import format_page, rows_of, summarize
from benchmarks.planning.cuts import MODELS, PUBLISHED, Run, plans, row
from benchmarks.planning.ways import (
    MICROBATCHES,
    RANKS,
    RIVALS,
    Link,
    Planned,
    Rivals,
    Tuned,
    Way,
    add_way,
    plan_way,
)
from benchmarks.provenance import provenance

from .. import reference as ref


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


def profile_and_link():
    """A profile of five layers in micro-batches of the rivals' size."""
    layers = [ref.dense(8) for _ in range(5)]
    profile = jpipe.profile(
        layers, jnp.ones((16, 8)), num_microbatches=MICROBATCHES, measure=False
    )
    return layers, profile, Link(latency=1e-5, bandwidth=1e9)


def test_rivals_are_two_cuts_and_the_best_schedules_of_each_family():
    layers, profile, link = profile_and_link()
    rivals = Rivals(profile, link)
    named = list(rivals.list_named(None))
    assert {len(way.balance) for way in named} == {2, 4}
    assert {way.remat[0] for way in named} == {"min_cut"}
    ways = []
    for way in (*rivals.list_fixed(), *named):
        add_way(ways, way)
    assert {rival for way in ways for rival in way.rivals} == set(RIVALS)
    for way in ways:
        pipe = Way(**json.loads(json.dumps(dataclasses.asdict(way)))).build(layers)
        assert [len(stage.layers) for stage in pipe.plan.stages] == way.balance
        assert pipe.plan.remat == way.remat
        assert len(set(pipe.devices)) == RANKS <= len(jax.devices())
        assert pipe.schedule.num_microbatches == MICROBATCHES == way.num_microbatches


def test_named_schedules_are_cut_for_a_limit():
    _, profile, link = profile_and_link()
    rivals = Rivals(profile, link)
    assert list(rivals.list_named(1)) == []
    assert list(rivals.list_named(2**30)) != []


def test_a_plan_that_does_what_a_rival_does_is_measured_once():
    layers, profile, link = profile_and_link()
    plan = jpipe.plan(
        layers,
        jnp.ones((16, 8)),
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
    ways = []
    index = add_way(ways, plan_way(plan))
    for way in Rivals(profile, link).list_fixed():
        add_way(ways, way)
    assert "equal" in ways[index].rivals
    assert len({way.work for way in ways}) == len(ways)


def test_a_model_is_tuned_and_all_ways_are_timed(tmp_path, monkeypatch):
    layers = [ref.dense(8) for _ in range(2)]
    monkeypatch.setitem(pair.MODELS, "tiny", lambda: (layers, jnp.ones((16, 8))))
    schedule = jpipe.schedules.one_f_one_b(2, MICROBATCHES).to_json()
    way = Way([1, 1], ["min_cut"] * 2, schedule, seconds=1.0, rivals=["equal"])
    planned = [Planned(limit, 1.0, refusal="no") for limit in (None, 2, 1)]
    path = tmp_path / "ways.json"
    fields = {
        "planned": list(map(dataclasses.asdict, planned)),
        "ways": [dataclasses.asdict(way)],
    }
    path.write_text(json.dumps(fields))

    result = pair.measure_model("tiny", path, rounds=2)

    free, limited, smaller = (Tuned(**fields) for fields in result["tuned"])
    assert free.seconds is not None
    assert free.seconds > 0
    assert len(free.trials) > 1
    assert "no step fits" in limited.refusal
    assert smaller == Tuned(1, None)  # nothing fits a larger limit
    assert len(result["ways"]) == len(result["measured"])
    for measured in result["measured"]:
        assert len(measured["seconds"]) == 2
        assert min(measured["seconds"]) > 0
        assert max(measured["bytes"].values()) > 0
    page = format_page(
        {
            "tiny": json.loads(json.dumps(fields | result))
            | {
                "profile_seconds": 1.0,
                "measured": [result["measured"]] * 2,
                "link": {"latency": 1e-4, "bandwidth": 2.0**30},
                "provenance": provenance(),
            }
        }
    )
    assert page.count("| tiny | none |") == 2
    assert "100 µs and 1,024 MiB/s" in page
    assert "tiny, 0.00 MiB: tune: memory_limit=2 bytes" in page


def result_of_three_ways(loss=1.0):
    """What is measured of a plan of 2 s, a tuned plan of 1 s and a rival of 3 s."""
    schedule = jpipe.schedules.one_f_one_b(2, 8).to_json()
    plan = Way([2, 3], ["min_cut"] * 2, schedule, seconds=1.0, plan="{}")
    rival = Way([3, 2], ["min_cut"] * 2, schedule, seconds=1.0, rivals=["equal"])
    tuned = Way([4, 1], ["min_cut"] * 2, schedule, seconds=1.0, plan="{}")
    first = [
        {"seconds": [9.0, 2.0, 2.0, 2.0], "loss": 1.0, "bytes": {"cpu:0": 30}},
        {"seconds": [1.0, 3.0, 3.0, 3.0], "loss": loss, "bytes": {"cpu:0": 50}},
        {"seconds": [5.0, 1.0, 1.0, 1.0], "loss": None, "bytes": {}},
    ]
    second = [
        {"seconds": [], "loss": 1.0, "bytes": {"cpu:1": 40}},
        {"seconds": [], "loss": loss, "bytes": {"cpu:1": 60}},
        {"seconds": [], "loss": 1.0, "bytes": {"cpu:1": 35}},
    ]
    planned = [
        Planned(None, 1.0, 0, predicted=1.0),
        Planned(38, 1.0, 0, predicted=1.0),
        Planned(20, 1.0, refusal="no plan fits"),
    ]
    tuned_plans = [
        Tuned(None, 20.0, 0, 1.9, [(1.9, 2.0), (3.0, 2.0)]),
        Tuned(38, 30.0, 2, 0.5, [(1.0, 1.0)]),
        Tuned(20, 40.0, refusal="no step fits"),
    ]
    return {
        "profile_seconds": 1.0,
        "planned": list(map(dataclasses.asdict, planned)),
        "tuned": list(map(dataclasses.asdict, tuned_plans)),
        "ways": list(map(dataclasses.asdict, [plan, rival, tuned])),
        "measured": [first, second],
    }


def test_rows_compare_the_ways_that_fit_with_the_tuned_plan():
    free, limited, refused = rows_of("model", result_of_three_ways())
    assert free.ratios == {"equal": 1.5, "plan on paper": 1.0}
    assert free.speed == 1.0
    assert free.tuned_error == 0.95
    assert free.finalist_errors == [0.95, 1.5]
    # The plan on paper needs 40 bytes of 38, and the rival more.
    assert limited.ratios == {}
    assert limited.list_speed_cells()[-1] == "needs 1.05"
    assert limited.tuned_error == 0.5
    assert refused.speed is None
    assert "nothing fits" in refused.list_speed_cells()
    sentences = list(summarize([free, limited, refused]))
    assert sentences[0] == (
        "tuned plans reach 0.99 of the fastest way in 2 of 2 rows, at least 1.00"
    )
    assert sentences[-1] == "seconds of tuning: median 30, at most 40"


def test_the_fastest_way_is_bold():
    result = result_of_three_ways()
    (cells, *_) = (row.list_speed_cells() for row in rows_of("model", result))
    assert cells[3:] == ["**2000.0**", "1.50", "-", "-", "-", "1.00"]
    result["tuned"][0]["way"] = 1
    (cells, *_) = (row.list_speed_cells() for row in rows_of("model", result))
    assert cells[3:] == ["3000.0", "1.00", "-", "-", "-", "**0.67**"]


def test_ways_that_train_differently_are_refused():
    with pytest.raises(ValueError, match=r"model: \[3, 2\] 1f1b, 8 has a loss of 2"):
        rows_of("model", result_of_three_ways(loss=2.0))

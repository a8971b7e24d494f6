"""Traces for Perfetto: slices, arrows, counters."""

import json
from collections import Counter

import pytest

from jpipe import draw
from jpipe.schedules import Costs, Skip, gpipe, replicated

from .pictures import CLOSE, NAMES, boxes, measured, parsed, predicted, texts


def events(timelines, phase: str, **options) -> list[dict]:
    trace = json.loads(draw.trace(timelines, **options))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_trace_has_a_slice_for_each_action_and_an_arrow_for_each_transfer(name):
    timeline = predicted(name)
    slices = events(timeline, "X", unit=1000)
    slice_of = {event["name"]: event for event in slices}
    assert set(slice_of) == set(map(str, timeline.start))
    assert len(slices) == len(timeline.start)
    for rank, row in enumerate(timeline.rows):
        for action in row:
            event = slice_of[str(action)]
            assert event["ts"] == CLOSE(1000 * timeline.start[action], abs=1e-3)
            taken = timeline.end[action] - timeline.start[action]
            assert event["dur"] == CLOSE(1000 * taken, abs=2e-3)
            assert (event["pid"], event["tid"]) == (0, rank)
            where = {"stage": action.stage, "micro-batch": action.microbatch}
            assert event["args"] == where

    def around(event) -> str:
        (name,) = [
            s["name"]
            for s in slices
            if s["tid"] == event["tid"] and s["ts"] < event["ts"] < s["ts"] + s["dur"]
        ]
        return name

    needs, placement = timeline.needs, timeline.placement
    expected = Counter(
        (str(need), str(action))
        for action in timeline.start
        for need in needs(action)
        if placement[need.stage] != placement[action.stage]
    )
    begins, ends = (
        {event["id"]: event for event in events(timeline, phase, unit=1000)}
        for phase in "sf"
    )
    assert begins.keys() == ends.keys()
    assert Counter((around(begins[i]), around(ends[i])) for i in begins) == expected


def test_measured_seconds_become_microseconds_from_zero():
    timeline = measured(predicted("1f1b"), factor=0.5, later=1000.0)
    slices = {event["name"]: event for event in events(timeline, "X")}
    assert slices["0F0"]["ts"] == 0
    assert slices["0F1"]["ts"] == CLOSE(500_000)
    assert slices["0B0"]["dur"] == CLOSE(1_000_000)
    counters = events(timeline, "C")
    assert min(event["ts"] for event in counters) == 0
    assert [e["args"]["bytes"] for e in counters] == [e.bytes for e in timeline.memory]


def test_ranks_that_share_a_stage_exchange_gradients_at_its_end():
    costs = Costs(exchange=[3.0, 0.0])
    timeline = replicated([2, 1], 2).simulate(costs)
    exchanged = [e for e in events(timeline, "X", unit=1.0) if e["cat"] == "exchange"]
    end = max(timeline.end.values())
    assert [(e["tid"], e["ts"], e["dur"]) for e in exchanged] == [
        (0, end, 3.0),
        (1, end, 3.0),
    ]
    root = parsed(timeline)
    assert len(boxes(root, "exchange of gradients of stage 0: ")) == 2
    assert "exchange of gradients" in [text["text"] for text in texts(root)]


def test_a_skip_connection_has_arrows_there_and_back():
    skips = (Skip(0, 2, 10, 5), Skip(0, 1, 1, 1))
    timeline = gpipe(3, 1).simulate(Costs(skips=skips))
    ranks = [
        {event["id"]: event["tid"] for event in events(timeline, phase)}
        for phase in "sf"
    ]
    pairs = sorted((ranks[0][i], ranks[1][i]) for i in ranks[0])
    assert pairs == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_transfers_that_keep_a_rank_from_computing_are_slices_within_actions():
    costs = Costs(boundary_bytes=8, cotangent_bytes=4, bandwidth=4, overlap=False)
    slices = events(gpipe(2, 1).simulate(costs), "X", unit=1.0)
    transfers = [
        (e["name"], e["tid"], e["ts"], e["dur"])
        for e in slices
        if e["cat"] == "transfer"
    ]
    assert transfers == [
        ("sends", 0, 1.0, 1.0),
        ("receives", 0, 6.5, 0.5),
        ("receives", 1, 2.0, 1.0),
        ("sends", 1, 6.0, 0.5),
    ]
    whole = {e["name"]: (e["ts"], e["dur"]) for e in slices if e["cat"] in "FB"}
    assert whole == {"0F0": (0, 2), "1F0": (2, 2), "1B0": (4, 2.5), "0B0": (6.5, 2.5)}

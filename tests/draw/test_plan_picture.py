"""Plans: bars of time and of bytes, the limit, the timeline below.

A private name is imported because the text of a duration has no public one.
"""

import dataclasses
import functools
import json

import pytest

import jpipe
from jpipe.schedules._formats import format_seconds

from ..planning.models import SAMPLE, dense, planned
from .pictures import SVG, actions, boxes, parsed, texts

CLOSE = functools.partial(pytest.approx, abs=0.02)  # what the file is rounded to


def test_bars_are_as_long_as_what_they_say():
    plan = planned(2, schedules="1f1b", memory_limit=1 << 17)
    root = parsed(plan)
    kinds = "parameters|gradients|optimizer|activations|workspace"
    parts = [box for _, box in boxes(root, kinds)]
    hatched = root.findall(f"{SVG}g[@fill='url(#jpipe-idle)']/{SVG}rect")
    ends_at = [
        float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in hatched
    ]
    limit = max(ends_at[: 2 * len(plan.forecast.memory)])
    for rank, memory in enumerate(plan.forecast.memory):
        bar = sorted(parts[5 * rank : 5 * rank + 5], key=lambda box: box["x"])
        ends = [box["x"] + box["width"] for box in bar]
        assert [box["x"] for box in bar[1:]] == [CLOSE(end) for end in ends[:-1]]
        part = (ends[-1] - bar[0]["x"]) / (limit - bar[0]["x"])
        assert part == pytest.approx(memory.total / (1 << 17), rel=1e-3)
    says = [text["text"] for text in texts(root)]
    assert "memory at the peak, limit 128.0 KiB" in says
    first = plan.stages[0].layers
    assert f"rank 0, min_cut: {first[0]} to {first[-1]} ({len(first)})" in says


def test_below_the_bars_is_the_timeline_of_the_step_in_seconds():
    plan = planned(2, schedules="zb_h1")
    root = parsed(plan)
    boxed = actions(root)
    assert len(boxed) == sum(map(len, plan.schedule.rows))
    lowest = max(box["y"] for _, box in boxes(root, "computes: "))
    assert min(box["y"] for box in boxed.values()) > lowest
    shown = [text["text"] for text in texts(root)]
    seconds = format_seconds(plan.forecast.seconds)
    assert f"zb_h1, 4 micro-batches, {seconds} a step predicted" in shown
    # Of memory the bars say all.
    assert not any(text.startswith("peak ") for text in shown)


def test_forwards_that_run_in_their_backwards_are_drawn_as_those_of_a_schedule():
    plan = planned(2, schedules="1f1b", data=1, balance=(3, 2))
    boxed = actions(parsed(plan))
    assert plan.forecast.costs.forward[-1] == 0.0
    profile = jpipe.profile(
        dense(2), SAMPLE, num_microbatches=4, measure=False, action_seconds=0.0
    )
    costs = profile.costs(plan.balance)
    for microbatch in range(4):
        forward, backward = (boxed[f"1{op}{microbatch}"] for op in "FB")
        assert forward["x"] + forward["width"] == CLOSE(backward["x"])
        ratio = forward["width"] / backward["width"]
        assert ratio == pytest.approx(costs.forward[1] / costs.backward[1], rel=0.01)


def test_transfers_that_keep_a_rank_from_computing_are_parts_of_its_time():
    plan = planned(
        2, schedules="1f1b", data=1, balance=(3, 2), overlap=False, latency=1e-6
    )
    root = parsed(plan)
    bars = zip(boxes(root, "computes: "), boxes(root, "transfers: "), strict=True)
    costs = plan.forecast.costs
    # Each rank has half of four transfers there and four back, of what crosses.
    num_bytes = costs.boundary_bytes[1] + costs.cotangent_bytes[1]
    seconds = (8 * costs.latency + 4 * num_bytes / costs.bandwidth) / 2
    computing = [
        4 * (costs.forward[stage] + costs.backward[stage]) for stage in range(2)
    ]
    for rank, ((_, busy), (_, transfers)) in enumerate(bars):
        assert busy["x"] + busy["width"] == CLOSE(transfers["x"])
        ratio = transfers["width"] / busy["width"]
        assert ratio == pytest.approx(seconds / computing[rank], rel=0.01)
    # A forward that runs in its backward is drawn between what it receives and that.
    boxed = dict(boxes(root, r"1[FB]0"))
    spans = {title.split(":")[0]: box for title, box in boxed.items()}
    order = [spans[name] for name in ("1F0 receives", "1F0", "1B0", "1B0 sends")]
    ends = [box["x"] + box["width"] for box in order]
    assert [box["x"] for box in order[1:]] == [CLOSE(end) for end in ends[:-1]]
    assert spans["1F0"]["width"] > 1


def test_names_of_ranks_are_cut_only_where_there_is_no_room():
    plan = planned(2, schedules="interleaved", data=1, balance=(1, 1, 1, 2))
    stages = (
        dataclasses.replace(stage, layers=("Feedforward",)) for stage in plan.stages
    )
    plan = dataclasses.replace(plan, stages=tuple(stages))
    wide, narrow = (
        [text["text"] for text in texts(parsed(plan, width=width))]
        for width in (1100, 400)
    )
    for rank in range(2):
        (name,) = [text for text in wide if text.startswith(f"rank {rank}, ")]
        assert name.endswith("min_cut: Feedforward + Feedforward")
        (cut,) = [text for text in narrow if text.startswith(f"rank {rank}, ")]
        assert cut.endswith("\N{HORIZONTAL ELLIPSIS}")
    widths = [box["width"] for _, box in boxes(parsed(plan, width=400), "")]
    assert widths
    assert min(widths) >= 0


def test_a_trace_of_a_plan_is_that_of_its_step():
    plan = planned(2, schedules="1f1b")
    events = json.loads(jpipe.draw.trace(plan))["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * plan.forecast.seconds, abs=1e-2)
    without = dataclasses.replace(plan, forecast=None)
    with pytest.raises(ValueError, match="a plan without a forecast: draw what"):
        jpipe.draw.trace(without)

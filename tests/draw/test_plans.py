"""Plans: bars of time and of bytes, the limit, the timeline below.

A private name is imported because the text of a duration has no public one.
"""

import functools

import pytest

from jpipe.schedules._units import duration

from ..planning.models import planned
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
        own = sorted(parts[5 * rank : 5 * rank + 5], key=lambda box: box["x"])
        ends = [box["x"] + box["width"] for box in own]
        assert [box["x"] for box in own[1:]] == [CLOSE(end) for end in ends[:-1]]
        part = (ends[-1] - own[0]["x"]) / (limit - own[0]["x"])
        assert part == pytest.approx(memory.total / (1 << 17), rel=1e-3)
    says = [text["text"] for text in texts(root)]
    assert "memory at the peak, limit 128.0 KiB" in says
    first = plan.stages[0].layers
    assert f"rank 0, min_cut: {first[0]} to {first[-1]} ({len(first)})" in says


def test_below_the_bars_is_the_timeline_of_the_step_in_seconds():
    plan = planned(2, schedules="zb_h1")
    root = parsed(plan)
    found = actions(root)
    assert len(found) == sum(map(len, plan.schedule.rows))
    lowest = max(box["y"] for _, box in boxes(root, "busy: "))
    assert min(box["y"] for box in found.values()) > lowest
    shown = [text["text"] for text in texts(root)]
    seconds = duration(plan.forecast.seconds)
    assert f"zb_h1, 4 micro-batches, {seconds} a step predicted" in shown
    # Of memory the bars say all.
    assert not any(text.startswith("peak ") for text in shown)

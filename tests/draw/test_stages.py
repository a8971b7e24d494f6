"""Stages of several devices: their columns, and the timeline below them."""

import dataclasses
import functools
import json
import re

import pytest

from jpipe import draw
from jpipe.schedules import Costs, replicated

from ..planning.chains import figure
from .pictures import CLOSE, SVG, actions, boxes, parsed, texts

REPLICAS = (3, 2, 2, 1)


plan = functools.partial(figure, layers=2)
EXCHANGING = plan(exchange=(2.0, 1.0, 0.5, 0.0))


def reds(root):
    """What is written in the colour of what holds all up."""
    return [
        text.text
        for group in root.iter(f"{SVG}g")
        if group.get("fill") == "#cc0000"
        for text in group.findall(f"{SVG}text")
    ]


def test_a_stage_has_a_box_for_each_device():
    root = parsed(EXCHANGING)
    devices = boxes(root, r"device \d+: computes")
    assert [title for title, _ in devices] == [
        f"device {i}: computes 60.0%" for i in range(8)
    ]
    columns = [box["x"] for _, box in devices]
    assert [columns.count(x) for x in sorted(set(columns))] == list(REPLICAS)
    written = [text["text"] for text in texts(root)]
    for says in ("stage 3", "3 devices", "1 device", "layers 2 to 3", "60 % busy"):
        assert says in written
    assert written.count("2 devices") == 2
    assert "60 % busy, 40 % exchange" in written


def test_boxes_are_as_long_as_their_part_of_the_time():
    root = parsed(EXCHANGING)
    computes = dict(boxes(root, r"device \d+: computes"))
    exchanges = dict(boxes(root, r"device \d+: exchanges"))
    assert list(exchanges) == [
        *(f"device {i}: exchanges 40.0%" for i in range(3)),
        *(f"device {i}: exchanges 30.0%" for i in (3, 4)),
        *(f"device {i}: exchanges 15.0%" for i in (5, 6)),
    ]
    for i, parts in enumerate([0.4] * 3 + [0.3] * 2 + [0.15] * 2):
        own = computes[f"device {i}: computes 60.0%"]
        other = exchanges[f"device {i}: exchanges {parts:.1%}"]
        assert other["x"] == CLOSE(own["x"] + own["width"], abs=0.02)
        assert other["width"] / own["width"] == CLOSE(parts / 0.6, abs=1e-3)


def test_what_holds_it_up_is_red():
    always = "red: what holds it up"
    assert sorted(reds(parsed(EXCHANGING))) == sorted(
        ["stage 0", "60 % busy, 40 % exchange", always]
    )
    slow = plan(boundary_bytes=(0.0, 0.0, 8.0, 0.0))
    # 4 seconds over two links.
    assert sorted(reds(parsed(slow))) == sorted(["4000 ms", always])


def test_below_are_the_rows_of_all_devices():
    root, timeline = parsed(EXCHANGING), EXCHANGING.simulate()
    drawn = actions(root)
    assert set(drawn) == {str(action) for action in timeline.start}
    assert len({box["y"] for box in drawn.values()}) == 8
    lowest = max(box["y"] for _, box in boxes(root, r"device \d"))
    assert min(box["y"] for box in drawn.values()) > lowest
    exchanged = boxes(root, "exchange of gradients: ")
    assert [title.split(": ")[1] for title, _ in exchanged] == [
        *["38 s to 40 s"] * 3,
        *["35 s to 36 s"] * 2,
        *["33 s to 33.5 s"] * 2,
    ]
    rows = sorted({box["y"] for box in drawn.values()})
    assert [rows.index(box["y"]) for _, box in exchanged] == [0, 1, 2, 3, 4, 5, 6]
    # A rank that exchanges does not wait: no idle time lies over it.
    for _, box in exchanged:
        for title, idle in boxes(root, "idle: "):
            apart = (
                idle["y"] != box["y"]
                or idle["x"] + idle["width"] <= box["x"] + 0.02
                or idle["x"] >= box["x"] + box["width"] - 0.02
            )
            assert apart, title
    written = [text["text"] for text in texts(root)]
    assert "exchange of gradients" in written
    assert "time, s" in written


def test_what_does_not_occur_is_not_explained():
    written = [text["text"] for text in texts(parsed(plan()))]
    assert "exchanges gradients" not in written
    assert "exchange of gradients" not in written
    one = [text["text"] for text in texts(parsed(replicated([2], 4).simulate()))]
    assert "exchange of gradients" not in one


@pytest.mark.parametrize("replicas", [(1,), (1,) * 17, (40, 1), (3, 2, 2, 1)])
@pytest.mark.parametrize("width", [None, 400.0, 900.0])
def test_all_is_within_the_picture_and_beside_each_other(replicas, width):
    sent = (0.0,) + (0.5,) * (len(replicas) - 1)
    root = parsed(
        plan(replicas, 8, boundary_bytes=sent, cotangent_bytes=sent),
        width=width,
    )
    wide, tall = (float(root.get(key, "nan")) for key in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        box = {k: float(rect.get(k, "0")) for k in ("x", "y", "width", "height")}
        assert box["x"] >= 0 <= box["y"]
        assert box["x"] + box["width"] <= wide + 0.02
        assert box["y"] + box["height"] <= tall
    heads = [
        t for t in texts(root) if re.fullmatch(r"stage \d+|\d+ devices?", t["text"])
    ]
    assert len(heads) == 2 * len(replicas)
    for text in texts(root):
        assert 0 <= text["y"] <= tall
    for text in heads:
        assert 0 <= text["left"] <= text["right"] <= wide + 0.02
    for i, one in enumerate(heads):
        for other in heads[i + 1 :]:
            assert (
                one["y"] != other["y"]
                or one["right"] <= other["left"] + 0.02
                or other["right"] <= one["left"] + 0.02
            )


def test_a_title_and_a_description():
    text = draw.svg(EXCHANGING, titles="as it runs")
    assert "as it runs" in text
    first = str(EXCHANGING).partition("\n")[0]
    assert f'aria-label="{first}; as it runs: makespan 40 s' in text


def test_png_shows_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    draw.png(EXCHANGING, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_trace_has_exchanges_and_arrows_between_replicas():
    costs = Costs(exchange=[3.0, 0.0])
    timeline = replicated([2, 1], 2).simulate(costs)
    events = json.loads(draw.trace(timeline, unit=1.0))["traceEvents"]
    exchanged = [e for e in events if e.get("cat") == "exchange"]
    end = max(timeline.end.values())
    assert [(e["tid"], e["ts"], e["dur"]) for e in exchanged] == [
        (0, end, 3.0),
        (1, end, 3.0),
    ]
    arrows = {
        (e["id"], e["ph"]): e["tid"] for e in events if e.get("cat") == "transfer"
    }
    pairs = sorted(
        (tid, arrows[i, "f"]) for (i, ph), tid in arrows.items() if ph == "s"
    )
    assert pairs == [(0, 2), (1, 2), (2, 0), (2, 1)]
    plain = dataclasses.replace(timeline, exchanges=())
    assert "exchange" not in draw.trace(plain)

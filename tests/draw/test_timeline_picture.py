"""Pictures show what the timeline says: each box, gap, number and curve is measured.

Private names are imported because no public one has the scale or the colour by which a
curve of bytes is found in a picture.
"""

import xml.etree.ElementTree as ET

import pytest

from jpipe.draw import _palette as palette
from jpipe.draw._frame import fit_frame
from jpipe.schedules import Costs, gpipe

from .pictures import CLOSE, NAMES, SVG, actions, boxes, parsed, predicted, texts


def numbers_in(root: ET.Element) -> list[tuple[dict, str, dict[str, float]]]:
    """The numbers that are written inside boxes, with the action and its box."""
    return [
        (text, name, box)
        for text in texts(root)
        for name, box in actions(root).items()
        if text["text"].isdigit()
        and box["x"] < text["x"] < box["x"] + box["width"]
        and box["y"] < text["y"] < box["y"] + box["height"]
    ]


def hatched(root: ET.Element) -> dict[float, tuple[float, float]]:
    """The hatched part of each row: its top -> its left and its width."""
    (*rows, _) = root.findall(f"{SVG}g[@fill='{palette.IDLE}']/{SVG}rect")
    numbers = [[float(r.get(k, "nan")) for k in ("y", "x", "width")] for r in rows]
    return {top: (x, width) for top, x, width in numbers}


@pytest.mark.parametrize("name", NAMES)
def test_boxes_are_where_actions_run_and_the_rest_is_hatched(name):
    timeline = predicted(name)
    root = parsed(timeline)
    busy, idle = actions(root), hatched(root)
    assert set(busy) == set(map(str, timeline.start))
    frame = fit_frame((timeline,), None)
    per_unit = (frame.right - frame.left) / timeline.makespan
    for action, start in timeline.start.items():
        box = busy[str(action)]
        assert box["x"] == CLOSE(frame.left + start * per_unit, abs=0.02)
        width = (timeline.end[action] - start) * per_unit
        assert box["width"] == CLOSE(width, abs=0.02)
    tops = []
    for row in timeline.rows:
        here = [busy[str(action)] for action in row]
        (top,) = {box["y"] for box in here}
        tops.append(top)
        # What they leave free of a row is hatched.
        (x, width) = idle[top]
        assert x == CLOSE(frame.left, abs=0.02)
        assert x + width == CLOSE(frame.right, abs=0.02)
    assert tops == sorted(set(tops))
    # All of the boxes are above what is hatched.
    drawn = [group.get("fill") for group in root.iter(f"{SVG}g")]
    for i, fill in enumerate(drawn):
        if fill == palette.IDLE and i + 1 < len(drawn):
            assert drawn[i + 1] not in (None, "none", palette.IDLE)


@pytest.mark.parametrize(("microbatches", "width"), [(8, None), (120, 500)])
def test_numbers_fit_in_their_boxes_and_texts_on_the_page(microbatches, width):
    timeline = predicted("zb_v", 2, microbatches)
    root = parsed(timeline, width=width)
    written = numbers_in(root)
    # All where there is room, and else none.
    names = {name for _, name, _ in written}
    assert names == (set() if width else set(map(str, timeline.start)))
    for text, name, box in written:
        assert name.endswith(text["text"])
        assert text["left"] >= box["x"]
        assert text["right"] <= box["x"] + box["width"] + 0.02
    wide, high = (float(root.get(side, 0)) for side in ("width", "height"))
    for text in texts(root):
        assert 0 <= text["left"] <= text["right"] <= wide, text
        assert text["y"] < high, text


def test_memory_curves_have_one_scale_and_follow_the_events():
    small, large = predicted("1f1b"), predicted("gpipe")
    root = parsed([small, large])
    curves = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for group in root.iter(f"{SVG}g")
        if group.get("stroke") == palette.MEMORY_LINE
        for line in group.findall(f"{SVG}polyline")
    ]
    bottoms = [max(y for _, y in curve) for curve in curves]
    tops = [min(y for _, y in curve) for curve in curves]
    heights = [low - high for low, high in zip(bottoms, tops, strict=True)]
    peaks = [*small.peak_bytes, *large.peak_bytes]
    assert heights == CLOSE(
        [peak * max(heights) / max(peaks) for peak in peaks], abs=0.1
    )
    # Of one curve, each step: the time and the bytes of an event.
    frame, per_byte = fit_frame((small, large), None), max(heights) / max(peaks)
    for event in small.memory:
        if event.rank == 0:
            corner = frame.x(event.time), bottoms[0] - event.bytes * per_byte
            assert any(corner == CLOSE(point, abs=0.03) for point in curves[0])
    said = [t["text"] for t in texts(root) if t["text"].startswith("peak")]
    assert said[:4] == ["peak 4", "peak 3", "peak 2", "peak 1"]


def test_transfers_that_keep_a_rank_from_computing_are_boxes_of_their_own():
    # There a transfer takes 8 / 4 = 2, 1 of each rank; back 4 / 4 = 1, half of it each.
    costs = Costs(boundary_bytes=8, cotangent_bytes=4, bandwidth=4, overlap=False)
    timeline = gpipe(2, 1).simulate(costs)
    root = parsed(timeline)
    frame = fit_frame((timeline,), None)
    spans = {}
    for title, box in boxes(root, r"\d[FB]0"):
        per_unit = (frame.right - frame.left) / timeline.makespan
        start = (box["x"] - frame.left) / per_unit
        end = start + box["width"] / per_unit
        spans[title.split(":")[0]] = [CLOSE(start, abs=0.01), CLOSE(end, abs=0.01)]
    assert spans == {
        **{"0F0": [0, 1], "0F0 sends": [1, 2], "1F0 receives": [2, 3], "1F0": [3, 4]},
        **{"1B0": [4, 6], "1B0 sends": [6, 6.5], "0B0 receives": [6.5, 7]},
        "0B0": [7, 9],
    }
    meaning = "transfer, without computing"
    assert meaning in [text["text"] for text in texts(root)]

    overlapping = parsed(gpipe(2, 1).simulate(Costs(latency=2)))
    assert len(boxes(overlapping, r"\d[FB]0")) == 4
    assert meaning not in [text["text"] for text in texts(overlapping)]

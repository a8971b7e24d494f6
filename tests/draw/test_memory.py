"""Curves of memory, and bytes as people read them."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from jpipe import draw
from jpipe.draw import _palette as palette
from jpipe.draw._frame import frame_of, number, peak_label

from .pictures import CLOSE, SVG, actions, boxes, parsed, predicted, texts


def curves(root: ET.Element) -> list[list[tuple[float, float]]]:
    """The memory curves, from top to bottom; the last is that of the legend."""
    lines = [
        line.get("points", "").split()
        for group in root.iter(f"{SVG}g")
        if group.get("stroke") == palette.MEMORY_LINE
        for line in group.findall(f"{SVG}polyline")
    ]
    return [
        [(float(x), float(y)) for x, y in (p.split(",") for p in line)]
        for line in lines
    ]


def test_memory_curves_have_one_scale_and_follow_the_events():
    small, large = predicted("1f1b"), predicted("gpipe")
    root = parsed([small, large])
    *found, _ = curves(root)
    assert len(found) == 8
    bottoms = [max(y for _, y in curve) for curve in found]
    heights = [
        bottom - min(y for _, y in curve)
        for bottom, curve in zip(bottoms, found, strict=True)
    ]
    peaks = [*small.peak_bytes, *large.peak_bytes]
    for height, peak in zip(heights, peaks, strict=True):
        assert height / max(heights) == CLOSE(peak / max(peaks), abs=0.005)
    # Of one curve, each step: the time and the bytes of an event.
    frame = frame_of((small, large), None)
    per_byte = max(heights) / max(peaks)
    corners = [
        (frame.x(event.time), bottoms[0] - event.bytes * per_byte)
        for event in small.memory
        if event.rank == 0
    ]
    for corner in corners:
        assert any(corner == CLOSE(point, abs=0.03) for point in found[0])
    for (x0, y0), (x1, y1) in zip(found[0], found[0][1:], strict=False):
        assert x0 == x1 or y0 == y1


def test_peaks_are_labelled_and_marked():
    timeline = predicted("1f1b")
    root = parsed(timeline)
    said = [t["text"] for t in texts(root) if t["text"].startswith("peak")]
    assert said == ["peak 4", "peak 3", "peak 2", "peak 1"]
    titles = [title for title, _ in boxes(root, "peak ")]
    assert titles[0] == "peak 4, first at 4"


def test_without_memory_there_is_no_curve_and_the_picture_is_lower():
    timeline = predicted("1f1b")
    bare = dataclasses.replace(timeline, memory=())
    nothing = tuple(event._replace(bytes=0.0) for event in timeline.memory)
    assert draw.svg(dataclasses.replace(timeline, memory=nothing)) == draw.svg(bare)
    root = parsed(bare)
    assert curves(root) == []
    assert not any(t["text"].startswith(("peak", "memory")) for t in texts(root))
    assert float(root.get("height", 0)) < float(parsed(timeline).get("height", 0))
    assert len(actions(root)) == len(timeline.start)


@pytest.mark.parametrize(
    ("value", "says"),
    [(4.5, "peak 4.5"), (1536, "peak 1.5 KiB"), (3 * 2**30, "peak 3 GiB")],
)
def test_bytes_as_people_read_them(value, says):
    assert peak_label(value, in_bytes=False) == says
    assert peak_label(value, in_bytes=True) == says + " B" * (value < 1024)
    assert number(12345.6) == "12346"

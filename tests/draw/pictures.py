"""Timelines to draw, and what is read off a picture.

`measure_text` is imported because a picture does not say how wide its fonts are.
"""

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from jpipe import draw
from jpipe.draw._elements import measure_text
from jpipe.schedules import BY_NAME, Costs, MemoryEvent, Timeline

SVG = "{http://www.w3.org/2000/svg}"
# A hundredth of a pixel is what the file is rounded to.
CLOSE = pytest.approx
NAMES = ["1f1b", "dualpipe_v"]


def predicted(name: str, ranks: int = 4, microbatches: int = 8) -> Timeline:
    schedule = BY_NAME[name](ranks, microbatches)
    return schedule.simulate(Costs().per_chunk(schedule.num_stages // ranks))


def measured(timeline: Timeline, factor: float = 0.003, later: float = 77.0):
    """The same, slower and on another clock: in seconds, from some moment on."""

    def moved(times):
        return {action: later + factor * time for action, time in times.items()}

    events = (
        MemoryEvent(later + factor * t, r, 2**20 * b) for t, r, b in timeline.memory
    )
    return dataclasses.replace(
        timeline,
        start=moved(timeline.start),
        end=moved(timeline.end),
        memory=tuple(events),
        costs=None,
    )


def parsed(timelines, **options) -> ET.Element:
    return ET.fromstring(draw.svg(timelines, **options))


def boxes(root: ET.Element, pattern: str) -> list[tuple[str, dict[str, float]]]:
    """The titled rectangles whose title matches, with their geometry."""
    rects = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title") or ""
        if re.match(pattern, title):
            where = {
                k: float(rect.get(k, "nan")) for k in ("x", "y", "width", "height")
            }
            rects.append((title, where))
    return rects


def actions(root: ET.Element) -> dict[str, dict[str, float]]:
    """The box of each action; each has exactly one."""
    named = [(t.split(":")[0], box) for t, box in boxes(root, r"\d+[FBIW]\d+: ")]
    assert max(Counter(name for name, _ in named).values()) == 1
    return dict(named)


def texts(root: ET.Element) -> list[dict]:
    lines = []
    for group in root.iter(f"{SVG}g"):
        for text in group.findall(f"{SVG}text"):
            where = {key: float(text.get(key, "nan")) for key in ("x", "y")}
            size = float(group.get("font-size", "nan"))
            says = text.text or ""
            anchor, width = group.get("text-anchor"), measure_text(says, size)
            left = {"start": 0.0, "middle": width / 2, "end": width}[anchor or ""]
            lines.append(
                {**where, "text": says, "size": size, "left": where["x"] - left,
                 "right": where["x"] - left + width}
            )  # fmt: skip
    return lines

"""Texts around the boxes: titles, legends, axes."""

import dataclasses

import pytest

from jpipe.schedules import Costs

from .pictures import CLOSE, boxes, measured, parsed, predicted, texts


def test_title_says_makespan_and_bubble_and_is_cut_where_it_is_too_long():
    timeline = predicted("1f1b")
    said = [text["text"] for text in texts(parsed(timeline))]
    assert "1f1b" in said
    assert "makespan 33, bubble 27.3 %" in said
    long = parsed(timeline, titles=["<b> & $x^2$ that goes on " * 20])
    (title,) = [t for t in texts(long) if t["text"].startswith("<b> & $x^2$")]
    assert title["text"].endswith("\N{HORIZONTAL ELLIPSIS}")
    (summary,) = [t for t in texts(long) if t["text"].startswith("makespan")]
    assert title["right"] < summary["left"]


def test_legend_names_the_ops_that_occur_and_no_others():
    def legend(name):
        return {t["text"] for t in texts(parsed(predicted(name)))}

    ops = {"F forward", "B backward", "I input gradient", "W weight gradient"}
    assert legend("1f1b") & ops == {"F forward", "B backward"}
    assert legend("dualpipe_v") >= ops


def test_predicted_stands_above_measured_on_one_axis():
    first = predicted("zb_v")
    # In seconds, as it was measured, but one and a half times as slow.
    second = measured(first, factor=0.015)
    guess = dataclasses.replace(measured(first, factor=0.01, later=0), costs=Costs())
    root = parsed([guess, second], titles=["predicted", "measured"])
    both = boxes(root, r"\d+[FBIW]\d+: ")
    upper, lower = both[: len(first.start)], both[len(first.start) :]
    assert max(b["y"] for _, b in upper) < min(b["y"] for _, b in lower)
    above = {title.split(":")[0]: box for title, box in upper}
    left = min(b["x"] for _, b in upper)
    for title, box in lower:
        match = above[title.split(":")[0]]
        assert box["width"] == CLOSE(1.5 * match["width"], abs=0.03)
        assert box["x"] - left == CLOSE(1.5 * (match["x"] - left), abs=0.03)
    said = [text["text"] for text in texts(root)]
    assert said.count("time") == 1
    assert "100 ms" in said
    assert said.index("predicted") < said.index("measured")


@pytest.mark.parametrize(("factor", "unit"), [(1.0, "s"), (1e-6, "µs")])
def test_measured_times_have_a_unit_and_predicted_ones_have_none(factor, unit):
    timeline = predicted("gpipe")
    said = [t["text"] for t in texts(parsed(measured(timeline, factor)))]
    assert {f"5 {unit}", f"makespan 33 {unit}, bubble 27.3 %"} <= {*said}
    assert "5" in [t["text"] for t in texts(parsed(timeline))]

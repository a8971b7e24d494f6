"""Pictures show what the timeline says: each box, gap and number is measured."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from jpipe.draw._frame import frame_of
from jpipe.draw._shapes import text_width

from .pictures import CLOSE, NAMES, SVG, actions, boxes, parsed, predicted, texts


def numbers_in(root: ET.Element) -> list[tuple[dict, dict[str, float]]]:
    """The numbers that are written inside boxes, with their box."""
    placed = []
    found = actions(root)
    for text in texts(root):
        for box in found.values():
            inside_x = box["x"] < text["x"] < box["x"] + box["width"]
            inside_y = box["y"] < text["y"] < box["y"] + box["height"]
            if inside_x and inside_y and text["text"].isdigit():
                placed.append((text, box))
    return placed


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_one_box_where_and_as_long_as_it_runs(name):
    timeline = predicted(name)
    found = actions(parsed(timeline))
    assert set(found) == set(map(str, timeline.start))
    frame = frame_of((timeline,), None)
    per_unit = (frame.right - frame.left) / timeline.makespan
    for action, start in timeline.start.items():
        box = found[str(action)]
        assert box["x"] == CLOSE(frame.left + start * per_unit, abs=0.02)
        width = (timeline.end[action] - start) * per_unit
        assert box["width"] == CLOSE(width, abs=0.02)


def test_boxes_of_a_rank_are_in_one_row_and_ranks_in_order():
    timeline = predicted("interleaved")
    found = actions(parsed(timeline))
    tops = [{found[str(action)]["y"] for action in row} for row in timeline.rows]
    assert [len(top) for top in tops] == [1] * 4
    heights = [top.pop() for top in tops]
    assert heights == sorted(set(heights))


@pytest.mark.parametrize("name", NAMES)
def test_hatched_area_is_the_idle_time_and_meets_no_box(name):
    timeline = predicted(name)
    root = parsed(timeline)
    idle, busy = [box for _, box in boxes(root, "idle: ")], actions(root)
    frame = frame_of((timeline,), None)
    per_unit = (frame.right - frame.left) / timeline.makespan
    for rank, row in enumerate(timeline.rows):
        here = [busy[str(action)] for action in row]
        waits = [box for box in idle if box["y"] == here[0]["y"]]
        total = sum(box["width"] for box in waits)
        assert total == CLOSE(timeline.idle[rank] * per_unit, abs=0.2)
        # One after the other, they fill the row from the first start to the last end.
        ordered = sorted((b["x"], b["x"] + b["width"]) for b in here + waits)
        assert ordered[0][0] == CLOSE(frame.left, abs=0.02)
        assert ordered[-1][1] == CLOSE(frame.right, abs=0.02)
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert start == CLOSE(end, abs=0.03)


def test_hatched_boxes_are_hatched_and_the_others_not():
    root = parsed(predicted("gpipe"))
    for group in root.iter(f"{SVG}g"):
        titles = [t.text or "" for t in group.iter(f"{SVG}title")]
        hatched = group.get("fill") == "url(#jpipe-idle)"
        assert all(title.startswith("idle") == hatched for title in titles)
    assert root.find(f"{SVG}defs/{SVG}pattern[@id='jpipe-idle']") is not None


def test_tooltips_say_when():
    root = parsed(predicted("1f1b", 3, 2))
    titles = [title for title, _ in boxes(root, "2[FB]0")]
    assert sorted(titles) == ["2B0: 3 to 5", "2F0: 2 to 3"]


def test_the_page_is_white_and_nothing_is_written_over_its_edges():
    for timelines in (predicted("zb_v", 8, 32), predicted("dualpipe_v")):
        root = parsed(timelines)
        page = root.find(f"{SVG}rect")
        assert page is not None
        assert page.get("fill") == "#fff"
        assert (page.get("width"), page.get("height")) == (
            root.get("width"),
            root.get("height"),
        )
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for text in texts(root):
            assert text["left"] >= 0, text
            assert text["right"] <= width, text
            assert text["y"] < height, text


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 32), (2, 120)])
@pytest.mark.parametrize("width", [None, 500, 900])
def test_numbers_fit_in_their_boxes(ranks, microbatches, width):
    for name in ("1f1b", "zb_v"):
        timeline = predicted(name, ranks, microbatches)
        for text, box in numbers_in(parsed(timeline, width=width)):
            assert text["left"] >= box["x"]
            assert text["right"] <= box["x"] + box["width"] + 0.02


def test_numbers_are_the_microbatches_and_all_are_there_where_there_is_room():
    timeline = predicted("zb_h1")
    root = parsed(timeline)
    names = {(box["x"], box["y"]): name for name, box in actions(root).items()}
    written = {
        names[box["x"], box["y"]]: text["text"] for text, box in numbers_in(root)
    }
    assert written == {str(a): str(a.microbatch) for a in timeline.start}


def test_numbers_are_left_out_where_boxes_are_narrow_not_only_the_long_ones():
    root = parsed(predicted("zb_v", 8, 32), width=600)
    assert numbers_in(root) == []
    assert len(actions(root)) == 8 * 2 * 32 * 3


def test_the_measure_of_texts_is_no_less_than_that_of_a_wide_font():
    pytest.importorskip("matplotlib")
    from matplotlib.textpath import TextPath

    for text in (
        *map(str, range(128)),
        "rank 12",
        "peak 31.5 MiB",
        "W weight gradient",
        "dark to light: stages of a rank",
        "makespan 119.5 ms, bubble 11.3 %",
        "number: micro-batch",
    ):
        widest = TextPath((0, 0), text, size=11).get_extents().width
        assert widest <= text_width(text, 11) <= 1.25 * widest + 3

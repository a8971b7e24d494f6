"""Pictures show what the timeline says: each box, gap, curve and arrow is measured."""

import dataclasses
import itertools
import json
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from jpipe import draw
from jpipe.draw import _palette as palette
from jpipe.draw._frame import frame_of, number, peak_label
from jpipe.draw._shapes import shortened, text_width
from jpipe.schedules import BY_NAME, Costs, MemoryEvent, Timeline

SVG = "{http://www.w3.org/2000/svg}"
# A hundredth of a pixel is what the file is rounded to.
CLOSE = pytest.approx
NAMES = list(BY_NAME)


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


ROOT = Path(__file__).parent.parent


# ------------------------------------------------------------------ reading a picture


def parsed(timelines, **options) -> ET.Element:
    return ET.fromstring(draw.svg(timelines, **options))


def boxes(root: ET.Element, pattern: str) -> list[tuple[str, dict[str, float]]]:
    """The titled rectangles whose title matches, with their geometry."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title") or ""
        if re.match(pattern, title):
            where = {
                k: float(rect.get(k, "nan")) for k in ("x", "y", "width", "height")
            }
            found.append((title, where))
    return found


def actions(root: ET.Element) -> dict[str, dict[str, float]]:
    """The box of each action; each has exactly one."""
    found = [(t.split(":")[0], box) for t, box in boxes(root, r"\d+[FBIW]\d+: ")]
    assert max(Counter(name for name, _ in found).values()) == 1
    return dict(found)


def texts(root: ET.Element) -> list[dict]:
    found = []
    for group in root.iter(f"{SVG}g"):
        for text in group.findall(f"{SVG}text"):
            where = {key: float(text.get(key, "nan")) for key in ("x", "y")}
            size = float(group.get("font-size", "nan"))
            says = text.text or ""
            anchor, width = group.get("text-anchor"), text_width(says, size)
            left = {"start": 0.0, "middle": width / 2, "end": width}[anchor or ""]
            found.append(
                {**where, "text": says, "size": size, "left": where["x"] - left,
                 "right": where["x"] - left + width}
            )  # fmt: skip
    return found


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


# ----------------------------------------------------------------- boxes and gaps


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


# ----------------------------------------------------------------- what is written


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


def test_title_says_makespan_and_bubble_and_is_cut_where_it_is_too_long():
    timeline = predicted("1f1b")
    found = [text["text"] for text in texts(parsed(timeline))]
    assert "1f1b" in found
    assert "makespan 33, bubble 27.3 %" in found
    long = parsed(timeline, titles=["a name that goes on " * 20])
    (title,) = [t for t in texts(long) if t["text"].startswith("a name")]
    assert title["text"].endswith("\N{HORIZONTAL ELLIPSIS}")
    (summary,) = [t for t in texts(long) if t["text"].startswith("makespan")]
    assert title["right"] < summary["left"]
    assert shortened("short", 10, 100) == "short"


def test_titles_are_text_whatever_they_contain():
    nasty = "<b> & \"quotes\" 'and' $x^2$"
    root = parsed(predicted("gpipe", 2, 2), titles=[nasty], width=900)
    assert nasty in [text["text"] for text in texts(root)]
    assert nasty in root.get("aria-label", "")


def test_legend_names_the_ops_that_occur_and_no_others():
    def legend(name):
        return {t["text"] for t in texts(parsed(predicted(name)))}

    whole = {"F forward", "B backward"}
    halves = {"I input gradient", "W weight gradient"}
    assert legend("1f1b") & (whole | halves) == whole
    assert legend("zb_h1") & (whole | halves) == {"F forward"} | halves
    assert legend("dualpipe_v") >= whole | halves
    shades = "dark to light: stages of a rank"
    assert (shades in legend("1f1b"), shades in legend("zb_v")) == (False, True)


# ------------------------------------------------------------------------ the axis


def test_ticks_are_round_and_stand_where_the_times_are():
    timeline = predicted("gpipe")
    frame = frame_of((timeline,), None)
    root = parsed(timeline)
    (axis,) = [t for t in texts(root) if t["text"] == "time"]
    ticks = [t for t in texts(root) if t["y"] == axis["y"] and t["text"] != "time"]
    assert [t["text"] for t in ticks[:3]] == ["0", "5", "10"]
    zero, five = actions(root)["0F0"]["x"], actions(root)["0F5"]["x"]
    by_text = {t["text"]: t["x"] for t in texts(root) if t["y"] == axis["y"]}
    assert by_text["0"] == CLOSE(zero, abs=0.02)
    assert by_text["5"] == CLOSE(five, abs=0.02)
    for before, after in itertools.pairwise(ticks):
        assert before["right"] < after["left"]
    assert frame.ticks()[-1] <= timeline.makespan


def test_predicted_stands_above_measured_on_one_axis():
    first = predicted("zb_v")
    # In seconds, as it was measured, but one and a half times as slow.
    second = measured(first, factor=0.015)
    guess = dataclasses.replace(measured(first, factor=0.01, later=0), costs=Costs())
    root = parsed([guess, second], titles=["predicted", "measured"])
    found = boxes(root, r"\d+[FBIW]\d+: ")
    upper, lower = found[: len(first.start)], found[len(first.start) :]
    assert max(b["y"] for _, b in upper) < min(b["y"] for _, b in lower)
    above = {title.split(":")[0]: box for title, box in upper}
    for title, box in lower:
        match = above[title.split(":")[0]]
        assert box["width"] == CLOSE(1.5 * match["width"], abs=0.03)
    start = min(b["x"] for _, b in upper)
    assert start == min(b["x"] for _, b in lower)
    for title, box in lower:
        offset = above[title.split(":")[0]]["x"] - start
        assert box["x"] - start == CLOSE(1.5 * offset, abs=0.03)
    said = [text["text"] for text in texts(root)]
    assert said.count("time, ms") == 1
    assert said.index("predicted") < said.index("measured")


@pytest.mark.parametrize(
    ("factor", "unit"), [(1.0, "time, s"), (1e-3, "time, ms"), (1e-6, "time, µs")]
)
def test_measured_times_have_a_unit_and_predicted_ones_have_none(factor, unit):
    timeline = predicted("gpipe")
    said = [t["text"] for t in texts(parsed(measured(timeline, factor)))]
    assert unit in said
    assert f"makespan 33 {unit.split()[1]}, bubble 27.3 %" in said
    assert "time" in [t["text"] for t in texts(parsed(timeline))]


# ------------------------------------------------------------------------- memory


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
    assert peak_label(value) == says
    assert number(12345.6) == "12346"


# ------------------------------------------------------------------------ colours


def seen_by(fill: str, vision: str) -> tuple[float, ...]:
    """A colour as people see it who lack a kind of cones (Machado et al., 2009)."""
    matrix = {
        "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "protanopia": (
            (0.152286, 1.052583, -0.204868),
            (0.114503, 0.786281, 0.099216),
            (-0.003882, -0.048116, 1.051998),
        ),
        "deuteranopia": (
            (0.367322, 0.860646, -0.227968),
            (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881),
        ),
    }[vision]
    linear = [(value / 255) ** 2.2 for value in bytes.fromhex(fill[1:])]
    mixed = [sum(m * v for m, v in zip(row, linear, strict=True)) for row in matrix]
    return tuple(min(max(value, 0.0), 1.0) ** (1 / 2.2) for value in mixed)


@pytest.mark.parametrize("vision", ["all cones", "protanopia", "deuteranopia"])
def test_ops_and_shades_differ_for_every_colour_vision(vision):
    shades = [palette.shade(op, chunk, 2) for op in palette.OPS for chunk in (0, 1)]
    assert len(set(shades)) == 8
    seen = [seen_by(fill, vision) for fill in shades]
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.08


def test_numbers_can_be_read_on_every_shade():
    for op in palette.OPS:
        for chunk in range(4):
            fill = palette.shade(op, chunk, 4)
            light, dark = sorted(
                (palette._luminance(fill), palette._luminance(palette.ink_on(fill))),
                reverse=True,
            )
            assert (light + 0.05) / (dark + 0.05) >= 4, fill


def test_later_stages_of_a_rank_are_lighter():
    timeline = predicted("zb_v")
    chunk_of = palette.chunks(timeline)
    assert [chunk_of[stage] for stage in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    fills = {
        (title.text or "").partition(":")[0]: group.get("fill")
        for group in parsed(timeline).iter(f"{SVG}g")
        for title in group.iter(f"{SVG}title")
    }
    assert fills["0F0"] == fills["3F5"] == palette.OPS["F"]
    assert fills["7F0"] == fills["4F5"] == palette.shade("F", 1, 2)
    light = [palette._luminance(palette.shade("F", chunk, 3)) for chunk in range(3)]
    assert light == sorted(set(light))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("render", [draw.svg, draw.trace])
def test_no_timelines_and_a_wrong_number_of_titles(render):
    with pytest.raises(ValueError, match=r"no timelines: give one or more"):
        render([])
    with pytest.raises(ValueError, match=r"titles=\['a', 'b'\] for 1 timelines"):
        render(predicted("gpipe"), titles=["a", "b"])


def test_a_picture_that_would_be_too_narrow():
    with pytest.raises(ValueError, match="width=100: must be at least 400"):
        draw.svg(predicted("gpipe"), width=100)


def test_timelines_without_time_or_actions_are_drawn():
    free = BY_NAME["gpipe"](2, 2).simulate(Costs(forward=0, backward=0))
    assert all(box["width"] == 0 for box in actions(parsed(free)).values())
    nothing = Timeline("nothing", (0,), ((),), {}, {})
    assert boxes(parsed(nothing), r"\d+[FBIW]") == []
    json.loads(draw.trace([free, nothing]))


# ----------------------------------------------------------------------- PNG, PDF


def test_png_and_pdf_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    timeline = predicted("zb_v", 2, 3)
    for name, magic in (("a.png", b"\x89PNG\r\n\x1a\n"), ("a.pdf", b"%PDF-")):
        draw.png([timeline, measured(timeline)], tmp_path / name, titles=["a", "$b"])
        data = (tmp_path / name).read_bytes()
        assert data.startswith(magic)
        assert len(data) > 5000
    size = (tmp_path / "a.png").read_bytes()[16:24]
    width, height = (int.from_bytes(size[i : i + 4], "big") for i in (0, 4))
    root = parsed([timeline, measured(timeline)])
    assert width == CLOSE(2 * float(root.get("width", 0)), abs=2)
    assert height == CLOSE(2 * float(root.get("height", 0)), abs=2)


def test_png_shows_the_boxes_where_svg_has_them(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    timeline = predicted("dualpipe_v")
    draw.png(timeline, tmp_path / "a.png")
    pixels = imread(tmp_path / "a.png")
    chunk_of = palette.chunks(timeline)
    found = actions(parsed(timeline))
    for action in timeline.start:
        box = found[str(action)]
        # Near the top, above the number.
        x, y = box["x"] + box["width"] / 2, box["y"] + 4
        shown = [round(255 * part) for part in pixels[round(2 * y), round(2 * x)][:3]]
        fill = palette.shade(action.op, chunk_of[action.stage], 2)
        assert bytes(shown).hex() == fill[1:], action


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png or \.pdf"):
        draw.png(predicted("gpipe"), tmp_path / "a.gif")


def test_without_matplotlib_the_error_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'jpipe[plot]'")):
        draw.png(predicted("gpipe"), tmp_path / "a.png")
    assert draw.svg(predicted("gpipe")).startswith("<svg")


def test_no_file_imports_more_than_the_standard_library_when_it_is_loaded():
    files = list(Path(draw.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for path in files:
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.M):
            assert name in sys.stdlib_module_names, path.name


# -------------------------------------------------------------------------- trace


def events(timelines, phase: str, **options) -> list[dict]:
    found = json.loads(draw.trace(timelines, **options))["traceEvents"]
    return [event for event in found if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_trace_has_a_slice_for_each_action(name):
    timeline = predicted(name)
    found = {event["name"]: event for event in events(timeline, "X", unit=1000)}
    assert set(found) == set(map(str, timeline.start))
    for rank, row in enumerate(timeline.rows):
        for action in row:
            event = found[str(action)]
            assert event["ts"] == CLOSE(1000 * timeline.start[action], abs=1e-3)
            taken = timeline.end[action] - timeline.start[action]
            assert event["dur"] == CLOSE(1000 * taken, abs=2e-3)
            assert (event["pid"], event["tid"]) == (0, rank)
            where = {"stage": action.stage, "micro-batch": action.microbatch}
            assert event["args"] == where
    assert len(events(timeline, "X")) == len(timeline.start)


def test_slices_of_a_thread_do_not_overlap():
    timeline = measured(predicted("interleaved"), factor=1e-6 / 3)
    for rank in range(4):
        row = [e for e in events(timeline, "X") if e["tid"] == rank]
        for before, after in itertools.pairwise(row):
            end = round(1000 * before["ts"]) + round(1000 * before["dur"])
            assert end <= round(1000 * after["ts"])


@pytest.mark.parametrize("name", NAMES)
def test_trace_has_an_arrow_for_each_transfer_from_slice_to_slice(name):
    timeline = predicted(name)
    needs, placement = timeline.needs(), timeline.placement
    expected = Counter(
        (str(need), str(action))
        for action in timeline.start
        for need in needs(action)
        if placement[need.stage] != placement[action.stage]
    )
    slices = events(timeline, "X")

    def around(event) -> str:
        (name,) = [
            s["name"]
            for s in slices
            if s["tid"] == event["tid"] and s["ts"] < event["ts"] < s["ts"] + s["dur"]
        ]
        return name

    begins = {event["id"]: event for event in events(timeline, "s")}
    ends = {event["id"]: event for event in events(timeline, "f")}
    assert begins.keys() == ends.keys()
    found = Counter((around(begins[i]), around(ends[i])) for i in begins)
    assert found == expected
    assert all(event["bp"] == "e" for event in ends.values())


def test_arrows_stay_in_their_process():
    timelines = [predicted("1f1b"), measured(predicted("1f1b"))]
    begins, ends = events(timelines, "s"), events(timelines, "f")
    assert len({event["id"] for event in begins}) == len(begins) == 2 * 48
    pid_of = {event["id"]: event["pid"] for event in begins}
    assert all(event["pid"] == pid_of[event["id"]] for event in ends)


def test_trace_names_processes_and_threads_and_counts_memory():
    timeline = predicted("1f1b")
    pair = [timeline, measured(timeline)]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events(pair, "M", titles=["predicted", "measured"])
    }
    assert names["process_name", 0, 0] == "predicted"
    assert names["process_name", 1, 0] == "measured"
    assert names["thread_name", 1, 3] == "rank 3"
    counters = events(pair, "C")
    assert len(counters) == 2 * len(timeline.memory)
    first = [e["args"]["bytes"] for e in counters if e["pid"] == 0]
    assert first == [event.bytes for event in timeline.memory]
    assert {e["name"] for e in counters} == {f"memory of rank {r}" for r in range(4)}


def test_measured_seconds_become_microseconds_from_zero():
    timeline = measured(predicted("1f1b"), factor=0.5, later=1000.0)
    found = {event["name"]: event for event in events(timeline, "X")}
    assert found["0F0"]["ts"] == 0
    assert found["0F1"]["ts"] == CLOSE(500_000)
    assert found["0B0"]["dur"] == CLOSE(1_000_000)
    assert min(event["ts"] for event in events(timeline, "C")) == 0


# ------------------------------------------------------------------- the example


def test_the_example_prints_two_tables_and_draws_every_schedule(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["schedules.py", "--out", str(tmp_path / "new")])
    runpy.run_path(str(ROOT / "examples" / "schedules.py"), run_name="__main__")
    out = capsys.readouterr().out
    for name in BY_NAME:
        assert out.count(f"| {name} ") == (0 if name == "forward_only" else 2)
    drawn = {path.stem: path for path in (tmp_path / "new").glob("*.svg")}
    assert set(drawn) == {*BY_NAME, "zb_v_8x32"}
    for name, path in drawn.items():
        schedule = BY_NAME["zb_v"](8, 32) if "x" in name else BY_NAME[name](4, 8)
        assert len(actions(ET.parse(path).getroot())) == sum(map(len, schedule.rows))

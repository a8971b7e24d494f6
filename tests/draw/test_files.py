"""Pictures as files, and pictures that cannot be drawn."""

import json
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from jpipe import draw
from jpipe.draw import _palette as palette
from jpipe.schedules import BY_NAME, Costs, Timeline, replicated

from .pictures import CLOSE, actions, boxes, measured, parsed, predicted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("render", [draw.svg, draw.trace])
def test_no_timelines_and_a_wrong_number_of_titles(render):
    with pytest.raises(ValueError, match=r"no timelines: give one or more"):
        render([])
    with pytest.raises(ValueError, match=r"titles=\['a', 'b'\] for 1 timelines"):
        render(predicted("gpipe"), titles=["a", "b"])


@pytest.mark.parametrize("name", ["gpipe", "zb_v"])
@pytest.mark.parametrize("draws", [draw.svg, draw.trace])
def test_a_schedule_is_drawn_with_the_default_costs_as_by_the_command(draws, name):
    schedule, timeline = BY_NAME[name](2, 4), predicted(name, 2, 4)
    assert draws(schedule) == draws(timeline)
    assert draws([timeline, schedule]) == draws([timeline, timeline])


def test_a_schedule_of_several_ranks_per_stage_is_drawn_too(tmp_path):
    schedule = replicated([2, 1], 4)
    found = actions(ET.fromstring(draw.svg(schedule)))
    assert found["0B0"]["width"] == CLOSE(2 * found["1F0"]["width"], abs=0.03)
    draw.png(schedule, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_would_be_too_narrow():
    with pytest.raises(ValueError, match="width=100: must be at least 400"):
        draw.svg(predicted("gpipe"), width=100)


def test_timelines_without_time_or_actions_are_drawn():
    free = BY_NAME["gpipe"](2, 2).simulate(Costs(forward=0, backward=0))
    assert all(box["width"] == 0 for box in actions(parsed(free)).values())
    nothing = Timeline("nothing", (0,), ((),), {}, {})
    assert boxes(parsed(nothing), r"\d+[FBIW]") == []
    json.loads(draw.trace([free, nothing]))


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


def test_the_example_prints_two_tables_and_draws_every_schedule(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["schedules.py", "--out", str(tmp_path / "new")])
    runpy.run_path(str(ROOT / "examples" / "schedules.py"), run_name="__main__")
    out = capsys.readouterr().out
    for name in BY_NAME:
        assert out.count(f"| {name} ") == (0 if name == "forward_only" else 2)
    drawn = {path.stem: path for path in (tmp_path / "new").glob("*.svg")}
    assert set(drawn) == {*BY_NAME, "zb_v_8x32", "replicas_3221"}
    for name, path in drawn.items():
        others = {
            "zb_v_8x32": lambda: BY_NAME["zb_v"](8, 32),
            "replicas_3221": lambda: replicated([3, 2, 2, 1], 12),
        }
        schedule = others[name]() if name in others else BY_NAME[name](4, 8)
        assert len(actions(ET.parse(path).getroot())) == sum(map(len, schedule.rows))

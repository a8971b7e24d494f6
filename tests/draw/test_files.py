"""Pictures as files, and pictures that cannot be drawn."""

import re
import sys

import pytest

from jpipe import draw

from .pictures import CLOSE, measured, parsed, predicted


@pytest.mark.parametrize("render", [draw.svg, draw.trace])
def test_no_timelines_and_a_wrong_number_of_titles(render):
    with pytest.raises(ValueError, match=r"no timelines: give one or more"):
        render([])
    with pytest.raises(ValueError, match=r"titles=\['a', 'b'\] for 1 timelines"):
        render(predicted("gpipe"), titles=["a", "b"])
    with pytest.raises(ValueError, match="width=100: must be at least 400"):
        draw.svg(predicted("gpipe"), width=100)


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


def test_without_matplotlib_the_error_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'jpipe[plot]'")):
        draw.png(predicted("gpipe"), tmp_path / "a.png")
    assert draw.svg(predicted("gpipe")).startswith("<svg")

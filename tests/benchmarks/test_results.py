"""Results: as they are kept, and as the page shows them."""

import re
from dataclasses import replace

import pytest

from benchmarks.published import BY_NAME
from benchmarks.result import FOLDER, MEASURED, PREDICTED, Cell, Result
from benchmarks.tables.page import PAGE, written
from benchmarks.tables.plot import drawn, plot
from benchmarks.tables.report import table, whole


def made(rows, date="2020-01-01"):
    where = dict.fromkeys(("jpipe", "jax", "flax", "python", "devices"), "0")
    where |= {"cores": 2, "processor": "p", "date": date, "commit": None}
    return Result("unet-speed", "tiny", dict.fromkeys(rows, where), rows)


def test_an_earlier_row_stays_with_where_it_was_made(tmp_path):
    cells = {"samples/s": Cell(2.5, MEASURED, "samples/s", 0.1, {"steps": [1, 2]})}
    old = made({"baseline": cells})
    assert Result.load(old.save(tmp_path)) == old
    new = made({"pipeline-2": {}}, date="2021-01-01")
    merged = new.merged(old)
    assert set(merged.rows) == {"baseline", "pipeline-2"}
    text = table(BY_NAME["unet-speed"], merged)
    assert "baseline: made with" in text
    assert "2021-01-01" in text
    with pytest.raises(ValueError, match="two benchmarks or scales"):
        replace(new, scale="full").merged(old)


def test_speed_ups_are_of_cells_of_one_kind():
    measured, predicted = Cell(2.0, MEASURED), Cell(3.0, PREDICTED)
    rows = {
        "baseline": {"samples/s": measured, "predicted samples/s": predicted},
        "pipeline-2": {"predicted samples/s": Cell(6.0, PREDICTED)},
    }
    lines = table(BY_NAME["unet-speed"], made(rows)).splitlines()
    (line,) = (line for line in lines if line.startswith("| pipeline-2"))
    assert "| 2.000 ᵖ |" in line
    assert "3.000" not in line


def test_pages_show_what_was_saved():
    page = PAGE.read_text()
    assert page == written(page), "type python -m benchmarks page"
    for benchmark in BY_NAME.values():
        assert f"[{benchmark.name}]" in page
    for path in kept():
        result = Result.load(path)
        expected = whole(BY_NAME[result.benchmark], result, path.with_suffix(".png"))
        assert path.with_suffix(".md").read_text() == expected, path.stem


def test_the_page_stays_short_and_its_links_lead_somewhere():
    page = PAGE.read_text()
    assert len(page.splitlines()) <= 160
    for target in re.findall(r"\]\(([\w./-]+)\)", page):
        assert (PAGE.parent / target).exists(), target


def stages_on(devices, rate, balance=(1, 1)):
    """The cells of a measured row."""
    detail = {"devices": devices, "layers per stage": balance}
    return {
        "samples/s": Cell(rate, MEASURED, "samples/s"),
        "compiling": Cell(1.0, MEASURED, "s", detail=detail),
    }


def test_rows_in_which_stages_share_a_device_have_no_speed_up():
    rows = {
        "baseline": stages_on(1, 8.0, balance=(1,)),
        "pipeline-1": stages_on(1, 6.0, balance=(1,)),
        "pipeline-2": stages_on(2, 12.0),
        "pipeline-4": stages_on(2, 2.0, balance=(1, 1, 1, 1)),
    }
    benchmark = BY_NAME["unet-speed"]
    result = replace(made(rows), variant="measured")
    above, below = table(benchmark, result).split("**What partitioning costs")
    heads = [
        next(line for line in part.splitlines() if line.startswith("| experiment"))
        for part in (above, below)
    ]
    assert [" speed-up |" in head for head in heads] == [True, False]
    assert "| pipeline-2 | " in above
    assert "| 1.500 |" in above
    assert "| pipeline-4 | " not in above
    assert "| pipeline-4 | 4 on 2 | 2 | 0.250 | 1 |" in below
    (axes,) = drawn(benchmark, result).axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["baseline", "pipeline-1", "pipeline-2"]


def test_the_page_shows_nothing_of_a_dirty_checkout(tmp_path):
    where = {"commit": "0123abcde-dirty"}
    rows = {"baseline": {"samples/s": Cell(1.0, MEASURED)}}
    Result("unet-speed", "small", {"baseline": where}, rows).save(tmp_path)
    with pytest.raises(SystemExit, match=r"unet-speed-small.json: baseline was made"):
        written(PAGE.read_text(), tmp_path)


def kept():
    """The files of results of published tables."""
    return sorted(FOLDER.glob("*-*.json"))


def test_results_of_the_page_are_of_real_sizes_and_marked():
    assert kept()
    for path in kept():
        result = Result.load(path)
        assert path.stem == result.stem
        scale = result.scale
        assert scale in ("full", "small"), "tiny figures say nothing"
        for row, cells in result.rows.items():
            if scale == "full" and "cpu" in result.provenance[row]["devices"]:
                assert all(cell.kind != MEASURED for cell in cells.values()), row


@pytest.mark.parametrize(("variant", "is_drawn"), [("", False), ("-bfloat16", True)])
def test_a_result_without_bars_of_ours_has_no_picture(tmp_path, variant, is_drawn):
    """Speed-ups are of the baseline, which the float32 rows lack."""
    kept = FOLDER / f"resnet101-speed-full-measured{variant}.json"
    result, path = Result.load(kept), tmp_path / "picture.png"
    path.touch()
    plot(BY_NAME[result.benchmark], result, path)
    assert path.exists() == is_drawn

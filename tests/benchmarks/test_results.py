"""Results: as they are kept, and as the page shows them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import BY_NAME
from benchmarks.result import COMPILED, FOLDER, MEASURED, PREDICTED, Cell, Result
from benchmarks.tables.page import PAGE, written
from benchmarks.tables.plot import drawn
from benchmarks.tables.report import number, shown, table


class TestResults:
    def result(self, rows, date="2020-01-01"):
        where = {
            "jpipe": "0",
            "jax": "0",
            "flax": "0",
            "python": "3",
            "devices": "1 x",
            "cores": 2,
            "processor": "p",
            "date": date,
            "commit": None,
        }
        return Result("unet-speed", "tiny", dict.fromkeys(rows, where), rows)

    def test_they_come_back_from_json(self, tmp_path):
        cells = {"samples/s": Cell(2.5, MEASURED, "samples/s", 0.1, {"steps": [1, 2]})}
        result = self.result({"baseline": cells})
        assert Result.load(result.save(tmp_path)) == result

    def test_an_earlier_row_stays_with_where_it_was_made(self):
        old = self.result({"baseline": {"samples/s": Cell(1.0, MEASURED)}})
        new = self.result({"pipeline-2": {}}, date="2021-01-01")
        merged = new.merged(old)
        assert set(merged.rows) == {"baseline", "pipeline-2"}
        text = table(BY_NAME["unet-speed"], merged)
        assert "baseline: made with" in text
        assert "2021-01-01" in text
        with pytest.raises(ValueError, match="two benchmarks or scales"):
            replace(new, scale="full").merged(old)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="measured, compiled, predicted"):
            Cell(1.0, "guessed")

    def test_cells_are_marked(self):
        assert shown(Cell(1.5, MEASURED, spread=0.25)) == "1.50 ± 0.250"
        assert shown(Cell(1.5, COMPILED)) == "1.50 ᶜ"
        assert shown(Cell(1.5, PREDICTED)) == "1.50 ᵖ"
        assert shown(None) == "-"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (44549160, "44,549,160"),
            (95.862, "95.9"),
            (0.853, "0.853"),
            (1234.5, "1,234"),
            (0.0123, "0.0123"),
            (3.0, "3"),
        ],
    )
    def test_numbers(self, value, text):
        assert number(value) == text

    @pytest.mark.parametrize("ran", [False, True])
    def test_columns_without_a_figure_are_left_out_of_what_ran(self, ran):
        rows = {"baseline": {"predicted samples/s": Cell(3.0, PREDICTED)}}
        text = table(BY_NAME["unet-speed"], self.result(rows if ran else {}))
        assert "| torchgpipe, samples/s |" in text
        assert ("predicted by measured" in text) == (not ran)

    def test_other_scales_show_the_rows_that_ran(self):
        rows = {"baseline": {"samples/s": Cell(3.0, MEASURED)}}
        for scale, shown_rows in (("full", 5), ("small", 1)):
            result = replace(self.result(rows), scale=scale)
            lines = table(BY_NAME["unet-speed"], result).splitlines()
            assert sum(line.startswith("| ") for line in lines) == 2 + shown_rows
            (axes,) = drawn(BY_NAME["unet-speed"], result).axes
            assert len(axes.get_xticks()) == shown_rows

    def test_speed_ups_are_of_cells_of_one_kind(self):
        measured, predicted = Cell(2.0, MEASURED), Cell(3.0, PREDICTED)
        rows = {
            "baseline": {"samples/s": measured, "predicted samples/s": predicted},
            "pipeline-2": {"predicted samples/s": Cell(6.0, PREDICTED)},
        }
        line = next(
            line
            for line in table(BY_NAME["unet-speed"], self.result(rows)).splitlines()
            if line.startswith("| pipeline-2")
        )
        assert "| 2.000 ᵖ |" in line
        assert "3.000" not in line


def test_the_page_shows_what_was_saved():
    page = PAGE.read_text()
    assert page == written(page), "type python -m benchmarks page"
    for benchmark in BY_NAME.values():
        assert f"### {benchmark.title}" in page


def test_the_page_shows_nothing_of_a_dirty_checkout(tmp_path):
    where = {"commit": "0123abcde-dirty"}
    rows = {"baseline": {"samples/s": Cell(1.0, MEASURED)}}
    Result("unet-speed", "small", {"baseline": where}, rows).save(tmp_path)
    with pytest.raises(SystemExit, match=r"unet-speed-small.json: baseline was made"):
        written(PAGE.read_text(), tmp_path)


def test_what_is_measured_has_files_of_its_own(tmp_path):
    rows = {"baseline": {"samples/s": Cell(1.0, MEASURED)}}
    plain = Result("unet-speed", "small", {}, rows)
    measured = replace(plain, variant="measured-bfloat16")
    plain.keep(tmp_path)
    whole, path = measured.keep(tmp_path)
    assert path.name == "unet-speed-small-measured-bfloat16.json"
    assert (whole, Result.load(path)) == (measured, measured)
    with pytest.raises(ValueError, match="two benchmarks or scales"):
        measured.merged(plain)


def test_results_of_the_page_are_of_real_sizes_and_marked():
    for path in FOLDER.glob("*-*.json"):
        if path.stem == "peers":
            continue
        result = Result.load(path)
        assert path.stem == result.stem
        scale = result.scale
        assert scale in ("full", "small"), "tiny figures say nothing"
        for row, cells in result.rows.items():
            if scale == "full" and "cpu" in result.provenance[row]["devices"]:
                assert all(cell.kind != MEASURED for cell in cells.values()), row


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_results_tell_no_path_of_a_machine(name):
    def texts(value):
        if isinstance(value, dict):
            return [text for part in value.values() for text in texts(part)]
        if isinstance(value, list):
            return [text for part in value for text in texts(part)]
        return [value] if isinstance(value, str) else []

    found = texts(json.loads((FOLDER / f"{name}.json").read_text()))
    assert found
    assert not [text for text in found if Path(text).is_absolute()]

"""Commands about schedules: what they print, what they write, how they refuse."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from jpipe.schedules import BY_NAME

from .outcome import refused, works

# --------------------------------------------------------------------------- draw


def test_draw_prints_a_summary_and_the_grid(command):
    out = works(command("draw 1f1b --ranks 2 --microbatches 3"))
    assert out.splitlines() == [
        "1f1b: time 12 (20.0 % above the bound), bubble 25.0 %, "
        "peak bytes per rank 2, 1",
        "rank 0 |F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2|",
        "rank 1 |.  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  . |",
    ]


def test_draw_cuts_the_costs_of_a_rank_in_its_stages_and_columns_come_out_whole(
    command,
):
    summary, *grid = works(command("draw zb_v --ranks 4 --microbatches 8")).split("\n")
    assert summary.startswith("zb_v: time 25.5 (")
    assert summary.endswith("bubble 5.9 %, peak bytes per rank 4, 4, 4, 4")
    assert grid[0].startswith("rank 0 |0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1")
    # Each action has a column of its own: none is rounded away.
    assert all(line.count("F") == 16 for line in grid if line)


@pytest.mark.parametrize(
    ("options", "time"),
    [
        ("1f1b --costs 1,2", "33"),
        ("1f1b --costs 1,2,3", "66"),
        ("zb_h1 --costs 1,1.5,0.5", "30"),
        ("1f1b --latency 0.5", "41"),
        ("zb_v --latency 0.5", "32.5"),
        ("interleaved", "28.5"),
    ],
)
def test_draw_takes_costs_latency_and_chunks(command, options, time):
    name, *rest = options.split()
    out = works(command(f"draw {name} --ranks 4 --microbatches 8", *rest))
    assert f": time {time} (" in out.splitlines()[0]


def test_draw_writes_what_was_asked_for(command, tmp_path):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    out = works(
        command(
            "draw dualpipe_v --ranks 2 --microbatches 4",
            *("--svg", str(svg), "--trace", str(trace)),
        )
    )
    assert out.splitlines()[1:] == [f"wrote {svg}", f"wrote {trace}"]
    assert out.startswith("dualpipe_v: time ")
    assert len(list(ET.parse(svg).iter())) > 100
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == sum(map(len, BY_NAME["dualpipe_v"](2, 4).rows))


def test_a_file_that_cannot_be_written(command, tmp_path):
    path = tmp_path / "nowhere" / "a.svg"
    status, _, err = command("draw gpipe --ranks 2 --microbatches 2 --svg", str(path))
    assert status == 2
    assert err == f"error: {path}: No such file or directory\n"


# ---------------------------------------------------------------- what it refuses


SIZES = "--ranks 4 --microbatches 8"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["required", "COMMAND"]),
        (f"draw gpip {SIZES}", ["unknown schedule 'gpip'", *BY_NAME]),
        (f"compare gpipe 2f2b {SIZES}", ["unknown schedule '2f2b'", *BY_NAME]),
        ("compare --ranks 2.5 --microbatches 8", ["--ranks", "'2.5'", "whole number"]),
        (f"draw gpipe {SIZES} --costs 1", ["--costs: '1':", "1,1,1", "1,2"]),
        (f"draw gpipe {SIZES} --costs 1,b", ["--costs: 'b':", "such as 0.25"]),
        (f"draw gpipe {SIZES} --latency soon", ["--latency: 'soon':", "such as 0.25"]),
        (f"draw gpipe {SIZES} --png a.gif", ["'a.gif'", ".png or .pdf"]),
        (
            f"draw zb_v {SIZES} --chunks 3",
            ["--chunks 3: zb_v has no such choice"],
        ),
        (
            "draw dualpipe_v --ranks 4 --microbatches 4",
            ["num_microbatches=4: needs at least 2 * num_ranks = 8"],
        ),
        ("compare dualpipe_v --ranks 4 --microbatches 4", ["no order of dualpipe_v"]),
        ("check /nowhere/mine.txt", ["/nowhere/mine.txt: No such file"]),
    ],
)
def test_arguments_that_do_not_fit(command, line, parts):
    refused(command(line), *parts)


@pytest.mark.parametrize(
    "line", ["--help", "plan -h", "profile -h", "draw -h", "compare -h", "check -h"]
)
def test_help_names_every_option(command, line):
    out = works(command(line))
    named = {
        "--help": ["plan", "profile", "draw", "compare", "check"],
        "plan -h": ["--devices", "--memory", "--bandwidth", "--profile", "--svg"],
        "profile -h": ["module:factory", "--microbatches", "--estimate", "--json"],
        "draw -h": ["--ranks", "--costs F,I,W", "--svg", "--png", "--trace", *BY_NAME],
        "compare -h": ["--microbatches", "--latency", "all but forward_only"],
        "check -h": ["2F0", "standard input"],
    }[line]
    words = " ".join(out.split())
    assert all(name in words for name in named)


# ------------------------------------------------------------------------ compare


def column(table: str, index: int) -> list[str]:
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:] if "|" in line]
    return [row[index].strip() for row in rows]


def test_compare_lists_all_schedules_that_train(command):
    out = works(command("compare --ranks 4 --microbatches 8"))
    assert column(out, 0) == [name for name in BY_NAME if name != "forward_only"]
    times = dict(zip(column(out, 0), column(out, 2), strict=True))
    assert times["gpipe"] == "33"
    assert times["zb_v"] == "25.5"


def test_compare_and_draw_agree(command):
    table = works(command("compare --ranks 3 --microbatches 6 --costs 2,3,1"))
    for name, time in zip(column(table, 0), column(table, 2), strict=True):
        line = f"draw {name} --ranks 3 --microbatches 6 --costs 2,3,1"
        assert f": time {time} (" in works(command(line))


# -------------------------------------------------------------------------- check


MINE = "0F0 0F1 0B0 0B1  # a comment\n1F0 1B0 1F1 1B1\n"


def test_check_prints_the_grid_and_the_peaks(command, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(MINE)
    assert works(command("check", str(path))).splitlines() == [
        "mine: time 9 (28.6 % above the bound), bubble 33.3 %, "
        "peak bytes per rank 2, 1",
        "rank 0 |F0 F1 .  .  B0 B0 .  B1 B1|",
        "rank 1 |.  F0 B0 B0 F1 B1 B1 .  . |",
    ]


def test_check_reads_standard_input(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(MINE))
    assert works(command("check -")).startswith("stdin: time 9 ")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0 0B0\n1F0", ["mine", "E5 1B0 never runs"]),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", ["E9", "waits"]),
        ("", ["empty"]),
        ("{}", ["Schedule.to_json"]),
    ],
)
def test_check_prints_the_faults_on_stderr(command, tmp_path, text, parts):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    status, out, err = command("check", str(path))
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def test_the_module_is_a_program():
    run = [sys.executable, "-m", "jpipe", "check", "-"]
    for text, status in ((MINE, 0), ("0F0", 0), ("0F0 0B1", 1)):
        result = subprocess.run(
            run, input=text, capture_output=True, text=True, check=False
        )
        assert result.returncode == status, result.stderr


def test_output_that_is_read_in_part():
    line = "draw gpipe --ranks 8 --microbatches 3000"
    run = [sys.executable, "-m", "jpipe", *line.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("gpipe: time ")
        process.stdout.close()
        assert process.stderr.read() == ""

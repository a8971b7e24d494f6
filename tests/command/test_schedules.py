"""Commands about schedules: what they print, what they write, how they refuse."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from jpipe.schedules import BY_NAME

from .outcome import refused, works

SIZES = "--ranks 4 --microbatches 8"

# --------------------------------------------------------------------------- draw


def test_draw_prints_a_summary_and_the_grid(command):
    out = works(command("draw 1f1b --ranks 2 --microbatches 3"))
    assert out.splitlines() == [
        "1f1b: time 12 (20.0 % above the bound), bubble 25.0 %, "
        "peak bytes per rank 2, 1",
        "rank 0 |F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2|",
        "rank 1 |.  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  . |",
    ]


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("1f1b --costs 1,2,3", "66"),
        ("zb_h1 --costs 1,1.5,0.5", "30"),
        ("zb_v --latency 0.5", "32.5"),
        # Costs are those of a rank, and are cut in its stages.
        ("zb_v", "25.5"),
        ("interleaved", "28.5"),
    ],
)
def test_draw_and_compare_take_costs_and_latency(command, line, time):
    name, *options = line.split()
    options += SIZES.split()
    summary, *grid = works(command("draw", name, *options)).splitlines()
    assert summary.startswith(f"{name}: time {time} (")
    # Each action has columns of its own: none is rounded away.
    for row in grid:
        forwards = {cell for cell in row.split("|")[1].split() if "F" in cell}
        assert len(forwards) == (16 if name in ("zb_v", "interleaved") else 8)
    table = works(command("compare", *options)).splitlines()[2:]
    times = dict([cell.strip() for cell in row.split("|")[1:4:2]] for row in table)
    assert [*times] == [name for name in BY_NAME if name != "forward_only"]
    assert times[name] == time


@pytest.mark.parametrize("latency", ["1e7", "1e30"])
def test_a_grid_that_is_too_wide_is_not_printed(command, latency):
    out = works(command("draw 1f1b --ranks 2 --microbatches 2 --latency", latency))
    summary, instead = out.splitlines()
    assert summary.startswith("1f1b: time ")
    assert instead == (
        "the grid has more than 1,000,000 cells, and is not printed; draw --svg FILE "
        "draws it to scale"
    )


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


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["required", "COMMAND"]),
        ("plan model.py:make", ["invalid choice: 'plan'", "draw", "launch"]),
        (f"draw gpip {SIZES}", ["unknown schedule 'gpip'", *BY_NAME]),
        (f"compare gpipe 2f2b {SIZES}", ["unknown schedule '2f2b'", *BY_NAME]),
        ("compare --ranks 2.5 --microbatches 8", ["--ranks", "'2.5'", "whole number"]),
        (f"draw gpipe {SIZES} --costs 1", ["--costs: '1':", "1,1,1", "1,2"]),
        (f"draw gpipe {SIZES} --costs a,b", ["--costs: 'a,b': write F, I and W"]),
        (
            f"draw gpipe {SIZES} --latency soon",
            ["--latency: invalid float value: 'soon'"],
        ),
        (
            "draw dualpipe_v --ranks 4 --microbatches 4",
            ["num_microbatches=4: needs at least 2 * num_ranks = 8"],
        ),
        ("compare dualpipe_v --ranks 4 --microbatches 4", ["no order of dualpipe_v"]),
        (f"draw gpipe {SIZES} --svg .", ["--svg: '.' cannot be written"]),
        (
            f"draw gpipe --ranks {10**29} --microbatches 4",
            ["has ranks * (ranks + microbatches) of at most 300,000"],
        ),
        (
            f"compare --ranks 2 --microbatches {10**400}",
            ["of at most 300,000", "take fewer, such as --ranks 4 --microbatches 8"],
        ),
        (
            "launch --processes 2 --timeout 5m train.py",
            ["--timeout: '5m': write a time, such as 5us; units: s, ms, us"],
        ),
        ("check /nowhere/mine.txt", ["/nowhere/mine.txt: ", "No such file"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(command, line, parts):
    refused(command(line), *parts)


@pytest.mark.parametrize(
    "line", ["--help", "draw -h", "compare -h", "check -h", "launch -h"]
)
def test_help_names_every_option(command, line):
    out = works(command(line))
    named = {
        "--help": ["draw", "compare", "check", "launch"],
        "draw -h": ["--ranks", "--costs F,I,W", "--svg", "--trace", *BY_NAME],
        "compare -h": ["--microbatches", "--latency", "all but forward_only"],
        "check -h": ["2F0", "standard input"],
        "launch -h": ["--processes", "--timeout", "-m"],
    }[line]
    words = " ".join(out.split())
    assert all(name in words for name in named)


# -------------------------------------------------------------------------- check


MINE = "0F0 0F1 0B0 0B1  # a comment\n1F0 1B0 1F1 1B1\n"


def test_check_prints_the_grid_and_the_peaks(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(MINE))
    assert works(command("check -")).splitlines() == [
        "stdin: time 9 (28.6 % above the bound), bubble 33.3 %, "
        "peak bytes per rank 2, 1",
        "rank 0 |F0 F1 .  .  B0 B0 .  B1 B1|",
        "rank 1 |.  F0 B0 B0 F1 B1 B1 .  . |",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0 0B0\n1F0", ["mine", "E5 stage 1 runs F on micro-batch 0, needs F B"]),
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


def test_python_m_jpipe_exits_with_1_for_an_invalid_schedule():
    run = [sys.executable, "-m", "jpipe", "check", "-"]
    for text, status in ((MINE, 0), ("0F0 0B1", 1)):
        piped = {"input": text, "capture_output": True, "text": True}
        result = subprocess.run(run, check=False, **piped)
        assert result.returncode == status, result.stderr


def test_a_reader_that_closes_the_output_early_causes_no_error():
    line = "draw gpipe --ranks 8 --microbatches 3000"
    run = [sys.executable, "-m", "jpipe", *line.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(run, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("gpipe: time ")
        process.stdout.close()
        assert process.stderr.read() == ""

"""Commands about schedules: what they print, what they write, how they refuse."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from jpipe.schedules import BY_NAME, zb_v

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
        ("1f1b --latency 0.5 --costs 1,1,1", "41"),
        ("1f1b --costs 1,1,1 --latency 0.5", "41"),
        ("zb_h1 --costs 1,2,1 --costs 1,2", "27"),
        ("zb_v --latency 0.5", "32.5"),
        ("interleaved", "28.5"),
        ("interleaved --chunks 4", "26.25"),
        ("interleaved --chunks 1", "33"),
    ],
)
def test_draw_takes_costs_latency_and_chunks(command, options, time):
    name, *rest = options.split()
    out = works(command(f"draw {name} --ranks 4 --microbatches 8", *rest))
    assert f": time {time} (" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("costs", "columns"),
    [("100,100,100", 9), ("0.004,0.008", 9), ("1,1.5", 15)],
)
def test_columns_suit_the_costs(command, costs, columns):
    out = works(command(f"draw 1f1b --ranks 2 --microbatches 2 --costs {costs}"))
    grid = out.splitlines()[-1]
    cells = grid[grid.index("|") + 1 : -1]
    assert (len(cells) + 1) // 3 == columns


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


def test_draw_writes_png(command, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    works(command("draw gpipe --ranks 2 --microbatches 2 --png", str(path)))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_draw_without_matplotlib_says_what_to_type(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "a.png"
    status, _, err = command("draw gpipe --ranks 2 --microbatches 2 --png", str(path))
    assert status == 2
    assert "pip install 'jpipe[plot]'" in err
    assert not path.exists()


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
        ("paint", ["'paint'", "draw", "compare", "check"]),
        ("draw gpipe --ranks 4", ["required", "--microbatches"]),
        (f"draw gpip {SIZES}", ["unknown schedule 'gpip'", *BY_NAME]),
        (f"compare gpipe 2f2b {SIZES}", ["unknown schedule '2f2b'", *BY_NAME]),
        ("draw gpipe --ranks 0 --microbatches 8", ["--ranks", "at least 1, such as 4"]),
        ("draw gpipe --ranks 4 --microbatches x", ["--microbatches", "'x'", "such as"]),
        ("compare --ranks 2.5 --microbatches 8", ["--ranks", "'2.5'", "whole number"]),
        (f"draw gpipe {SIZES} --costs 1", ["--costs: '1':", "1,1,1", "1,2"]),
        (f"draw gpipe {SIZES} --costs 1,1,1,1", ["--costs: '1,1,1,1':", "1,1,1"]),
        (f"draw gpipe {SIZES} --costs 1,b", ["--costs: 'b':", "such as 0.25"]),
        (f"draw gpipe {SIZES} --costs=-1,2", ["--costs: '-1':", "such as 0.25"]),
        (f"draw gpipe {SIZES} --costs 1,nan", ["--costs: 'nan':"]),
        (f"draw gpipe {SIZES} --latency soon", ["--latency: 'soon':", "such as 0.25"]),
        (f"draw gpipe {SIZES} --latency inf", ["--latency: 'inf':", "such as 0.25"]),
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
        ("check", ["required", "file"]),
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


def test_compare_takes_names_costs_and_latency(command):
    line = "compare --ranks 4 --microbatches 8 --costs 1,1,1 --latency 0.5"
    out = works(command(line, "looped_bfs", "one_f_one_b"))
    assert column(out, 0) == ["looped_bfs", "1f1b"]
    assert column(out, 2) == ["31.5", "41"]


def test_compare_says_why_a_schedule_is_missing(command):
    out = works(command("compare --ranks 4 --microbatches 4"))
    assert "dualpipe_v" not in column(out, 0)
    assert len(column(out, 0)) == len(BY_NAME) - 2
    assert out.splitlines()[-1] == (
        "no order of dualpipe_v: num_microbatches=4: needs at least 2 * num_ranks = 8"
    )


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


def test_times_that_no_float_can_say(command):
    for name in ("draw 1f1b", "compare"):
        line = f"{name} --ranks 2 --microbatches 4 --costs 1e308,1e308"
        refused(command(line), "error: ", "a step takes longer than a float can say")


def test_check_reads_json_whatever_the_name(command, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("\n " + zb_v(2, 3).to_json())
    out = works(command("check", str(path)))
    assert out.startswith("zb_v: time ")


def test_check_reads_standard_input(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(MINE))
    assert works(command("check -")).startswith("stdin: time 9 ")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0 0B0\n1F0", ["mine", "E5 1B0 never runs"]),
        ("0F0 0B0 0B0\n1B0 1F0", ["E6 0B0 runs 2 times"]),
        ("0F0 x", ["E1", "'x' is not an action", "'2F0'"]),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", ["E9", "waits"]),
        ("", ["empty"]),
        ("{}", ["Schedule.to_json"]),
        ("[1, 2]", ["Schedule.to_json"]),
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


def test_check_warns_of_a_rank_that_runs_nothing(command, tmp_path):
    fields = json.loads(BY_NAME["gpipe"](1, 1).to_json())
    fields["rows"].append([])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(fields))
    status, out, err = command("check", str(path))
    assert status == 0
    assert err == "warning: E12 rank 1 runs nothing\n"
    assert "rank 1 |.  .  . |" in out


def test_check_of_what_is_no_text(command, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xff\xfe\x00")
    refused(command("check", str(path)), str(path), "UTF-8")


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

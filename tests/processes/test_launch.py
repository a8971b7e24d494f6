"""`python -m jpipe launch`: what is started, and what is printed of it."""

import os
import socket
import subprocess
import sys

import pytest

import jpipe

from .jobs import ROOT


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def launched(processes, *words):
    return run("-m", "jpipe", "launch", "--processes", processes, *words)


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_or_a_module_is_started_so_many_times(
    tmp_path, monkeypatch, is_module
):
    (tmp_path / "three.py").write_text(
        "import os, sys\n"
        "names = 'JPIPE_PROCESS', 'JPIPE_TIMEOUT'\n"
        "print(*(os.environ[name] for name in names), *sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    script = ["-m", "three"] if is_module else ["three.py"]
    done = launched("3", "--timeout=1500ms", *script, "-m", "--steps=2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{number}] {number} 1.5 -m --steps=2" for number in range(3)
    ]


def test_a_program_that_forgets_to_join_is_refused(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import jpipe, math\njpipe.pipeline([math.sin], 1)\n")
    done = launched("2", str(script))
    assert done.returncode == 1
    for number in range(2):
        assert f"this is process {number} of 2, says JPIPE_PROCESSES" in done.stderr
    assert launched("1", str(script)).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": "60s"}, "timeout='60s': needs seconds, more than 0"),
        ({"timeout": 0}, "timeout=0: needs seconds, more than 0"),
        ({"transport": "tcp"}, "'tcp': choose from 'transfer', 'device_put'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        jpipe.distributed(**options)


def test_a_port_in_use_is_named_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"port \d+ is in use on this host"):
            jpipe.distributed(address, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"JPIPE_COORDINATOR": "127.0.0.1:1", "JPIPE_PROCESSES": "two"},
            "JPIPE_PROCESSES is 'two', and",
        ),
        ({"JPIPE_TIMEOUT": "60s"}, "JPIPE_TIMEOUT='60s': needs seconds, more than 0"),
    ],
)
def test_processes_with_one_number_are_refused(variables, message):
    done = run("-c", "import jpipe; jpipe.distributed()", **variables)
    assert done.returncode == 1
    assert message in done.stderr

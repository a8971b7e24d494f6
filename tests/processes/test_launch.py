"""`python -m jpipe launch`: what is started, and what is printed of it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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


def start(tmp_path, program, *options):
    """A launch of two processes of a program, which has printed ``ready`` in both."""
    script = tmp_path / "script.py"
    script.write_text(program)
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "jpipe", "launch", "--processes", "2"),
            *(*options, str(script)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    lines = []
    while sum("ready" in line for line in lines) < 2:
        lines.append(job.stdout.readline())
        assert lines[-1], lines
    return job, lines


def is_alive(process):
    """True if a process runs; one that nobody has waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


WORKERS = """
import os, subprocess
sleep = "sleep", "600"
workers = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
print("ready", os.getpid(), *(worker.pid for worker in workers))
workers[0].wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_launch_that_is_killed(tmp_path):
    job, lines = start(tmp_path, WORKERS)
    processes = re.findall(r"\d+", " ".join(line.partition("]")[2] for line in lines))
    assert len(processes) == 6
    assert all(map(is_alive, processes))
    job.kill()
    job.communicate()
    until = time.monotonic() + 20
    while any(map(is_alive, processes)):
        assert time.monotonic() < until, processes
        time.sleep(0.02)


SAVING = """
import signal, sys, time
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
print("ready")
while not stops:
    time.sleep(0.01)
time.sleep(0.5)
print("saved")
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_saves_are_waited_for(tmp_path, number):
    job, _ = start(tmp_path, SAVING, "--max-restarts", "3")
    job.send_signal(number)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 75
    assert sorted(printed.splitlines()) == ["[0] saved", "[1] saved"]


IGNORING = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
time.sleep(600)
"""


@pytest.mark.parametrize(("grace", "signals"), [("300ms", 1), ("600s", 2)])
def test_who_does_not_end_after_a_signal_is_killed(tmp_path, grace, signals):
    job, _ = start(tmp_path, IGNORING, "--grace", grace)
    for _ in range(signals):
        job.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM


def test_all_start_again_until_none_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "count, process = (os.environ['JPIPE_' + name] for name in "
        "('RESTART_COUNT', 'PROCESS'))\n"
        "print('attempt', count)\n"
        "if count != '2' and process == '1':\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(0 if count == '2' else 0.5)\n"
        "sys.exit(0 if count == '2' else 70)\n"
    )
    done = launched("2", "--max-restarts", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{process}] attempt {count}" for process in range(2) for count in range(3)
    ]
    assert done.stderr.count("launch: process 1 was ended by SIGKILL") == 2
    assert "starts all again, 2 of 2 times" in done.stderr
    assert launched("2", "--max-restarts=1", str(script)).returncode == 128 + 9


def test_the_status_is_that_of_the_process_which_the_others_end_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "is_root = os.environ['JPIPE_PROCESS'] == '1'\n"
        "time.sleep(0.5 if is_root else 0)\n"
        "sys.exit(3 if is_root else 70)\n"
    )
    done = launched("3", str(script))
    assert done.returncode == 3
    assert "launch: process 1 ended with status 3" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_of_one_machine_listen_at_loopback_alone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = (
        "import jpipe, pathlib\n"
        f"jpipe.distributed('127.0.0.1:{port}', 1, 0)\n"
        "for name in 'tcp', 'tcp6':\n"
        "    print(pathlib.Path(f'/proc/self/net/{name}').read_text())\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    (address,) = re.findall(rf"(\w+):{port:04X} \w+:0000 0A", done.stdout)
    assert address.endswith("0100007F")  # 127.0.0.1

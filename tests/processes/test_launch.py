"""`python -m jpipe launch`: what is started, and what is printed of it."""

import os
import subprocess
import sys

import pytest


def launched(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jpipe", "launch", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_or_a_module_is_started_so_many_times(
    tmp_path, monkeypatch, is_module
):
    (tmp_path / "three.py").write_text(
        "import os, sys\nprint(os.environ['JPIPE_PROCESS'], *sys.argv[1:])\n"
    )
    monkeypatch.chdir(tmp_path)
    script = ["-m", "three"] if is_module else ["three.py"]
    done = launched("--processes", "3", *script, "-m", "--steps=2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{number}] {number} -m --steps=2" for number in range(3)
    ]


def test_the_first_status_that_is_not_0_is_that_of_all(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "sys.exit(3) if os.environ['JPIPE_PROCESS'] == '1' else time.sleep(0.5)\n"
    )
    assert launched("--processes", "2", str(script)).returncode == 3


def test_a_program_that_forgets_to_join_is_told(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import jpipe, math\njpipe.pipeline([math.sin], 1)\n")
    done = launched("--processes", "2", str(script))
    assert done.returncode == 1
    for number in range(2):
        assert f"this is process {number} of 2, says JPIPE_PROCESSES" in done.stderr
    assert launched("--processes", "1", str(script)).returncode == 0


def test_devices_that_would_wait_for_each_other_for_ever_are_refused(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import jax, jpipe\n"
        "jpipe.distributed()\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "mesh = jax.make_mesh((2, 2), ('stage', 'data'))\n"
        "jpipe.pipeline([jax.numpy.sin] * 2, 2, mesh=mesh)\n"
    )
    done = launched("--processes", "2", str(script), PJRT_NPROC="3")
    assert done.returncode == 1
    assert "has 2 CPU devices and 3 threads for their programs, which" in done.stderr
    assert "jax.config.update('jax_num_cpu_devices', 2) before" in done.stderr


def test_what_is_not_there_is_refused():
    done = launched("--processes", "2", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py is not a file; give a Python program, or -m and" in done.stderr

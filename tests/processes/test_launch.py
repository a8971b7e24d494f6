"""`python -m jpipe launch`: what is started, and what is printed of it.

What a process waits for before it ends is tested in this one, by `_watch` itself: from
outside only an abort of XLA, now and then, would show that it did not.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jpipe._processes import _watch
from jpipe._processes._watch import Awaited, Watch


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


def test_a_program_that_forgets_to_join_is_told(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import jpipe, math\njpipe.pipeline([math.sin], 1)\n")
    done = launched("--processes", "2", str(script))
    assert done.returncode == 1
    for number in range(2):
        assert f"this is process {number} of 2, says JPIPE_PROCESSES" in done.stderr
    assert launched("--processes", "1", str(script)).returncode == 0


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"JPIPE_COORDINATOR": "127.0.0.1:1", "JPIPE_PROCESSES": "two"},
            "JPIPE_PROCESSES is 'two', and",
        ),
        ({"JPIPE_TIMEOUT": "60s"}, "JPIPE_TIMEOUT='60s': needs seconds, more than 0"),
    ],
)
def test_what_does_not_tell_processes_apart_is_refused(said, words):
    done = subprocess.run(
        [sys.executable, "-c", "import jpipe; jpipe.distributed()"],
        env={**os.environ, **said},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert words in done.stderr


def test_a_program_waits_for_what_is_on_its_way_before_it_ends(monkeypatch):
    """Else the thread that waits for it would be ended within XLA, which aborts."""
    # However slow the machine is, nobody is asked here: there is no other process.
    monkeypatch.setattr(_watch, "_SOON", 600.0)

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x)

    x, device = jnp.ones((400, 400)), jax.devices()[0]
    slow(x).block_until_ready()
    coming = slow(x)
    assert not coming.is_ready()
    watch = Watch()
    watch.add(Awaited([coming], "1F0", device, device, 1))
    watch.finish()
    assert coming.is_ready()

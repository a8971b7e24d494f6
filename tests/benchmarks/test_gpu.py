"""What an accelerator has to show: that the first program of README trains on it.

And what is said of a run on one that was not done in time, or had too little memory.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import gpu
from benchmarks.tables.run import advice

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs an accelerator")
def test_the_first_program_of_readme_trains():
    """In a process of its own, without the settings of tests/conftest.py."""
    first, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    backend = jax.default_backend()
    check = f"import jax\nassert jax.default_backend() == {backend!r}\n"
    own = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", check + first],
        cwd=README.parent,
        # Beside this process, which may have taken most of the memory.
        env={**own, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 |" in done.stdout
    assert float(done.stdout.split()[-1]) < 1e-3


def test_parts_that_did_not_end_are_told_with_the_rows_that_they_lack():
    results = [{"rows": {"baseline": {}, "pipeline-1": {}}}]
    parts = {
        "dispatch": {"ended": "done"},
        "memory-unet": {"ended": "done"},
        "step-resnet101-bfloat16": {"ended": "not done after 9 s", "results": results},
        "memory-amoebanetd": {"ended": "not begun, no time left"},
    }
    assert gpu.missing_parts(parts, "full") == [
        "step-resnet101-bfloat16: not done after 9 s: "
        "pipeline-2, pipeline-4, pipeline-8",
        "memory-amoebanetd: not begun, no time left: pipeline-1, baseline",
    ]


class Device:
    """A device that counts its bytes."""

    def memory_stats(self):
        return {"bytes_limit": 80 << 30}


def test_too_little_memory_is_answered_with_what_to_type(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    says = advice(error)
    assert "more than this device of 80 GiB has" in says
    for typed in ("--dtype bfloat16", "--schedule 1f1b --remat full", "--experiment"):
        assert typed in says
    assert advice(ValueError("no")) == "ValueError('no')"

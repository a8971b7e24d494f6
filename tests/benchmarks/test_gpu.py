"""What an accelerator has to show: that the first program of README trains on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

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

"""The tests start with the flags of XLA that users have: none."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = "import tests.conftest, jax; print(len(jax.devices()))"


def test_without_flags_the_tests_start():
    without = os.environ | {"XLA_FLAGS": "", "JPIPE_TESTS_FLAGS": ""}
    command = [sys.executable, "-c", START]
    run = subprocess.run(
        command, cwd=ROOT, env=without, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "8", run.stderr

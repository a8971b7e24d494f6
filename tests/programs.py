"""Programs in processes of their own, as users start them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def environment(devices: int) -> dict[str, str]:
    """The variables of a program that has so many devices, unless it says otherwise."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "COLUMNS": "100",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(paths),
        # Half of the time would go to optimizations of XLA.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


def start(
    *command: str, devices: int = 1, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own.

    Args:
      *command: what follows `python`.
      devices: how many there are, unless the program says how many CPU devices it
        wants.
      folder: where it runs.
    """
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=environment(devices),
    )


def run(*command: str, status: int = 0, **options: Any) -> str:
    """What a program prints that ends with this exit status."""
    result = start(*command, **options)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def accelerated(program: str) -> str:
    """The program as a machine with accelerators runs it.

    There the number of CPU devices says nothing; here it is that of `start`.
    """
    program, number = re.subn(r"jax\.config\.update\(.jax_num_cpu.*", "", program)
    assert number == 1
    return program

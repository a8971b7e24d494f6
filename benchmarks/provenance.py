"""Where, when and with what a figure was made."""

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import jax
import optax

import jpipe

ROOT = Path(__file__).resolve().parent.parent
DIRTY = "-dirty"  # after the name of a commit: nobody can check this out


def provenance() -> dict[str, Any]:
    """What has to be known to make a figure again: versions, machine, date, commit."""
    devices = jax.devices()
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "jpipe": jpipe.__version__,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": flax.__version__,
        "optax": optax.__version__,
        "devices": f"{len(devices)} {devices[0].device_kind}",
        "processor": processor(),
        "cores": cores(),
    }


def line(where: dict[str, Any]) -> str:
    """The same in a sentence, for a page."""
    commit = f", commit {where['commit']}" if where["commit"] else ""
    cores = "1 core" if where["cores"] == 1 else f"{where['cores']} cores"
    return (
        f"jpipe {where['jpipe']}, jax {where['jax']}, flax {where['flax']}, "
        f"Python {where['python']}; {where['devices']} devices on {cores} of "
        f"{where['processor']}; {where['date']}{commit}"
    )


def commit() -> str | None:
    """The commit that is checked out, marked if files were changed since.

    Not by results and the page that shows them: each run changes these.
    """
    made = [":!benchmarks/results", ":!benchmarks/README.md"]
    name = _git("rev-parse", "--short=9", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *made)
    return f"{name}{DIRTY}" if name and changed else name


def _git(*words: str) -> str | None:
    command = ["git", "-C", str(ROOT), *words]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    names = [row.partition(":")[2].strip() for row in rows if "model name" in row]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

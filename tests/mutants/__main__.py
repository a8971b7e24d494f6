"""Runs each mutant against the tests that reach it: ``make mutants``.

A copy of the checkout is changed, never the checkout itself. Of each mutant the first
test that fails is printed, and of those that no test notices that they live.

    python -m tests.mutants
    python -m tests.mutants --only _lower/_epilogue --workers 2
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .table import MUTANTS, REACHED_BY, Mutant

ROOT = Path(__file__).parents[2]


def folders_for(file: str) -> list[str]:
    """The tests that reach a file: folders, or single files of them."""
    start = max((start for start in REACHED_BY if file.startswith(start)), key=len)
    return [f"tests/{folder}" for folder in REACHED_BY[start].split()]


def mutated(mutant: Mutant, text: str) -> str:
    """The text of a file with its fault.

    Raises:
      ValueError: if what is to be changed is not there exactly once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {count} times; needs 1")
    return text.replace(mutant.old, mutant.new)


def first_failure(copy: Path, folders: list[str], workers: str) -> str:
    """The first test that fails; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers]
    command += ["-m", "not slow and not gpu", "--no-header", *folders]
    try:
        run = subprocess.run(
            command, cwd=copy, capture_output=True, text=True, check=False, timeout=900
        )
    except subprocess.TimeoutExpired:
        return "none ends"
    if run.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return found[1] if found else (run.stdout + run.stderr)[-2000:]


def main() -> int:
    """Runs them; 1 if one lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants of files that begin so")
    parser.add_argument("--workers", default="auto", help="as for pytest -n")
    options = parser.parse_args()
    table = Table("file", "instead of", "stands", "noticed by", "seconds")
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "jpipe"
        ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in MUTANTS:
            if not mutant.file.startswith(options.only):
                continue
            path = copy / "jpipe" / mutant.file
            text, begin = path.read_text(), time.monotonic()
            path.write_text(mutated(mutant, text))
            found = ""
            for tests in folders_for(mutant.file):
                found = found or first_failure(copy, [tests], options.workers)
            path.write_text(text)
            alive += not found
            seconds = f"{time.monotonic() - begin:.0f}"
            row = mutant.file, mutant.old.strip(), mutant.new.strip(), found or "NONE"
            table.add_row(*map(escape, row), seconds)
            print(f"{seconds:>4} s  {mutant.file}: {found or 'NO TEST'}", flush=True)
    Console(width=160).print(table)
    print(f"{table.row_count} mutants, {alive} of them alive")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())

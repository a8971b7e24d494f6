"""A command, run in this process.

`jpipe.__main__` is imported because a process for each command would take seconds.
"""

import shutil
import sys
from pathlib import Path

import pytest

from jpipe.__main__ import main


@pytest.fixture
def command(capsys):
    """Runs a command; returns its status, what it printed, and its errors."""

    def run(line: str, *more: str) -> tuple[int, str, str]:
        status = main([*line.split(), *more])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's with a ``model.py``, in which the command is typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(Path(__file__).with_name("model.py"), tmp_path)
    yield tmp_path
    for name in [n for n, m in sys.modules.items() if _is_in(m, tmp_path)]:
        del sys.modules[name]


def _is_in(module, folder) -> bool:
    return str(getattr(module, "__file__", None)).startswith(str(folder))

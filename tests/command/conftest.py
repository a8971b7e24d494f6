"""A command, run in this process.

`jpipe.__main__` is imported because a process for each command would take seconds.
"""

import pytest

from jpipe.__main__ import main


@pytest.fixture
def command(capsys):
    """Runs a command; returns its status, what it printed, and its errors."""

    def run(line: str, *more: str) -> tuple[int, str, str]:
        status = main([*line.split(), *more])
        return status, *capsys.readouterr()

    return run

"""Measurements in processes of their own, which differ by more than what is measured.

A module that measures prints one JSON object as its last line. Another runs it:

    main of overhead                       main of overhead.dispatch
    medians("...dispatch", words, 9)  -->  print(json.dumps({"step_us": 19.0, ...}))
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def printed(
    module: str, words: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object that a module prints.

    Args:
      module: its name, such as ``"benchmarks.overhead.dispatch"``.
      words: what follows the name on the command line.
      variables: of the environment, beside those that are set.
    """
    output = subprocess.check_output(
        [sys.executable, "-m", module, *words],
        env=os.environ | dict(variables or {}),
        text=True,
    )
    return json.loads(output.splitlines()[-1])


def medians(
    module: str,
    words: Sequence[str],
    processes: int,
    spread: str,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The medians of what a module prints in several processes, one after the other.

    Args:
      module: as for `printed`.
      words: as for `printed`.
      processes: how many.
      spread: the figure whose least and greatest are told too.
      variables: as for `printed`.

    Returns:
      The median of each figure, ``f"{spread}_least"`` and ``f"{spread}_most"``.
    """
    runs = [printed(module, words, variables) for _ in range(processes)]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    result[f"{spread}_least"] = min(run[spread] for run in runs)
    result[f"{spread}_most"] = max(run[spread] for run in runs)
    return result


def restart_with(variables: Mapping[str, str], module: str) -> None:
    """Starts this command again with variables that are read when a process starts.

    Args:
      variables: of the environment; where all of them are set, nothing happens.
      module: the command that runs, such as ``"benchmarks.schedules"``.
    """
    if not variables.items() <= os.environ.items():
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | dict(variables))


def xla_flags(*flags: str) -> dict[str, str]:
    """The variable that gives XLA these flags beside those that it has."""
    present = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in flags if flag not in present.split()]
    return {"XLA_FLAGS": " ".join([present, *missing]) if missing else present}

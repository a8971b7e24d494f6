"""One benchmark in several processes: they differ by more than what is measured."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def medians(
    module: str,
    words: list[str],
    processes: int,
    spread: str,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a module that prints a flat JSON object, one process after the other.

    Args:
      module: its name, such as ``"benchmarks.overhead.dispatch"``.
      words: what follows it on the command line.
      processes: how many.
      spread: the figure whose least and greatest are told too.
      variables: of the environment, beside those that are set.

    Returns:
      The median of each figure, ``f"{spread}_least"`` and ``f"{spread}_most"``.
    """
    rows = [one_process(module, words, variables) for _ in range(processes)]
    result = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    result[f"{spread}_least"] = min(row[spread] for row in rows)
    result[f"{spread}_most"] = max(row[spread] for row in rows)
    return result


def one_process(
    module: str, words: list[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a module prints that prints a JSON object; see `medians`."""
    command = [sys.executable, "-m", module, *words]
    environment = os.environ | dict(variables or {})
    return json.loads(subprocess.check_output(command, env=environment, text=True))

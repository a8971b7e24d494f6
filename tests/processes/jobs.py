"""Programs as several processes: started, waited for, ended."""

import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Longer than any of them takes on a busy machine: what hangs fails the test.
SECONDS = 240


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
      status: of the first process that failed, else 0.
      lines: what each process printed, on both streams.
      left: the commands of its processes that were still there.
    """

    status: int
    lines: dict[int, list[str]]
    left: list[str]

    def of(self, process: int) -> str:
        """What one process printed."""
        return "\n".join(self.lines.get(process, ()))


def run(processes: int, module: str, *words: str, timeout: float = 60) -> Outcome:
    """Runs a module of the tests as several processes.

    Args:
      processes: how many.
      module: its name, such as ``"worker"``.
      *words: its arguments.
      timeout: for how many seconds one waits for another.
    """
    script = Path(__file__).with_name(f"{module}.py")
    command = [sys.executable, "-m", "jpipe", "launch", "--processes", str(processes)]
    # The last word is that of this job alone: another worker may run the same test.
    own = f"job-{uuid.uuid4()}"
    command += [f"--timeout={timeout:g}s", str(script), *words, own]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMP")}
    # Half of the time would go to optimizations of XLA.
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines: dict[int, list[str]] = {}
    for line in (done.stdout + done.stderr).splitlines():
        if match := re.match(r"\[(\d+)\] (.*)", line):
            lines.setdefault(int(match[1]), []).append(match[2])
        else:
            lines.setdefault(-1, []).append(line)
    return Outcome(done.returncode, lines, _alive(own))


def _alive(word: str) -> list[str]:
    """The processes of this machine whose command has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in command:
            found.append(command)
    return found

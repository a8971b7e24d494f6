"""Runs examples and records what they print, for their pages.

    python docs/record_examples.py [NAME.py ...]

Runs the commands of the table in examples/README.md, or those of some programs; writes
examples/outputs/NAME.txt, and into the table the seconds of processor time.
"""

import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
TABLE = EXAMPLES / "README.md"


def read_commands() -> dict[str, str]:
    """The file name of each example in Python -> its command."""
    rows = re.findall(
        r"^\| \[(\w+\.py)\].*\| `(.*)` \|", TABLE.read_text("utf-8"), re.M
    )
    return dict(rows)


def main(names: list[str]) -> None:
    """Runs examples one after the other.

    Args:
      names: their file names; if empty, all.
    """
    commands = read_commands()
    for name in names or commands:
        _, program, *arguments = shlex.split(commands[name])
        before = _processor_seconds()
        # In a new folder: some go on with what an earlier run has written.
        with tempfile.TemporaryDirectory() as folder:
            printed = subprocess.run(
                [sys.executable, str(EXAMPLES.parent / program), *arguments],
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
        seconds = round(_processor_seconds() - before)

        path = EXAMPLES / "outputs" / f"{Path(name).stem}.txt"
        path.write_text(printed, "utf-8")
        row = re.compile(rf"^(\| \[{name}\].*\|) \d+ \|$", re.M)
        TABLE.write_text(row.sub(rf"\1 {seconds} |", TABLE.read_text("utf-8")), "utf-8")
        print(f"{name}: {seconds} s", flush=True)


def _processor_seconds() -> float:
    """The processor time of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])

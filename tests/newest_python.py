"""Prints the newest Python on this machine that is newer than the given version.

The newest JAX asks for a newer Python than the oldest that is supported. Usage:
``python tests/newest_python.py 3.11`` prints a command, or nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Those that the newest JAX has wheels for.
SUPPORTED = [(3, minor) for minor in range(12, 15)]


def commands() -> Iterator[str]:
    """Interpreters by name, and those that pyenv installed but did not select."""
    for major, minor in SUPPORTED:
        found = shutil.which(f"python{major}.{minor}")
        if found:
            yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, root.glob("versions/3.*/bin/python"))


def version(command: str) -> tuple[int, ...]:
    """The version of an interpreter that can make environments; else nothing."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:3])"
    result = subprocess.run(
        [command, "-c", code], capture_output=True, text=True, check=False
    )
    return tuple(map(int, result.stdout.split())) if result.returncode == 0 else ()


def main() -> None:
    """Prints the command."""
    floor = tuple(map(int, sys.argv[1].split(".")))
    found = {version(command): command for command in commands()}
    newer = [v for v in found if v[:2] in SUPPORTED and v[:2] > floor]
    if newer:
        print(found[max(newer)])


if __name__ == "__main__":
    main()

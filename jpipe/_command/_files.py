"""Files that a command reads and writes."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ._refusal import CommandError

_WRITTEN = {
    "json": "all of it as JSON",
    "svg": "a picture as SVG",
    "trace": "a trace for ui.perfetto.dev; a unit of time is shown as a second",
}


def add(command: argparse.ArgumentParser, *names: str) -> None:
    """Adds options that name files to write, such as ``--svg``."""
    for name in names:
        what = f"write {_WRITTEN[name]}"
        command.add_argument(f"--{name}", type=_output, metavar="FILE", help=what)


def _output(text: str) -> Path:
    """A file that can be written: known before work is done for it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def read(file: str) -> tuple[str, str]:
    """The text of a file or of standard input, and what to call what is in it."""
    try:
        if file == "-":
            return sys.stdin.read(), "stdin"
        return Path(file).read_text("utf-8"), Path(file).stem
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file}: {error}") from None


def write(arguments: argparse.Namespace, **texts: Callable[[], str]) -> bool:
    """Writes the requested files and prints their paths; returns whether it did."""
    paths = {name: getattr(arguments, name) for name in texts}
    for name, path in paths.items():
        if path is not None:
            path.write_text(texts[name](), "utf-8")
            print(f"wrote {path}")
    return any(paths.values())

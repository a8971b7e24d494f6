"""Files that a command reads and writes."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ._refusal import CommandError

_WRITTEN = {
    "json": "all of it as JSON",
    "svg": "a picture as SVG",
    "png": "a picture as PNG, or PDF by its ending; needs matplotlib",
    "trace": "a trace for ui.perfetto.dev; a unit of time is shown as a second",
}


def add(command: argparse.ArgumentParser, *names: str) -> None:
    """Adds options that name files to write, such as ``--svg``."""
    for name in names:
        what = f"write {_WRITTEN[name]}"
        read = _picture if name == "png" else Path
        command.add_argument(f"--{name}", type=read, metavar="FILE", help=what)


def _picture(text: str) -> Path:
    """Where to draw with matplotlib."""
    if Path(text).suffix.lower() not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must end in .png or .pdf")
    return Path(text)


def read(file: str) -> tuple[str, str]:
    """The text of a file or of standard input, and what to call what is in it."""
    try:
        if file == "-":
            return sys.stdin.read(), "stdin"
        return Path(file).read_text("utf-8"), Path(file).stem
    except UnicodeDecodeError:
        raise CommandError(f"{file}: is not a text in UTF-8") from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None


def check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be written, before work is done for it."""
    for path in filter(None, (getattr(arguments, name, None) for name in _WRITTEN)):
        if path.is_dir():
            raise CommandError(f"{path}: Is a directory")
        if not path.parent.is_dir():
            raise CommandError(f"{path}: No such file or directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CommandError(f"{path}: Permission denied")


def write(
    arguments: argparse.Namespace, writers: Mapping[str, Callable[[Path], object]]
) -> bool:
    """Writes the requested files and prints their paths; returns whether it did."""
    paths = {name: getattr(arguments, name) for name in writers}
    for name, path in paths.items():
        if path is None:
            continue
        try:
            writers[name](path)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        except ImportError as error:  # what draws it is not installed
            raise CommandError(str(error)) from None
        print(f"wrote {path}")
    return any(paths.values())


def text(make: Callable[[], str]) -> Callable[[Path], object]:
    """What writes a text, made when it is written."""
    return lambda path: path.write_text(make(), "utf-8")

"""Files that a command reads and writes."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ._refusal import Unfit

# Where to write, if it was asked for, and what writes it there.
Output = tuple[Path | None, Callable[[Path], object]]


def read(file: str) -> tuple[str, str]:
    """The text of a file or of standard input, and what to call what is in it."""
    try:
        if file == "-":
            return sys.stdin.read(), "stdin"
        return Path(file).read_text("utf-8"), Path(file).stem
    except UnicodeDecodeError:
        raise Unfit(f"{file}: is not a text in UTF-8") from None
    except OSError as error:
        raise Unfit(f"{error.filename}: {error.strerror}") from None


def check(paths: Iterable[Path | None]) -> None:
    """Refuses what cannot be written, before work is done for it."""
    for path in filter(None, paths):
        if path.is_dir():
            raise Unfit(f"{path}: Is a directory")
        if not path.parent.is_dir():
            raise Unfit(f"{path}: No such file or directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise Unfit(f"{path}: Permission denied")


def write(outputs: Iterable[Output]) -> bool:
    """Writes what was asked for and says so; returns whether anything was."""
    wanted = [(path, output) for path, output in outputs if path is not None]
    for path, output in wanted:
        try:
            output(path)
        except OSError as error:
            raise Unfit(f"{path}: {error.strerror}") from None
        except ImportError as error:  # what draws it is not installed
            raise Unfit(str(error)) from None
        print(f"wrote {path}")
    return bool(wanted)


def text(make: Callable[[], str]) -> Callable[[Path], object]:
    """What writes a text, made when it is written."""
    return lambda path: path.write_text(make(), "utf-8")

"""Warnings that point at a line of the user's program; errors that list all faults."""

import functools
import inspect
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARY = f"{Path(__file__).parent}{os.sep}"
_MOST_FAULTS = 20  # that one error lists


def raise_all(
    title: str,
    faults: Iterable[str],
    *,
    error: type[Exception] = ValueError,
    advice: str = "",
) -> None:
    """Raises one error with every fault, a line for each; returns if there is none.

    Args:
      title: the sentence before the faults.
      faults: one sentence for each fault; equal ones are listed once.
      error: the class of the error.
      advice: the text after the faults, with its line break.
    """
    lines = list(dict.fromkeys(faults))
    if not lines:
        return
    num_more = len(lines) - _MOST_FAULTS
    if num_more > 0:
        lines = [*lines[:_MOST_FAULTS], f"and {num_more} more"]
    listed = "".join(f"\n  * {line}" for line in lines)
    raise error(f"{title}:{listed}{advice}")


def warn(message: str) -> None:
    """Warns at the line that called the library, whatever lies between."""
    # Between two frames of the library may be those of JAX and Flax.
    level = 1
    outermost = 1
    frame = inspect.currentframe()
    while frame is not None:
        if is_library(frame):
            outermost = level
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=outermost + 1)


def source_text(function: Any) -> str:
    """A function of the user by its name, its file and its line."""
    name = getattr(function, "__name__", None) or type(function).__name__
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code = getattr(inner, "__code__", None)
    if code is None:
        return name
    return f"{name} at {code.co_filename}:{code.co_firstlineno}"


def is_library(frame: FrameType) -> bool:
    """True if code of the library runs in a frame."""
    return frame.f_code.co_filename.startswith(_LIBRARY)


class WarnOnce:
    """Warnings of one pipeline: one on each topic, whatever is built later.

    Args:
      is_muted: True for a pipeline on paper, which warns of nothing.
    """

    def __init__(self, *, is_muted: bool = False) -> None:
        self._topics: set[str] = set()
        self._is_muted = is_muted

    def __call__(self, topic: str, message: str) -> None:
        """Warns, if nothing was said on the topic yet."""
        if not self._is_muted and topic not in self._topics:
            self._topics.add(topic)
            warn(message)

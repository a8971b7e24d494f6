"""Warnings that point at the line of the user's program."""

import inspect
import os
import warnings
from pathlib import Path
from types import FrameType

_LIBRARY = f"{Path(__file__).parent}{os.sep}"


def warn(message: str) -> None:
    """Warns at the line that called the library, whatever lies between."""
    # Between two frames of ours may be those of JAX and Flax: the outermost counts.
    frame, level, outermost = inspect.currentframe(), 1, 1
    while frame is not None:
        if is_library(frame):
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=outermost + 1)


def is_library(frame: FrameType) -> bool:
    """Whether code of the library runs in a frame."""
    return frame.f_code.co_filename.startswith(_LIBRARY)


class WarnOnce:
    """Warnings of one pipeline: of each topic one, whatever is built later.

    Args:
      is_muted: whether there are none, as of what is built on paper.
    """

    def __init__(self, *, is_muted: bool = False) -> None:
        self._topics: set[str] = set()
        self._is_muted = is_muted

    def __call__(self, topic: str, message: str) -> None:
        """Warns, if nothing was said on the topic yet."""
        if not self._is_muted and topic not in self._topics:
            self._topics.add(topic)
            warn(message)

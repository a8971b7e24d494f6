"""Python's collector of cycles, which looks at all of a list while it is written."""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def paused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, run without it.

    A list of instructions is a great many objects, all of which stay: to look through
    them again and again takes half the time, and finds nothing.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run

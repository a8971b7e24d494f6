"""Python's collector of cycles, which looks at all of a list while it is written."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """The scope, or the decorator of a function, in which it rests.

    A list of instructions is a great many objects, all of which stay: to look through
    them again and again takes half the time, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

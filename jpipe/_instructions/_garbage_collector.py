"""Python's collector of cycles, paused while programs are traced and written."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the collector in a scope, or in the function that this decorates.

    A trace or a list of instructions is a great many objects, most of which stay: to
    look through them again and again takes half the time, and frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

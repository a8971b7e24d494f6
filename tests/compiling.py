"""Which programs JAX compiles, read off its log."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_COMPILED = re.compile(r"Compiling jit\(([^)]*)\)")


@contextmanager
def log_compiled() -> Iterator[list[str]]:
    """The names of the programs that JAX compiles inside, in order.

    One is compiled here first. Where JAX logs in other words it is not seen, and the
    test fails: no list is empty for that reason.
    """
    names = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: names.extend(_COMPILED.findall(record.getMessage()))

    def compiled_first() -> int:
        return 1

    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            jax.jit(compiled_first)()
            assert names == ["compiled_first"], "JAX logs compilations in other words"
            names.clear()
            yield names
    finally:
        logger.removeHandler(handler)

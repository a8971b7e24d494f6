"""Plans and profiles as JSON: one error for a text that is something else."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

# What a text of other fields leads to; a number of thousands of digits is a ValueError.
_MISFITS = (
    *(AttributeError, TypeError, LookupError, ArithmeticError, RecursionError),
    ValueError,
)


@contextlib.contextmanager
def reading(refusal: str, text: str) -> Iterator[Any]:
    """Yields what a JSON text holds, and reports what does not fit in its body.

    Args:
      refusal: how the error begins.
      text: the text.

    Raises:
      ValueError: with what does not fit.
    """
    try:
        yield json.loads(text)
    except _MISFITS as error:
        raise ValueError(f"{refusal}: {error!r}; give its text, not its path") from None

"""Plans and profiles as JSON: one error for a text that is something else."""

import contextlib
import json
import reprlib
from collections.abc import Iterator
from typing import Any

# What a text of other fields leads to.
_MISFITS = AttributeError, TypeError, LookupError, ArithmeticError, RecursionError


@contextlib.contextmanager
def reading(refusal: str, text: str | bytes) -> Iterator[Any]:
    """Yields what a JSON text holds, and reports what does not fit in its body.

    Args:
      refusal: how the error begins.
      text: the text.

    Raises:
      ValueError: with what does not fit.
    """
    try:
        yield json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{refusal}: {reprlib.repr(text)} is not JSON: {error}; give the text, "
            f"which pathlib.Path(path).read_text() reads from a file"
        ) from None
    # A number of thousands of digits is a ValueError.
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from None
    except _MISFITS as error:
        raise ValueError(f"{refusal}: {error!r}") from None

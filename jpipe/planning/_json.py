"""Plans and profiles of JSON: their parts; one error for what is something else."""

import contextlib
import dataclasses
import json
import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

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


def value_of(kind: Any, read: Any) -> Any:
    """A value of a type: JSON has objects for dataclasses and lists for tuples."""
    if read is None:
        return None
    if isinstance(kind, types.UnionType):
        return value_of(get_args(kind)[0], read)
    if dataclasses.is_dataclass(kind):
        made: Any = kind
        hints = get_type_hints(kind)
        return made(**{name: value_of(hints[name], read[name]) for name in read})
    if hasattr(kind, "_make"):
        return kind._make(read)
    if get_origin(kind) is tuple:
        return tuple(value_of(get_args(kind)[0], part) for part in read)
    return read

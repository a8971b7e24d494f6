"""Plans that are saved as JSON: one error for a text that is something else."""

import contextlib
import json
import reprlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

_NEEDS = "needs the text; that of a file is pathlib.Path(path).read_text()"


def refusal(kind: str, faults: Sequence[str]) -> str:
    """That a text is not of that kind, and why."""
    return f"no plan as {kind}.to_json writes it: {'; '.join(faults)}"


@contextlib.contextmanager
def reading(kind: str, text: str) -> Iterator[Any]:
    """What a JSON text says; and whose it is not, whatever is found out meanwhile.

    Args:
      kind: of which it should be.
      text: the text.

    Yields:
      What it says.

    Raises:
      ValueError: with what was found.
      TypeError: if it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"{kind}.from_json: {text!r} is a {type(text).__name__}; {_NEEDS}"
        )
    # A number of thousands of digits is a ValueError, as is what is no JSON.
    wrong = ValueError, TypeError, LookupError, AttributeError, RecursionError
    try:
        yield json.loads(text)
    except json.JSONDecodeError as error:
        says = f"{reprlib.repr(text)}: {error}; {_NEEDS}"
        raise ValueError(refusal(kind, [says])) from None
    except wrong as error:
        raise ValueError(refusal(kind, [repr(error)])) from None


def differing(
    given: Collection[str],
    needed: Collection[str],
    known: Collection[str] | None = None,
) -> list[str]:
    """Which names are missing and which are surplus, a line for each.

    Args:
      given: the names.
      needed: those that have to be there.
      known: those that may; default: the same.
    """
    missing = [name for name in needed if name not in given]
    surplus = [name for name in given if name not in (known or needed)]
    faults = [f"missing: {', '.join(missing)}"] if missing else []
    return faults + ([f"surplus: {reprlib.repr(surplus)}"] if surplus else [])

"""Plans that are saved as JSON: one error for a text that is something else."""

import contextlib
import reprlib
from collections.abc import Collection, Iterator, Sequence


def refusal(kind: str, faults: Sequence[str]) -> str:
    """That a text is not of that kind, and why."""
    return f"no plan as {kind}.to_json writes it: {'; '.join(faults)}"


@contextlib.contextmanager
def reading(kind: str) -> Iterator[None]:
    """Says whose text it is not, whatever is found out while it is read.

    Raises:
      ValueError: with what was found.
    """
    # A number of thousands of digits is a ValueError, as is what is no JSON.
    wrong = ValueError, TypeError, LookupError, AttributeError, RecursionError
    try:
        yield
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

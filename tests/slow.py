"""Rows of a table that `make test` leaves to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*row: Any) -> Any:
    """The arguments of one row of `pytest.mark.parametrize`."""
    return pytest.param(*row, marks=pytest.mark.slow)


def slow_except(quick: set[Any], rows: Iterable[Any]) -> list[Any]:
    """Rows of one argument, of which some are quick.

    Raises:
      ValueError: if one of these is no row.
    """
    rows = list(rows)
    if unknown := quick - set(rows):
        raise ValueError(f"no rows: {unknown}")
    return [row if row in quick else slow(row) for row in rows]

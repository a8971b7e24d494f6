"""Checks are tested by their reports: XLA may leave out most of its optimizations."""

import pytest


@pytest.fixture(autouse=True)
def unoptimized(quick):
    """Compiles in half the time."""

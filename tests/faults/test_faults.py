"""Faults of one process: the others name it, and end in time, or go on."""

import pytest

from ..slow import slow_except
from . import kills, table

QUICK = {"1:join:kill", "2:step:kill", "1:step:sys.exit", "2:step:hangup"}


@pytest.mark.parametrize(
    "row",
    slow_except({row for row in table.ROWS if row.failure in QUICK}, table.ROWS),
    ids=lambda row: f"{row.num_processes} processes, {row.failure}",
)
def test_the_others_name_the_process_that_fails_and_end(row):
    assert table.find_breaches(row) == []


@pytest.mark.slow
def test_runs_of_which_processes_are_killed_come_to_the_bits_of_one_without():
    assert kills.find_breaches(num_kills=4, seed=1) == []

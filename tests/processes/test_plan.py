"""A plan for the devices of several processes."""

import re

from . import jobs


def test_all_processes_tune_to_the_same_plan_and_run_it():
    outcome = jobs.run(2, "tuning")
    assert (outcome.status, outcome.left) == (0, []), str(outcome)
    printed = [re.search(r"tuned .*", outcome.of(process)) for process in (0, 1)]
    assert all(printed), str(outcome)
    assert printed[0][0] == printed[1][0]
    # The process of the first device measures the transfers between both.
    assert "transfers True" in outcome.of(0)
    assert "transfers None" in outcome.of(1)


def test_each_stage_of_a_plan_is_in_one_process():
    outcome = jobs.run(2, "planning")
    assert (outcome.status, outcome.left) == (0, []), str(outcome)
    printed = [
        re.search(r"devices 2 loss .*", outcome.of(process)) for process in (0, 1)
    ]
    assert all(printed), str(outcome)
    assert printed[0][0] == printed[1][0]

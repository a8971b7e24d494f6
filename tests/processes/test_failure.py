"""A process that fails, or runs something else: the others print so, and end."""

import re

import pytest

from . import jobs


def ended(outcome):
    """Checks that nothing is left of a job."""
    assert outcome.status != 0, str(outcome)
    assert not outcome.left


@pytest.fixture(scope="module")
def refused_then_raised():
    """Two processes of other models, then other calls, then equal until one raises."""
    return jobs.run(2, "failing", "model,call,raise")


def test_another_model_is_refused_before_anything_is_sent(refused_then_raised):
    fact = r"\* layer 2: process 0: Dense .*float32\[3\].*; process 1: .*\[4\]"
    for process in range(2):
        text = refused_then_raised.of(process)
        before, _, after = text.partition("\nloss ")
        assert "the processes do not run the same program" in before, text
        assert re.search(fact, before), text
        assert "not run the same program" not in after


def test_another_call_is_named_in_both(refused_then_raised):
    fact = (
        "  * the call: process 0: pipe.train_step(loss_fn, tx); process 1: pipe.apply\n"
    )
    for process in range(2):
        before, _, _ = refused_then_raised.of(process).partition("\nloss ")
        assert "the order of calls differs, and nothing was sent" in before
        assert fact in f"{before}\n"
        assert "rngs are others" not in before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shuffle", "whole"])
def test_other_examples_are_refused_before_anything_is_sent(how):
    outcome = jobs.run(2, "failing", how)
    ended(outcome)
    for process in range(2):
        text = outcome.of(process)
        assert "the processes do not run the same program" in text
        assert "* x has other values in process 1 than in process 0" in text
        assert not re.search(r"^loss \d", text, re.M)
        assert "what others do at the end" not in text


@pytest.mark.slow
def test_other_examples_in_a_later_call_are_found():
    outcome = jobs.run(2, "failing", "epoch")
    ended(outcome)
    for process in range(2):
        text = outcome.of(process)
        assert "call 4 of a step differs, and what this function has returned" in text
        assert "* x has other values in process 1 than in process 0" in text
        # One that is behind prints why the other has failed, in the call before.
        assert len(re.findall(r"^loss \d", text, re.M)) in (7, 8)


def test_the_awaited_array_of_a_process_that_raises_is_named(refused_then_raised):
    ended(refused_then_raised)
    text = refused_then_raised.of(0)
    # Where the broken connection ends the transfer before the wait for it is looked at,
    # JAX raises, and the process that is gone is named alone.
    assert re.search(
        r"jpipe: process 0 (awaited action 1B\d for .*cpu:0, which process 1 "
        r"sends from .*cpu:\d+.*|ends; )process 1 has failed: ZeroDivisionError: ",
        text,
    ), text
    assert len(re.findall(r"^loss \d", text, re.M)) in (5, 6)
    assert "ZeroDivisionError" in refused_then_raised.of(1)


@pytest.mark.slow
def test_a_failed_save_in_one_process_fails_in_all(tmp_path):
    (tmp_path / "file").touch()
    outcome = jobs.run(2, "saving", str(tmp_path))
    assert (outcome.status, outcome.left) == (0, []), str(outcome)
    first, other = outcome.of(0), outcome.of(1)
    for text in (first, other):
        assert "state: ValueError: the processes do not run the same program" in text
        assert "['position']: process 0: int32[] 0; process 1: int32[] 1" in text
    assert "file: NotADirectoryError: " in first
    assert "file: RuntimeError: this could not be saved:" in other
    assert "file/state: NotADirectoryError: " in first
    assert "file/state: RuntimeError: this could not be saved:" in other
    assert "* process 0: NotADirectoryError: " in other
    assert "over: OSError: " in first
    assert "over: RuntimeError: this could not be saved:" in other
    for text in (first, other):
        assert text.index("over: ") < text.index("step 1 is") < text.index("step 3 is")
        assert "copy 1/3 is damaged: " in text
        assert "in all processes step 1" in text
    assert {*tmp_path.iterdir()} == {tmp_path / "file", tmp_path / "over"}

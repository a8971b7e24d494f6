"""Builders: which sizes they take, and how schedules are found by name."""

import re

import pytest

from jpipe.schedules import (
    BY_NAME,
    ScheduleError,
    eager_one_f_one_b,
    interleaved,
    named,
    one_f_one_b,
)

from .orders import some_sizes


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_v", "v_min"])
def test_builders_refuse_less_than_one_and_name_all_that_is_wrong(name):
    for sizes, says in (
        ((0, -2), "num_ranks=0, num_microbatches=-2.*: must be ints of at least 1"),
        ((2.0, "4"), r"num_ranks=2\.0, num_microbatches='4'"),
        ((1, 0), "num_microbatches=0: must be ints of at least 1"),
    ):
        with pytest.raises(ScheduleError, match=f"^{name}: {says}"):
            BY_NAME[name](*sizes)


def test_interleaved_with_one_chunk_is_1f1b():
    # The formulas for more chunks would give the eager order.
    for p, m in some_sizes("interleaved"):
        assert interleaved(p, m, 1) == one_f_one_b(p, m)
    assert interleaved(4, 8, 1) != eager_one_f_one_b(4, 8)


def test_a_schedule_is_found_by_its_name_and_by_that_of_its_function():
    for name, builder in BY_NAME.items():
        assert named(name) is builder
        assert named(builder.__name__) is builder
    assert named("one_f_one_b") is one_f_one_b


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(
        ValueError, match=r"^unknown schedule 'gpip': choose"
    ) as refusal:
        named("gpip")
    assert re.findall(r"'(\w+)'", str(refusal.value)) == ["gpip", *BY_NAME]

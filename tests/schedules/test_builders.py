"""Builders: which sizes they take, and how schedules are found by name."""

import itertools
import re

import pytest

from jpipe.schedules import (
    BY_NAME,
    ScheduleError,
    dualpipe_v,
    eager_one_f_one_b,
    interleaved,
    looped_bfs,
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


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: interleaved(2, 2, 0), "interleaved: num_chunks=0: must be"),
        (lambda: interleaved(2, 2, 2, 0), "interleaved: group=0: must be"),
        (
            lambda: interleaved(2, 2, -1, -1),
            "interleaved: num_chunks=-1, group=-1: must be",
        ),
        (lambda: looped_bfs(2, 2, 0), "looped_bfs: num_chunks=0: must be"),
    ],
)
def test_builders_refuse_less_than_one_chunk(build, says):
    with pytest.raises(ScheduleError, match=f"^{says} ints of at least 1$"):
        build()


def test_dualpipe_v_needs_two_microbatches_per_rank():
    for p in range(1, 6):
        dualpipe_v(p, 2 * p).validate()
        says = (
            f"dualpipe_v: num_microbatches={2 * p - 1}: needs at least "
            f"2 * num_ranks = {2 * p}"
        )
        with pytest.raises(ScheduleError, match=f"^{re.escape(says)}$"):
            dualpipe_v(p, 2 * p - 1)


def test_interleaved_with_one_chunk_is_1f1b():
    # The formulas for more chunks would give the eager order.
    for p, m in some_sizes("interleaved"):
        assert interleaved(p, m, 1) == one_f_one_b(p, m)
    assert interleaved(4, 8, 1) != eager_one_f_one_b(4, 8)


def test_chunked_schedules_run_with_any_number_of_chunks():
    for p, m, v in itertools.product((1, 2, 4), (1, 5, 9), (1, 2, 4)):
        assert interleaved(p, m, v).validate().num_stages == v * p
        assert looped_bfs(p, m, v).validate().num_stages == v * p


def test_groups_of_as_many_microbatches_as_ranks_or_more_never_wait_for_ever():
    for p, m, v in itertools.product((1, 2, 4), (1, 5, 9), (2, 3)):
        for group in range(p, m + 2):
            interleaved(p, m, v, group).validate()


def test_a_group_with_fewer_microbatches_than_ranks_is_refused_with_the_cycle():
    with pytest.raises(ScheduleError) as refusal:
        interleaved(4, 8, group=2)
    assert str(refusal.value) == (
        "schedule 'interleaved' cannot run:\n"
        "  * E9 the schedule deadlocks: "
        "rank 0: 4F3 waits for 3F3, which rank 3 runs after 3B0; "
        "rank 3: 3B0 waits for 4B0, which rank 0 runs after 4F3"
    )


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

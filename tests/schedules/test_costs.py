"""Costs of actions and transfers: one number, per stage, per stage and micro-batch."""

import dataclasses
import re

import pytest

from jpipe.schedules import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    Skip,
    gpipe,
    one_f_one_b,
    zb_v,
)


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_bandwidth():
    # The boundary of stage 1 has 8 bytes: 0.5 + 8 / 4 = 2.5. Its gradient has 6:
    # 0.5 + 6 / 4 = 2. The input of stage 0 travels to nobody.
    costs = Costs(
        latency=0.5, bandwidth=4.0, boundary_bytes=[100, 8], cotangent_bytes=[100, 6]
    )
    timeline = one_f_one_b(2, 2).simulate(costs)
    starts = {str(action): start for action, start in timeline.start.items()}
    assert starts == {
        **{"0F0": 0.0, "0F1": 1.0, "1F0": 3.5, "1B0": 4.5, "1F1": 6.5, "1B1": 7.5},
        **{"0B0": 8.5, "0B1": 11.5},
    }
    assert timeline.makespan == 13.5
    assert timeline.idle == (7.5, 7.5)


def test_a_transfer_that_does_not_overlap_keeps_both_ranks_busy_for_half_of_its_time():
    # 0.5 + 8 / 4 = 2.5 there, 1.25 of each rank; 0.5 + 6 / 4 = 2 back, 1 of each.
    costs = Costs(
        latency=0.5,
        bandwidth=4.0,
        overlap=False,
        boundary_bytes=[100, 8],
        cotangent_bytes=[100, 6],
    )
    timeline = one_f_one_b(2, 2).simulate(costs)
    starts = {str(action): start for action, start in timeline.start.items()}
    # F takes 1 + 1.25 on both ranks, B 2 + 1.
    assert starts == {
        **{"0F0": 0.0, "0F1": 2.25, "1F0": 2.25, "1B0": 4.5, "1F1": 7.5, "1B1": 9.75},
        **{"0B0": 7.5, "0B1": 12.75},
    }
    assert timeline.makespan == 15.75
    assert timeline.idle == (5.25, 5.25)
    # Between stages of one rank nothing is sent.
    one_rank = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert one_rank.simulate(costs).makespan == 6.0


def test_text_shows_transfers_that_keep_a_rank_from_computing():
    costs = Costs(boundary_bytes=8, cotangent_bytes=4, bandwidth=4, overlap=False)
    timeline = gpipe(2, 1).simulate(costs)
    # A column is 0.5: F takes 1, its transfer 1 of each rank; B 2, its transfer 0.5.
    assert timeline.to_text().splitlines() == [
        "rank 0 |F0 F0 -  -  .  .  .  .  .  .  .  .  .  -  B0 B0 B0 B0|",
        "rank 1 |.  .  .  .  -  -  F0 F0 B0 B0 B0 B0 -  .  .  .  .  . |",
    ]


def test_the_times_that_are_not_given_follow_from_the_others():
    for costs, expected in (
        (Costs(), [1, 2, 1, 1]),
        (Costs(3, 5, 1), [3, 5, 1, 4]),
        (Costs(3, 5, 6), [3, 5, 6, 0]),
        (Costs(3, 5, None, 1), [3, 5, 2.5, 1]),
        (Costs((0, (9, 9, 3)), 5, [0, [8, 8, 1]]), [3, 5, 1, 4]),
    ):
        assert [costs.of(Action(op, 1, 2)) for op in "FBIW"] == expected


def test_actions_wait_for_what_skips_the_ranks_between():
    skip = Skip(0, 2, 10, 5)
    costs = Costs(1.0, 1.0, skips=(skip,), bandwidth=1.0, boundary_bytes=0)
    timeline = gpipe(3, 1).simulate(costs)
    # 0F0 ends at 1 and its skip takes 10; 2B0 ends at 13 and its gradient takes 5.
    assert timeline.start[Action("F", 2, 0)] == 11
    assert timeline.start[Action("B", 0, 0)] == 18
    near = zb_v(1, 1).simulate(dataclasses.replace(costs, skips=(Skip(0, 1, 9, 9),)))
    assert near.makespan == 4  # nothing moves within a rank


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs([1, 1, 1]), ["they are for 3 stages, there are 2"]),
        (
            Costs([1, -1], [1, 2, 3], exchange=[[1, 1], 2]),
            [
                "forward[1]=-1 is not 0 or more and finite",
                "exchange[0] is a list, needs a number",
                "costs are for different numbers of stages: forward: 2, backward: 3, "
                "exchange: 2",
            ],
        ),
        (
            Costs(None, True, residual_bytes=[None, 1]),
            [
                "forward is a NoneType, needs a number or a list of them",
                "backward is a bool, needs a number or a list of them",
                "residual_bytes[0] is a NoneType, needs a number or a list of them",
            ],
        ),
        (Costs([[1, 2], [1, 2]]), [f"forward[{s}] has 2 entries" for s in (0, 1)]),
        (
            Costs(skips=(Skip(0, 2, 1, 1), Skip(1, 0, 1, -1), Skip(1, 1, 1, 1))),
            [
                "skips[0] goes from stage 0 to 2, needs a later stage of 2",
                "skips[1] goes from stage 1 to 0, needs a later stage of 2",
                "skips[1].cotangent_bytes=-1 is not 0 or more and finite",
                "skips[2] goes from stage 1 to 1, needs a later stage of 2",
            ],
        ),
    ],
)
def test_costs_of_other_stages_and_what_is_no_cost_are_refused(costs, says):
    lines = "".join(f"\n  \\* {re.escape(line)}.*" for line in says)
    schedule = gpipe(2, 3)
    with pytest.raises(ScheduleError, match=f"^gpipe: costs cannot be used:{lines}$"):
        schedule.simulate(costs)
    with pytest.raises(TypeError, match="costs is a list, needs a jpipe"):
        schedule.simulate([1, 2])  # pyright: ignore[reportArgumentType]

"""What actions and transfers cost: given as one number, per stage, per micro-batch."""

import dataclasses
import re

import pytest

from jpipe.schedules import (
    Action,
    Costs,
    ScheduleError,
    Skip,
    compare,
    fit,
    gpipe,
    interleaved,
    lower_bound,
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


def test_the_times_that_are_not_given_follow_from_the_others():
    for costs, expected in (
        (Costs(), [1, 2, 1, 1]),
        (Costs(3, 5, 1), [3, 5, 1, 4]),
        (Costs(3, 5, 6), [3, 5, 6, 0]),
        (Costs(3, 5, None, 1), [3, 5, 2.5, 1]),
        (Costs((0, (9, 9, 3)), 5, [0, [8, 8, 1]]), [3, 5, 1, 4]),
    ):
        assert [costs.of(Action(op, 1, 2)) for op in "FBIW"] == expected


def test_costs_may_differ_by_stage_and_by_microbatch():
    # Stage 0 takes 1, 2 and 4 for its forwards, stage 1 always 3; their backwards 5.
    costs = Costs(forward=[[1, 2, 4], 3], backward=5)
    timeline = gpipe(2, 3).simulate(costs)
    ends = {str(action): end for action, end in timeline.end.items()}
    assert [ends[f"0F{i}"] for i in range(3)] == [1, 3, 7]
    assert [ends[f"1F{i}"] for i in range(3)] == [4, 7, 10]
    assert [ends[f"0B{i}"] for i in range(3)] == [20, 25, 30]
    assert timeline.busy == (22, 24)
    assert timeline.bottleneck == 1


def test_the_costs_of_a_chunk_are_its_share_of_those_of_a_rank():
    kept = Costs(latency=1.5, bandwidth=9.0, boundary_bytes=30, extra_bytes=36)
    whole = dataclasses.replace(kept, forward=6.0, input_grad=3.0, parameter_bytes=120)
    assert whole.per_chunk(1) is whole
    assert whole.per_chunk(2) == dataclasses.replace(
        kept,
        forward=3.0,
        backward=1.0,
        input_grad=1.5,
        residual_bytes=0.5,
        pending_bytes=0.5,
        parameter_bytes=60,
    )


@pytest.mark.parametrize(
    ("costs", "fields"),
    [
        (Costs([1.0, 2.0], (3.0, 4.0)), "forward, backward"),
        (Costs(residual_bytes=[1, 2]), "residual_bytes"),
        (Costs(boundary_bytes=[[1, 2], [3, 4]]), "boundary_bytes"),
    ],
)
def test_costs_per_stage_cannot_be_cut_into_chunks(costs, fields):
    says = f"costs per stage ({fields}) do not say what the stages of a schedule with 2"
    with pytest.raises(ValueError, match=f"^{re.escape(says)} stages per rank cost"):
        costs.per_chunk(2)
    with pytest.raises(ValueError, match="costs are for 2 stages, interleaved has 4"):
        compare([gpipe(2, 2), interleaved(2, 2)], costs)
    assert costs.per_chunk(1) is costs


def test_a_forward_that_takes_no_time_does_not_hold_up_its_rank():
    # Where the stage with the loss runs F and B as one program, its F takes no time,
    # and under GPipe its first B need not wait until all inputs are there.
    costs = Costs(forward=[1.0, 0.0], backward=[2.0, 3.0])
    timeline = gpipe(2, 3).simulate(costs)
    assert timeline.start[Action("B", 1, 0)] == 1.0
    assert timeline.makespan == 1.0 + 3 * 3.0 + 2.0


class TestSkipTransfers:
    """A skip connection moves bytes from rank to rank, past those between."""

    def costs(self, size, **options):
        skip = Skip(0, 2, size, options.pop("back", size))
        return Costs(forward=1.0, backward=1.0, skips=(skip,), **options)

    def test_a_forward_waits_for_its_skip(self):
        # F0 ends at 1; its skip takes 10; the neighbour's result is there at 2.
        timeline = gpipe(3, 1).simulate(self.costs(10, back=0, bandwidth=1.0))
        assert timeline.start[Action("F", 2, 0)] == 11
        assert timeline.makespan == 11 + 1 + 3

    def test_a_backward_waits_for_the_gradient_of_its_skip(self):
        costs = dataclasses.replace(self.costs(0, back=10), bandwidth=1.0)
        timeline = gpipe(3, 1).simulate(costs)
        # B of the last stage ends at 4; its gradient reaches the first at 14.
        assert timeline.end[Action("B", 2, 0)] == 4
        assert timeline.start[Action("B", 0, 0)] == 14

    def test_latency_counts_and_nothing_moves_within_a_rank(self):
        far = gpipe(3, 1).simulate(self.costs(1, latency=3.0))
        assert far.start[Action("F", 2, 0)] == 1 + 3 + 1 + 3
        near = zb_v(1, 1).simulate(
            Costs(forward=1.0, backward=1.0, skips=(Skip(0, 1, 99, 99),), bandwidth=1.0)
        )
        free = zb_v(1, 1).simulate(Costs(forward=1.0, backward=1.0))
        assert near.makespan == free.makespan


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (Costs([1, 1, 1]), ["they are for 3 stages, there are 2"]),
        (Costs([1]), ["they are for 1 stages, there are 2"]),
        (
            Costs([1, -1], [1, 2, 3], exchange=[[1, 1], 2]),
            [
                "forward[1]=-1 is not 0 or more and finite",
                "exchange[0] is a list, needs a number",
                "costs are for different numbers of stages: forward: 2, backward: 3, "
                "exchange: 2",
            ],
        ),
        (Costs([[1, 2], [1, 2]]), [f"forward[{s}] has 2 entries" for s in (0, 1)]),
        (
            Costs(skips=(Skip(0, 2, 1, 1), Skip(1, 0, 1, -1))),
            [
                "skips[0] goes from stage 0 to 2, needs a later stage of 2",
                "skips[1] goes from stage 1 to 0, needs a later stage of 2",
                "skips[1].cotangent_bytes=-1 is not 0 or more and finite",
            ],
        ),
    ],
)
def test_costs_of_other_stages_and_what_is_no_cost_are_refused(costs, says):
    lines = "".join(f"\n  \\* {re.escape(line)}.*" for line in says)
    schedule = gpipe(2, 3)
    for use in (schedule.simulate, lambda costs: schedule.validate(costs=costs)):
        with pytest.raises(
            ScheduleError, match=f"^gpipe: costs cannot be used:{lines}$"
        ):
            use(costs)
    with pytest.raises(TypeError, match="costs is a list, needs a jpipe"):
        schedule.simulate([1, 2])  # pyright: ignore[reportArgumentType]


def test_a_skip_connection_ends_at_a_stage_that_is_there():
    for use in (fit, lower_bound):
        with pytest.raises(ScheduleError, match="from stage 0 to 2, needs a later"):
            use(Costs(skips=(Skip(0, 2, 1, 1),)), 2, 3)


def test_times_that_no_float_can_say_are_refused():
    huge = Costs(1e308, 1e308)
    for run in (gpipe(2, 2).simulate, lambda costs: fit(costs, 2, 2)):
        with pytest.raises(ScheduleError, match="takes longer than a float can say"):
            run(huge)
    assert gpipe(2, 2).simulate(Costs(5e-324, 5e-324)).makespan > 0

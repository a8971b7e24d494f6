"""A plan of replicated stages as a value: why, simulated, saved."""

import json
import math
import random

import pytest

import jpipe
from jpipe.planning._profile import LayerProfile, Profile
from jpipe.planning._replicated import Replicated
from jpipe.schedules import Action, Schedule, ScheduleError

from .chains import figure, profile
from .published import PUBLISHED, read


def between(plan):
    """From one micro-batch to the next, in the middle of many, simulated."""
    turn = math.lcm(*plan.replicas)
    count = max(60 * sum(plan.replicas), 3 * turn)
    timeline = plan.simulate(count, each=True)
    first, last = count // 3, count // 3 + count // 3 // turn * turn
    ends = [timeline.end[Action("B", 0, i)] for i in (first, last)]
    return (ends[1] - ends[0]) / (last - first)


@pytest.mark.parametrize(
    ("name", "devices", "straight", "transfers", "seconds", "faster"), PUBLISHED
)
def test_what_is_planned_is_what_is_simulated(
    name, devices, straight, transfers, seconds, faster
):
    """Published plans, bound by stages, exchanges or links; to published digits.

    What the plan says itself the simulation has but for rounding: some thousand times
    are added up.
    """
    del faster
    plan = jpipe.replicate(
        read(f"pipedream/{name}"),
        devices,
        bandwidth=1e9,
        straight=straight,
        transfers=transfers,
    )
    simulated = between(plan)
    assert simulated == pytest.approx(plan.seconds, rel=1e-11)
    assert simulated == pytest.approx(seconds, abs=6e-10, rel=0)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_planned_for_a_random_chain_is_what_is_simulated(seed):
    rng = random.Random(seed)
    given = profile(rng, rng.randint(1, 6), skips=0)
    bandwidth = rng.choice([5.0, 50.0, 500.0, None])
    plan = jpipe.replicate(given, rng.randint(1, 7), bandwidth=bandwidth)
    assert between(plan) == pytest.approx(plan.seconds, rel=1e-9, abs=1e-12)


def test_the_figure_of_pipedream():
    plan = figure()
    assert plan.seconds == 2.0
    assert plan.alone == 16.0
    timeline = plan.simulate()
    assert timeline == plan.simulate(12)
    assert timeline.makespan == 38.0
    assert timeline.replicas == ((0, 1, 2), (3, 4), (5, 6), (7,))
    for action in timeline.start:
        replica = action.microbatch % plan.replicas[action.stage]
        rank = timeline.replicas[action.stage][replica]
        assert action in timeline.rows[rank]
    assert Schedule.from_json(plan.schedule().to_json()) == plan.schedule()
    assert plan.schedule().validate().rows == timeline.rows


def test_exchanges_are_once_or_for_each_micro_batch():
    plan = figure(exchange=(2.0, 1.0, 3.0, 0.0))
    # Per micro-batch as PipeDream counts: there and back, by turns.
    assert plan.turns == (2 + 4 / 3, 3.0, 5.0, 2.0)
    assert plan.seconds == 5.0
    assert plan.exposed == 3.0
    assert plan.bottleneck == 2
    # Once, after the last backward of each stage: at 38, 35, 33.
    once = plan.simulate()
    assert [(x.stage, x.start, x.end) for x in once.exchanges] == [
        (0, 38.0, 40.0),
        (1, 35.0, 36.0),
        (2, 33.0, 36.0),
    ]
    assert once.makespan == 40.0
    assert plan.simulate(each=True).exchanges == ()
    assert between(plan) == pytest.approx(5.0)


def test_a_link_carries_one_thing_at_a_time():
    slow = figure(boundary_bytes=(0.0, 0.0, 3.0, 0.0), cotangent_bytes=(0.0,) * 4)
    assert slow.links == (0.0, 1.5, 0.0)
    assert between(slow) == pytest.approx(2.0)
    slower = figure(
        boundary_bytes=(0.0, 0.0, 3.0, 0.0), cotangent_bytes=(0.0, 0.0, 4.0, 0.0)
    )
    assert slower.seconds == 3.5
    assert slower.bottleneck is None
    assert between(slower) == pytest.approx(3.5)
    # One after the other, by hand: a stage on one device each, one micro-batch.
    both = figure(
        (1, 1),
        count=2,
        boundary_bytes=(0.0, 5.0),
        cotangent_bytes=(0.0, 7.0),
    ).simulate()
    starts = {str(action): time for action, time in both.start.items()}
    assert starts == {
        **{"0F0": 0.0, "0F1": 1.0, "1F0": 6.0, "1B0": 7.0},
        # The second goes after the first: from 6 to 11; then the gradients.
        **{"1F1": 11.0, "1B1": 12.0, "0B0": 18.0, "0B1": 25.0},
    }


def test_the_devices_of_a_step_share_micro_batches():
    plan = figure((2, 1), "step", count=4, exchange=(3.0, 0.0))
    assert plan.replicas == (2, 1)
    assert plan.seconds == 2 + 2 + 3 * 2 + 3
    timeline = plan.simulate()
    assert timeline.rows == jpipe.schedules.one_f_one_b(2, 4).rows
    assert timeline.makespan == plan.seconds
    assert timeline.name == "1f1b, a rank for each stage of 2-1 devices"
    with pytest.raises(ValueError, match="each=True is for plans of the steady state"):
        plan.simulate(each=True)


@pytest.mark.parametrize(
    ("name", "bandwidth", "longer"),
    [
        # The one link is slower than the stages, which the objective does not count.
        ("vgg-19-pbs-32", 1e9, (1.17, 1.18)),
        # Else it is an estimate from above or below: what is exposed of exchanges, and
        # how stages of about the same time wait for each other.
        ("vgg-19-pbs-32", 1e10, (0.96, 0.97)),
        ("amoeba-18-pbs-8", 1e9, (0.98, 0.99)),
        ("bert-24-pbs-6", 1e9, (1.01, 1.02)),
        ("xlnet-24-pbs-1", 1e9, (1.0 - 1e-12, 1.0 + 1e-12)),
    ],
)
def test_a_step_takes_about_what_its_objective_says(name, bandwidth, longer):
    plan = jpipe.replicate(
        read(f"dapple/{name}"),
        8,
        bandwidth=bandwidth,
        objective="step",
        num_microbatches=16,
    )
    ratio = plan.simulate().makespan / plan.seconds
    assert longer[0] <= ratio <= longer[1]
    says = f"a step of 16 micro-batches, simulated: {plan.simulate().makespan:.6g} s"
    assert says in str(plan)


def test_a_plan_says_why():
    plan = figure(exchange=(2.0, 1.0, 3.0, 0.0), boundary_bytes=(0.0, 4.0, 4.0, 1.0))
    assert str(plan).splitlines()[:-5] == [
        "5 s a micro-batch on 8 devices, 3.200 times as fast as one",
        "with one device per stage 6 s, 1.200 times as long",
        "stage 2 holds it up, 3 s of it exchange of gradients",
        f"a step of 12 micro-batches, simulated: {plan.simulate().makespan:.6g} s, "
        f"2 s of it exchange",
    ]
    assert str(plan).splitlines()[-5:] == [
        "stage  layers  devices  computes  exchange  transfers",
        "    0  0 to 0        3       2 s       2 s",
        "    1  1 to 1        2       2 s       1 s        2 s",
        "    2  2 to 2        2       2 s       3 s        2 s",
        "    3  3 to 3        1       2 s       0 s        1 s",
    ]
    plan = figure(boundary_bytes=(0.0, 4.0, 8.0, 1.0))
    assert "transfers between stages 1 and 2 hold it up" in str(plan)


def test_single_devices_per_stage_are_what_it_is_compared_with():
    given = read("pipedream/alexnet")
    plan = jpipe.replicate(given, 4, bandwidth=1e9)
    straight = jpipe.replicate(given, 4, bandwidth=1e9, straight=True)
    assert plan.straight == straight.straight
    assert straight.straight == pytest.approx(straight.seconds, rel=1e-12)
    assert straight.seconds > plan.seconds
    # More devices than layers: as many as there are layers.
    one = Profile((LayerProfile("a", 1.0, 1.0),))
    assert jpipe.replicate(one, 3).straight == 2.0


@pytest.mark.parametrize("objective", ["steady", "step"])
@pytest.mark.parametrize("bandwidth", [1e9, None])
def test_json_keeps_all_of_it(objective, bandwidth):
    plan = jpipe.replicate(
        read("pipedream/vgg16"),
        4,
        bandwidth=bandwidth,
        objective=objective,
        num_microbatches=8,
    )
    again = Replicated.from_json(plan.to_json())
    assert again == plan
    assert again.stages[0].replicas == plan.stages[0].replicas
    assert str(again) == str(plan)
    # Any reader of JSON reads it: infinity is none of its numbers.
    json.loads(plan.to_json(), parse_constant=pytest.fail)


def changed(**change):
    return json.dumps(json.loads(figure().to_json()) | change)


COSTS = json.loads(figure().to_json())["costs"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["Expecting value", "needs the text"]),
        ("[1]", ["AttributeError"]),
        ("{}", ["missing: stages, costs, num_devices, objective, straight"]),
        ("[" * 10**5, ["RecursionError"]),
        (changed(more=1), ["surplus: ['more']"]),
        (changed(costs=3), ["TypeError"]),
        (
            changed(costs=COSTS | {"forward": [[1, 2], 2, 2, 1]}),
            ["costs: forward has lists in it; needs numbers"],
        ),
        (changed(costs={"forward": [1]}), ["costs: missing: backward, boundary_bytes"]),
        (changed(stages=[[0, 1]]), ["TypeError"]),
        (changed(stages=[]), ["stages: there are none", "is not of 0 stages"]),
        (
            changed(
                stages=[[0, 1, 3], [2, 3, 2], [1, 2, True], [2, 2, 1]],
                num_devices=0,
                objective="fast",
                num_microbatches=1.5,
                straight="long",
                costs=COSTS | {"forward": [1, 2, 3], "backward": [1, 2, -3, "a"]},
            ),
            [
                "stages[1]=[2, 3, 2]: needs its first layer, 1,",
                "stages[2]=[1, 2, True]: needs its first layer, 1,",
                "stages[3]=[2, 2, 1]: needs its first layer, 1,",
                "costs: forward is not of 4 stages",
                "costs: backward[2]=-3 is not 0 or more and finite",
                "costs: backward[3] is a str, needs a number",
                "num_devices=0; needs an int of at least 1",
                "objective='fast'; needs 'steady' or 'step'",
                "num_microbatches=1.5; needs an int of at least 1",
                "straight='long'; needs seconds",
            ],
        ),
        (changed(num_devices=7), ["num_devices=7; the stages have 8"]),
        (
            changed(objective="step", num_microbatches=None),
            ["objective='step' needs num_microbatches"],
        ),
    ],
)
def test_a_text_that_is_something_else_is_refused(text, says):
    with pytest.raises(
        ValueError, match=r"^no plan as Replicated\.to_json writes it: "
    ) as refusal:
        Replicated.from_json(text)
    assert [line for line in says if line not in str(refusal.value)] == []


def test_numbers_of_micro_batches_are_checked():
    for wrong in (0, 2.5, "3"):
        with pytest.raises(ScheduleError, match=f"num_microbatches={wrong!r}: must"):
            figure().simulate(wrong)
    # Twice as many as are in flight, where nobody said.
    assert figure(count=None).schedule().num_microbatches == 18

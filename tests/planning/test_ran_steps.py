"""What times of steps that ran say about layers, against profiles with known factors.

Private names are imported because these times are those of a machine at public doors:
`jpipe.tune` measures them.
"""

import dataclasses
import random

import pytest

from jpipe import schedules
from jpipe.planning._forecast import evaluate
from jpipe.planning._ran_steps import LayerFactors, RanStep, learn_times, scale_layers
from jpipe.planning._space import (
    Choice,
    Hardware,
    MeshShape,
    PlanChoices,
    SearchSpace,
)

from .chains import random_chain

NUM_LAYERS = 6
COUNTS = (1, 2, 4, 8, 16)


def random_space(seed=0):
    """A chain of layers, with the same times for micro-batches of all sizes."""
    chain = random_chain(random.Random(seed), NUM_LAYERS, action_seconds=0.5)
    return SearchSpace(
        profiles=dict.fromkeys(COUNTS, chain),
        optimizer_bytes=[0] * NUM_LAYERS,
        hardware=Hardware(4),
        choices=PlanChoices(schedule_names=("gpipe",), remat_modes=("none",)),
        mesh_shapes=tuple(map(MeshShape, COUNTS)),
    )


def choose(balance, num_microbatches=4, *, build=schedules.gpipe, num_shards=1):
    num_stages = len(balance)
    schedule = build(num_stages, num_microbatches)
    return Choice(balance, ("none",) * num_stages, schedule, num_shards)


def looped(num_stages, num_microbatches):
    return schedules.interleaved(num_stages // 2, num_microbatches)


def scale_times(space, factors):
    """The space whose layers take so many times as long.

    Args:
      space: the space.
      factors: number of micro-batches -> factors of each layer.
    """
    profiles = {
        count: scale_layers(space.profiles[count], factors[count]) for count in factors
    }
    return dataclasses.replace(space, profiles=profiles)


def take_step(space, choice, seconds=None):
    """A step whose actions take the times of a space."""
    costs = evaluate(space, choice).costs
    actions = [action for row in choice.schedule.rows for action in row]
    action_seconds = {x: costs.of(x) for x in actions if costs.of(x) > 0}
    return RanStep(choice, action_seconds, seconds)


def assert_times(space, expected_space, choice, rel=1e-9):
    found = evaluate(space, choice).costs
    expected = evaluate(expected_space, choice).costs
    for action in (x for row in choice.schedule.rows for x in row):
        assert found.of(action) == pytest.approx(expected.of(action), rel=rel)


def test_the_stages_of_a_step_take_their_measured_times():
    space = random_space()
    rng = random.Random(0)
    factors = [
        LayerFactors(rng.uniform(0.5, 2.0), rng.uniform(0.5, 2.0))
        for _ in range(NUM_LAYERS)
    ]
    machine = scale_times(space, dict.fromkeys(COUNTS, factors))
    choice = choose((2, 4))
    assert_times(learn_times(space, [take_step(machine, choice)]), machine, choice)


def test_layers_of_several_steps_take_the_geometric_mean_of_their_factors():
    space = random_space()
    steps = []
    for balance, scale in {(3, 3): 2.0, (2, 4): 8.0}.items():
        factors = [LayerFactors(scale, scale, scale)] * NUM_LAYERS
        machine = scale_times(space, dict.fromkeys(COUNTS, factors))
        steps.append(take_step(machine, choose(balance)))
    fourfold = [LayerFactors(4.0, 4.0, 4.0)] * NUM_LAYERS
    machine = scale_times(space, dict.fromkeys(COUNTS, fourfold))
    assert_times(learn_times(space, steps), machine, choose((1, 5)))


def test_sizes_between_two_that_ran_take_factors_between_theirs():
    space = random_space()
    factors = {
        count: [LayerFactors(scale, 3 * scale, 3 * scale)] * NUM_LAYERS
        for count, scale in {1: 2, 2: 2, 4: 4, 8: 8, 16: 8}.items()
    }
    machine = scale_times(space, factors)
    # Fewer devices share a micro-batch in these than in the last one.
    steps = [take_step(machine, choose((3, 3), count)) for count in (8, 2)]
    steps.append(take_step(space, choose((3, 3), num_shards=2)))
    learned = learn_times(space, steps)
    for count in COUNTS:
        assert_times(learned, machine, choose((2, 4), count))


def test_whole_backwards_and_halves_have_factors_of_their_own():
    space = random_space()
    factors = [LayerFactors(1.0, 2.0, 5.0)] * NUM_LAYERS
    machine = scale_times(space, dict.fromkeys(COUNTS, factors))
    whole = choose((2, 2, 2))
    halves = choose((2, 2, 2), build=schedules.zb_h1)
    steps = [take_step(machine, halves), take_step(machine, whole)]
    for listed in (steps, steps[::-1]):
        learned = learn_times(space, listed)
        # In halves one time is known of the last forward and its backward.
        assert_times(learned, machine, whole, rel=0.01)
        assert_times(learned, machine, halves, rel=0.01)
    # What no step had takes the factor of the other.
    learned = learn_times(space, steps[1:])
    doubled = [LayerFactors(1.0, 2.0, 2.0)] * NUM_LAYERS
    assert_times(learned, scale_times(space, dict.fromkeys(COUNTS, doubled)), halves)


def test_steps_of_several_devices_are_slower_by_the_median_of_those_of_their_size():
    space = random_space()
    choices = {
        choose((3, 3)): 2.0,
        choose((2, 4)): 3.0,
        choose((4, 2)): 10.0,
        choose((6,)): 50.0,
        choose((3, 3), 8): 4.0,
        choose((2, 1, 2, 1), build=looped): 7.0,
    }
    steps = [
        take_step(space, choice, ratio * evaluate(space, choice).seconds)
        for choice, ratio in choices.items()
    ]
    steps.append(take_step(space, choose((1, 5))))
    learned = learn_times(space, steps)
    expected_ratios = {
        choose((5, 1)): 3.0,
        choose((2, 2, 2)): 3.0,
        choose((6,)): 1.0,
        choose((5, 1), 8): 4.0,
        choose((1, 2, 1, 2), build=looped): 7.0,
        # None of this size ran: the median of all of several devices.
        choose((5, 1), 2): 4.0,
        # None ran in which two devices share a micro-batch.
        choose((5, 1), num_shards=2): 1.0,
    }
    for choice, ratio in expected_ratios.items():
        expected = ratio * evaluate(space, choice).seconds
        seconds = evaluate(learned, choice).seconds
        # Fused forwards save the seconds of a call, which are the same in all steps.
        assert seconds == pytest.approx(expected, rel=0.05)
    # Learning again begins without the slowdowns.
    again = learn_times(learned, steps).slowdowns
    assert again.by_size == pytest.approx(learned.slowdowns.by_size)
    assert again.by_num_shards == pytest.approx(learned.slowdowns.by_num_shards)

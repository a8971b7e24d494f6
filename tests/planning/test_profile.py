"""What stages cost, added up from their layers."""

import dataclasses
import math

import pytest

from jpipe import schedules
from jpipe.planning._profile import LayerProfile, Profile, SkipProfile
from jpipe.schedules import Skip


def layer(name, scale, **fields):
    return LayerProfile(
        name,
        forward=1.0 * scale,
        backward=3.0 * scale,
        param_bytes=100 * scale,
        state_bytes=scale,
        output_bytes=10 * scale,
        cotangent_bytes=5 * scale,
        kept_bytes={"none": 40 * scale, "min_cut": 20 * scale},
        **fields,
    )


GIVEN = Profile(
    (
        layer("a", 1, input_grad=2.0, weight_grad=0.5),
        layer("b", 2),
        layer("c", 3, weight_grad=4.0),
        layer("d", 4, input_grad=5.0),
    ),
    input_bytes=7,
    skips=(
        SkipProfile("far", 0, 3, 11, 12),
        SkipProfile("b", 1, 3, 20, 10, is_output=True),
        SkipProfile("b", 1, 2, 20, 10, is_output=True),
        SkipProfile("near", 2, 3, 13, 14),
    ),
    ties=((3, 0),),
)


def test_a_stage_costs_what_its_layers_do():
    costs = GIVEN.costs([2, 2], remat="none", bandwidth=100.0, latency=0.5)
    assert costs.forward == [3.0, 7.0]
    assert costs.backward == [9.0, 21.0]
    # What is not known is half, or the rest.
    assert costs.input_grad == [2.0 + 3.0, 5.0 + 5.0]
    assert costs.weight_grad == [0.5 + 3.0, 4.0 + 7.0]
    assert (costs.latency, costs.bandwidth) == (0.5, 100.0)
    assert costs.boundary_bytes == [7, 20]
    assert costs.cotangent_bytes == [0, 10]
    assert costs.residual_bytes == [120, 280]
    assert costs.pending_bytes == [120, 280]
    # The last has a copy of the tied parameters of the first.
    assert costs.parameter_bytes == [303, 707 + 100]
    assert costs.accumulator_bytes == [300, 700 + 100]
    # The boundary brings what both layers behind it read.
    assert costs.skips == (Skip(0, 1, 11, 12),)
    assert GIVEN.costs([4]).bandwidth == math.inf
    assert GIVEN.costs([4]).skips == ()


def test_one_array_goes_to_a_stage_once():
    assert GIVEN.costs([1, 1, 2], remat="none").skips == (Skip(0, 2, 11, 12),)
    assert GIVEN.costs([1, 1, 1, 1], remat="none").skips == (
        Skip(0, 3, 11, 12),
        Skip(1, 3, 20, 10),
        Skip(2, 3, 13, 14),
    )


def test_full_remat_keeps_what_comes_in_and_computes_forwards_again():
    costs = GIVEN.costs([1, 1, 2], remat=["full", "min_cut", "full"])
    assert costs.backward == [4.0, 6.0, 28.0]
    assert costs.input_grad == [3.0, 3.0, 17.0]
    assert costs.residual_bytes == [7, 40, 20 + 11]
    assert costs.pending_bytes == [20, 40, 140]
    assert costs.weight_grad == GIVEN.costs([1, 1, 2], remat="none").weight_grad


def test_costs_are_what_schedules_are_simulated_with():
    costs = GIVEN.costs([2, 2], remat="none")
    timeline = schedules.one_f_one_b(2, 4).simulate(costs)
    assert timeline.makespan == 3 + 4 * 28 + 9
    assert schedules.gpipe(2, 4).simulate(costs).peak_bytes[1] >= 807 + 800 + 4 * 280


def test_all_faults_are_told_at_once():
    with pytest.raises(ValueError, match="profile: ") as refusal:
        GIVEN.costs([2, 1], remat=["dots", "none", "none"], bandwidth=0, latency=-1)
    for says in (
        "balance=[2, 1]: its sum is 3, there are 4 layers",
        "remat has 3 entries for 2 stages; give one for all or one per stage",
        "what remat='dots' keeps is not in the profile: choose 'full', 'min_cut', "
        "'none'",
        "bandwidth=0; needs bytes per second, more than 0",
        "latency=-1; needs a number, finite and not negative",
    ):
        assert says in str(refusal.value)
    with pytest.raises(ValueError, match="every stage needs at least one layer"):
        GIVEN.costs([4, 0])
    bare = dataclasses.replace(
        GIVEN, layers=tuple(dataclasses.replace(x, kept_bytes={}) for x in GIVEN.layers)
    )
    assert bare.costs([4], remat="full").residual_bytes == [7]
    with pytest.raises(ValueError, match="remat='min_cut' keeps is not in the profile"):
        bare.costs([4])

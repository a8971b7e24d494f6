"""What stages cost, added up from their layers; profiles in files."""

import dataclasses
import json
import math
import random

import pytest

from jpipe.planning._layer_profile import MeasuredLink
from jpipe.planning._traced_layers import check_fingerprint
from jpipe.schedules import Skip

from .chains import LayerProfile, Profile, SkipProfile, random_chain


def layer(name, scale, **fields):
    return LayerProfile(
        name,
        forward=1.0 * scale,
        backward=3.0 * scale,
        param_bytes=100 * scale,
        state_bytes=scale,
        output_bytes=10 * scale,
        cotangent_bytes=5 * scale,
        residual_bytes={"none": 40 * scale, "min_cut": 20 * scale},
        **fields,
    )


GIVEN = Profile(
    (
        layer("a", 1, input_grad=2.0, weight_grad=0.5),
        layer("b", 2),
        layer("c", 3),
        layer("d", 4, input_grad=5.0, weight_grad=7.0),
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
    # What is not known is half.
    assert costs.input_grad == [2.0 + 3.0, 4.5 + 5.0]
    assert costs.weight_grad == [0.5 + 3.0, 4.5 + 7.0]
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


def test_a_stage_has_one_copy_of_parameters_that_several_of_its_layers_read():
    tied = dataclasses.replace(GIVEN, ties=((0, 2, 3),))
    assert tied.costs([2, 2]).parameter_bytes == [303, 707 + 100]
    assert tied.costs([2, 1, 1]).parameter_bytes == [303, 303 + 100, 404 + 100]


def test_full_remat_keeps_what_comes_in_and_computes_forwards_again():
    costs = GIVEN.costs([1, 1, 2], remat=["full", "min_cut", "full"])
    assert costs.backward == [4.0, 6.0, 28.0]
    assert costs.input_grad == [3.0, 3.0, 16.5]
    assert costs.residual_bytes == [7, 40, 20 + 11]
    assert costs.pending_bytes == [20, 40, 140]
    assert costs.weight_grad == GIVEN.costs([1, 1, 2], remat="none").weight_grad


def test_costs_of_stages_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="profile: ") as refusal:
        GIVEN.costs([2, 1], latency=-1)
    for says in (
        "balance=[2, 1]: its sum is 3, there are 4 layers",
        "latency=-1; needs a number, finite and not negative",
    ):
        assert says in str(refusal.value)
    with pytest.raises(ValueError, match="remat has 3 entries for 2 stages; give one"):
        GIVEN.costs([2, 2], remat=["none"] * 3)
    bare = dataclasses.replace(
        GIVEN,
        layers=tuple(dataclasses.replace(x, residual_bytes={}) for x in GIVEN.layers),
    )
    assert bare.costs([4], remat="full").residual_bytes == [7]
    with pytest.raises(ValueError, match="remat='min_cut' keeps is not in the profile"):
        bare.costs([4])


def test_a_saved_profile_is_restored():
    given = dataclasses.replace(
        random_chain(random.Random(0), 6, num_skips=3, num_ties=1),
        fingerprint={"input": "f32[4]"},
        origin={"device": "cpu"},
        microbatch_size=4,
        action_seconds=0.25,
        link=MeasuredLink(0.5, 1e9, "cpu:0", "cpu:1"),
    )
    first = dataclasses.replace(
        given.layers[0], forward=1 / 3, input_grad=0.1, workspace_bytes=3, flops=1e30
    )
    given = dataclasses.replace(given, layers=(first, *given.layers[1:]))
    larger = dataclasses.replace(given, microbatch_size=9)
    given = dataclasses.replace(given, larger=larger)
    assert Profile.from_json(given.to_json()) == given


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": [{"name": "a"}]}, r"layers\[0\].forward is missing; layers"),
        ({"colour": "red"}, "colour is unknown"),
        ({"made": {"how": "measured"}}, "made is unknown"),
        ({"skips": [["a", 0, 9, 1, 1]]}, r"skips\[0\] is \['a', 0, .*needs an object"),
        ({"ties": [[0, 3]]}, r"ties\[0\]=\(0, 3\): needs numbers of layers, 0 to 2"),
        ({"origin": {"how": "estimated"}}, "KeyError: 'peak_flops'"),
        ({"link": [-1, 1, "a", "b"]}, "link.latency=-1; needs a number, finite and"),
        ({"larger": {"layers": []}}, "larger: layers is empty; needs at least one"),
        ({"input_bytes": -1}, "input_bytes=-1; needs a number, finite and not neg"),
    ],
)
def test_a_text_that_is_something_else_is_refused(change, says):
    fields = json.loads(random_chain(random.Random(0), 3, num_skips=1).to_json())
    with pytest.raises(ValueError, match=rf"no profile as Profile\.to_json .*{says}"):
        Profile.from_json(json.dumps(fields | change))
    with pytest.raises(ValueError, match="give its text, not its path"):
        Profile.from_json("profile.json")


def test_a_profile_of_another_model_is_refused_with_all_that_differs():
    fingerprint = {"layer 0": "a", "train": "True"}
    stale = Profile((), fingerprint=fingerprint)
    check_fingerprint(stale, dict(fingerprint))
    with pytest.raises(ValueError, match="of another model") as refusal:
        check_fingerprint(stale, {"layer 0": "b", "train": "True", "layer 1": "c"})
    assert str(refusal.value) == (
        "the profile is of another model:\n"
        "  * layer 0: 'a' in the profile, 'b' here\n"
        "  * layer 1: None in the profile, 'c' here\n"
        "Make a profile of this one; give jpipe.profile the same loss_fn=, targets=, "
        "trainable= and train= as jpipe.plan"
    )

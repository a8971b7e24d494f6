"""What `partition` is asked, where it makes no sense: all faults at once."""

import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import schedules
from jpipe.planning._partition import partition
from jpipe.planning._profile import LayerProfile, Profile

from .chains import profile

GIVEN = profile(random.Random(0), 6)
POLICY = jax.checkpoint_policies.everything_saveable


def says(*args, **question):
    with pytest.raises(ValueError, match="partition cannot cut this") as refusal:
        partition(*args, **question)
    return str(refusal.value)


def test_the_documented_answers():
    assert partition([1, 2, 3, 4, 5, 6], 3) == [3, 2, 1]
    # Several are as good: the most even one.
    assert partition([1] * 10, 4) == [2, 2, 3, 3]
    assert partition([0.1] * 10, 4) == [2, 2, 3, 3]
    assert partition(np.ones(10, np.float32), 4) == [2, 2, 3, 3]
    assert partition([0, 0, 0], 2) == partition([0.0] * 3, 2) == [1, 2]
    assert partition(jnp.ones(10), 4) == [2, 2, 3, 3]
    assert partition([5], 1) == [1]
    assert partition([1, 1, 1, 9], 2) == [3, 1]


def test_the_largest_and_the_smallest_costs():
    assert partition([5e-324] * 4, 2) == [2, 2]
    assert partition([1e300] * 4, 2, objective="step", num_microbatches=8) == [2, 2]
    message = says([1e307] * 4, 2, objective="step", num_microbatches=64)
    assert "costs: a step takes longer than a float can say" in message
    assert "than a float can say" in says([1e308] * 4, 2)


@pytest.mark.parametrize("costs", [[1, 2, 3], GIVEN], ids=["numbers", "a profile"])
@pytest.mark.parametrize(
    ("mode", "called"),
    [("nope", "'nope'"), (3, "3"), ([[], []], "[]"), (POLICY, "everything_saveable")],
)
def test_a_mode_that_is_unknown(costs, mode, called):
    message = says(costs, 2, remat=mode)
    assert f"remat: {called} is unknown: choose 'full', 'min_cut'" in message
    if costs is GIVEN:
        with pytest.raises(ValueError, match=re.escape(f"remat={called} keeps")):
            GIVEN.costs([3, 3], remat=mode)


def test_a_limit_that_is_none():
    free = partition(GIVEN, 2)
    for most in (float("inf"), 10**400, np.float32(1e9)):
        with warnings.catch_warnings(action="error"):
            assert partition(GIVEN, 2, max_bytes=most) == free
    assert "max_bytes=True; needs bytes" in says(GIVEN, 2, max_bytes=True)


def test_all_faults_are_told_at_once():
    message = says(
        [1.0, float("nan"), -1, "x", True],
        7,
        objective="fast",
        num_microbatches=0,
        bandwidth=-1,
        latency=float("inf"),
        max_bytes=5,
        together=[(1,), 3],
        cuts=[9, "a"],
        remat="full",
    )
    for fault in (
        "costs[1]=nan; needs a number, finite and not negative",
        "costs[2]=-1; needs a number, finite and not negative",
        "costs[3]='x' is a str; needs a number",
        "costs[4]=True is a bool; needs a number",
        "num_stages=7 is more than the 5 layers; each stage needs one",
        "objective='fast'; needs 'max' or 'step'",
        "num_microbatches=0; needs at least 1",
        "bandwidth=-1; needs bytes per second, more than 0",
        "latency=inf; needs a number, finite and not negative",
        "max_bytes=5 needs a Profile; the costs are numbers",
        "bandwidth=-1 needs a Profile",
        "remat='full' needs a Profile",
        "together: (1,); needs layers from 0 to 4, at least two",
        "together: 3; needs a sequence, such as together=[(0, 5)]",
        "cuts: 9; needs layers from 0 to 4",
        "cuts: 'a'; needs layers from 0 to 4",
    ):
        assert fault in message, fault


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ({"num_stages": 0}, "num_stages=0; needs at least 1"),
        ({"num_stages": 2.0}, "num_stages=2.0 is a float; needs an int"),
        ({"objective": "step"}, "objective='step' needs num_microbatches="),
        ({"schedule": "1f1b"}, "schedule='1f1b' needs num_microbatches="),
        (
            {"schedule": "2f2b", "num_microbatches": 4},
            "unknown schedule '2f2b': choose 'gpipe'",
        ),
        (
            {"schedule": "forward_only", "num_microbatches": 4},
            "schedule 'forward_only' has no backward",
        ),
        (
            {"schedule": schedules.gpipe(3, 4), "num_microbatches": 5},
            "3 stages, the pipeline has 2 and 4 micro-batches",
        ),
        ({"schedule": 7, "num_microbatches": 4}, "schedule=7 is a int; needs a name"),
        ({"remat": "dots", "max_bytes": 9}, "what remat='dots' keeps is not in the"),
        ({"remat": ["none"]}, "remat has 1 entries for 2 stages"),
        ({"max_bytes": [1, 2, 3]}, "max_bytes has 3 entries for 2 ranks"),
        ({"max_bytes": [1, -2]}, "max_bytes=-2; needs bytes, more than 0"),
        ({"max_bytes": float("nan")}, "max_bytes=nan; needs bytes, more than 0"),
        ({"cuts": [2, 4]}, "cuts=[2, 4] make 3 stages, num_stages=2"),
        (
            {"together": [(1, 3)], "cuts": [2]},
            "together: (1, 3) and cuts=[2]: with one stage per rank layers 1 to 3 "
            "have to be one stage",
        ),
        (
            {"together": [(0, 4), (3, 5)]},
            "leave 1 stages at most, num_stages=2; take fewer, or a schedule with "
            "several stages per rank, such as 'zb_v'",
        ),
    ],
)
def test_a_question_that_makes_no_sense(question, fault):
    message = says(GIVEN, **{"num_stages": 2, "remat": "none", **question})
    assert message.startswith("partition cannot cut this:\n  * ")
    assert fault in message


def test_a_profile_of_no_use():
    bad = Profile((LayerProfile("a", -1.0, 1.0), LayerProfile("b", 1.0, float("inf"))))
    message = says(bad, 2)
    assert "layer 0 (a): forward=-1.0; needs a number" in message
    assert "layer 1 (b): backward=inf; needs a number" in message
    assert "costs is empty" in says([], 1)
    assert "costs[0] is a object; needs the time of each layer, or a Profile" in says(
        [object(), object()], 2
    )
    assert "max_bytes='9MiB'; needs bytes, more" in says(GIVEN, 2, max_bytes="9MiB")
    assert "costs=3 is a int; needs the time of each layer, or a Profile" in says(3, 1)


def test_a_limit_that_nothing_meets():
    layers = tuple(
        LayerProfile(f"layer{i}", 1.0, 1.0, param_bytes=1000, kept_bytes={"none": 100})
        for i in range(4)
    )
    given = Profile(layers)
    with pytest.raises(ValueError, match="partition") as refusal:
        partition(given, 2, remat="none", max_bytes=4000)
    assert str(refusal.value) == (
        "partition: no cut is there with max_bytes=4,000 on rank 0: in the one that "
        "needs least, stage 0 (layers 0 to 1) needs 4,400 bytes, 400 more. The least "
        "that works is max_bytes=4,400; else take more stages, or a remat mode that "
        "keeps less"
    )
    assert partition(given, 2, remat="none", max_bytes=4400) == [2, 2]
    with pytest.raises(ValueError, match="With 300 more on every rank it works"):
        partition(given, 2, remat="none", max_bytes=[1900, 6100])
    assert partition(given, 2, remat="none", max_bytes=[2200, 6400]) == [1, 3]

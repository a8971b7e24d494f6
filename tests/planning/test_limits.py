"""Cuts under a limit of memory: what fits is found."""

import random

import pytest

from jpipe.planning._forecast import Hardware, evaluate
from jpipe.planning._partition import least_bytes, partition
from jpipe.planning._search import Space, search
from jpipe.schedules import BY_NAME

from .chains import every_cut, profile


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_under_a_limit_leaves_room_for_the_optimizer(seed):
    rng = random.Random(seed)
    given = profile(rng, 8)
    state = [2 * layer.param_bytes for layer in given.layers]
    schedule = BY_NAME["1f1b"](3, 4)
    every = [
        evaluate(given, state, cut, ["min_cut"] * 3, schedule, Hardware(3))
        for cut in every_cut(8, 3)
    ]
    # Beside what a cut is made by: what is on its way to a rank.
    limit = min(c.most_bytes for c in every) + 40
    space = Space({4: given}, state, Hardware(3, limit), ("1f1b",), ("min_cut",))
    assert search(space)[0].fits(space.hardware)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_to_be_enough_for_several_stages_per_rank_is(seed):
    given = profile(random.Random(seed), 60)
    question = {"num_microbatches": 16, "schedule": "zb_v", "remat": "none"}
    least = least_bytes(given, 16, **question)
    assert len(partition(given, 16, max_bytes=least, **question)) == 16
    with pytest.raises(ValueError, match="no cut was found with max_bytes") as refusal:
        partition(given, 16, max_bytes=least / 2, **question)
    assert f"works is max_bytes={least:,.0f};" in str(refusal.value)

"""One table of programs: each in a pipeline has every property that it has alone.

`tests.fuzz.check` builds a row once, and asserts in turn that variables, outputs,
gradients and training are those of one device, in place, of the same bits twice, traced
once, and that a step holds the bytes that its instructions say.
"""

import itertools

import jax.numpy as jnp
import pytest

from jpipe.schedules import BY_NAME

from ..fuzz import check
from ..slow import slow
from .models import MODELS
from .rows import (
    IMPOSSIBLE,
    OPTIMIZERS,
    QUICK_ROWS,
    REMATS,
    ROWS,
    SCHEDULES,
    SLOW_ROWS,
    TRAINABLE,
    kinds,
    own,
    remat_of,
)


def devices(row):
    """A device for each rank, in no order."""
    if row.schedule == "own":
        ranks = len(row.balance)
    else:
        stages = BY_NAME[row.schedule](1, row.num_microbatches).num_stages
        ranks = len(row.balance) // stages
    return [(3 * rank + 1) % 8 for rank in range(ranks)]


@pytest.mark.parametrize(
    "row", [*QUICK_ROWS, *map(slow, SLOW_ROWS)], ids=lambda row: " ".join(map(str, row))
)
def test_a_pipeline_is_its_model_on_one_device(double, row):
    dtype, model = jnp.dtype(row.dtype), MODELS[row.model]
    traits = model.traits.split()
    by_hand = "microbatches" if "batch" in traits else "whole"
    if "random" in traits or dtype == jnp.bfloat16:
        by_hand = "nothing"
    schedule = row.schedule
    if schedule == "own":
        schedule = own(len(row.balance), row.num_microbatches)
    with check.asserting(f"of {row}"):
        check.check(
            model.layers(dtype),
            model.batch(row.size, dtype),
            row.num_microbatches,
            balance=row.balance,
            devices=devices(row),
            schedule=schedule,
            remat=remat_of(row),
            reduction=row.reduction,
            has_aux=row.has_aux,
            optimizer=row.optimizer,
            by_hand=by_hand,
            rough=max(traits.count("norm"), int(dtype == jnp.bfloat16)),
            trainable=TRAINABLE[row.trainable],
            shards=row.shards,
            gather=row.gather,
            api=row.api,
        )


def test_every_pair_of_kinds_is_in_a_row():
    """A pair is of two factors."""
    known: dict[str, set[str]] = {}
    covered = set()
    for row in ROWS:
        for (a, of_a), (b, of_b) in itertools.combinations(kinds(row).items(), 2):
            known.setdefault(a, set()).update(of_a)
            known.setdefault(b, set()).update(of_b)
            covered |= {frozenset(pair) for pair in itertools.product(of_a, of_b)}
    pairs = {
        frozenset(pair)
        for of_a, of_b in itertools.combinations(known.values(), 2)
        for pair in itertools.product(of_a, of_b)
    }
    missing = pairs - covered - {frozenset(pair) for pair in IMPOSSIBLE}
    assert not sorted(map(sorted, missing))
    assert {row.model for row in ROWS} == set(MODELS)


def test_every_value_is_in_a_quick_row():
    quick, all_kinds = set(), set()
    for row in ROWS:
        row_kinds = set().union(*kinds(row).values())
        all_kinds |= row_kinds
        if row in QUICK_ROWS:
            quick |= row_kinds
    assert not all_kinds - quick
    catalogue = {name for name in BY_NAME if name != "forward_only"}
    schedules = {row.schedule for row in QUICK_ROWS}
    assert schedules == {*catalogue, "own"} == set(SCHEDULES), (
        "a schedule needs a quick row of ROWS, and an entry of _SCHEDULES, in rows.py"
    )
    optimizers = {row.optimizer for row in QUICK_ROWS}
    assert optimizers == set(check.OPTIMIZERS) == set(OPTIMIZERS)
    assert {row.trainable for row in QUICK_ROWS} == set(TRAINABLE)
    assert {row.remat for row in QUICK_ROWS} == {*REMATS, "mixed"}
    assert {row.dtype for row in QUICK_ROWS} == {"float64", "float32", "bfloat16"}

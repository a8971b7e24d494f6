"""The accuracy benchmark: its recipe, its images, and that both together train."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy.recipe import Recipe

FEW = Recipe().shortened(2)  # with ten steps an epoch it drops at 6.7, 13.3 and 17.8
WARM = [(0, 0.1), (1, 0.1075), (39, 0.3925), (40, 0.4), (41, 0.4)]
DROPS = [(299, 0.4), (300, 0.04), (301, 0.04), (599, 0.04), (600, 4e-3), (601, 4e-3)]


COURSES = [
    # A batch of 1024, ten steps an epoch: from 0.1 to 0.4 in 40 steps.
    (Recipe(), 1024, 10, [*WARM, *DROPS, (799, 4e-3), (800, 4e-4), (801, 4e-4)]),
    # 1,281,167 images are 5004 batches of 256, and 312 of 4096.
    (Recipe(), 256, 5004, [(0, 0.1), (20_016, 0.1), (150_119, 0.1), (150_120, 0.01)]),
    (Recipe(), 4096, 312, [(0, 0.1), (624, 0.85), (1248, 1.6), (28_079, 0.0016)]),
    (FEW, 512, 10, [(0, 0.1), (1, 0.2), (6, 0.2), (7, 0.02), (14, 2e-3), (18, 2e-4)]),
]


@pytest.mark.parametrize(("recipe", "batch", "steps", "course"), COURSES)
def test_the_learning_rate_warms_up_and_decays_as_in_the_recipe(
    recipe, batch, steps, course
):
    schedule = recipe.learning_rate(batch, steps)
    rates = [schedule(step) for step, _ in course]
    np.testing.assert_allclose(rates, [rate for _, rate in course], rtol=1e-6)


def jobs(scale, **options):
    defaults = {"experiments": None, "seeds": 1, "data": None}
    return accuracy.jobs(scale, **defaults | options)


MISFITS = [
    ("huge", {}, "scale='huge': needs one of full, small, tiny"),
    ("tiny", {"seeds": 0}, "seeds=0: needs at least 1"),
    ("tiny", {"experiments": ["x", "one-device-32"]}, "no experiment x at scale"),
    ("full", {}, "data=None: no images were given; needs a folder"),
    ("full", {"data": Path("nowhere")}, "data='nowhere' cannot be used"),
]


@pytest.mark.parametrize(("scale", "options", "said"), MISFITS)
def test_options_that_do_not_fit_are_refused(scale, options, said):
    with pytest.raises(ValueError, match=said):
        jobs(scale, **options)


@pytest.mark.slow
def test_the_tiny_scale_fills_all_cells(quick):
    rows = {name: fill_cells() for name, fill_cells in jobs("tiny", seeds=2)}
    assert list(rows) == accuracy.EXPERIMENTS["tiny"]
    json.dumps({name: list(map(asdict, row.values())) for name, row in rows.items()})
    for name in islice(rows, 2):
        (error,) = rows[name].values()
        assert (error.kind, error.unit) == ("measured", "%")
        assert 0 <= error.value <= 100
        assert error.spread is not None
        assert len(error.detail["by seed"]) == len(error.detail["by epoch"]) == 2
    assert 0 <= rows[accuracy.APART]["difference"].value < 1e-3

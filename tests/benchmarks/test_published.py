"""The published tables: their data, and how rows are cut."""

import numpy as np
import pytest

from benchmarks.published import BY_NAME
from benchmarks.result import SCALES

WITH_MODELS = [name for name, benchmark in BY_NAME.items() if benchmark.work]
# As many layers again as in another row, and nothing else.
DEFERRED = {"transformer-pipeline-32", "transformer-pipeline-128"}

# What the benchmark page of torchgpipe says of its own throughputs.
SPEED_UPS = {
    "resnet101-speed": [1, 0.853, 1.414, 2.774, 4.294],
    "amoebanetd-speed": [
        *(1, 1.539, 1.773),
        *(1.004, 1.666, 2.709),
        *(0.932, 2.621, 4.953),
    ],
    "unet-speed": [1, 0.858, 1.246, 2.352, 3.105],
}


@pytest.mark.parametrize("name", SPEED_UPS)
def test_speed_ups_follow_from_throughputs(name):
    benchmark = BY_NAME[name]
    rows = [row for row in benchmark.rows if not row.only_measured]
    found = [benchmark.speed_up(row) for row in rows]
    # The page rounds to three digits; its n4m32 is one off its own column.
    np.testing.assert_allclose(found, SPEED_UPS[name], atol=6e-4)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", WITH_MODELS)
def test_every_row_can_be_cut_at_every_scale(name, scale):
    for row in [row for row in BY_NAME[name].rows if row.name not in DEFERRED]:
        setting = BY_NAME[name].setting(row, scale)
        assert sum(setting.balance) == len(setting.work.layers)
        assert len(setting.balance) == row.num_stages
        assert min(setting.balance) >= 1
        if scale == "full" and row.group != "transformer":
            assert setting.balance == row.balance
            assert abs(setting.batch - row.batch) <= setting.microbatches / 2

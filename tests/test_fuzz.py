"""Random models in random pipelines: loss, gradients and training of one device.

The same programs each time, for two minutes of one core; `make fuzz` runs others, as
many as one likes. What fails is shown as a program that can be pasted: see `tests.fuzz`.
"""

import os

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .fuzz.programs import Program, programs

EXAMPLES = int(os.environ.get("JPIPE_FUZZ_EXAMPLES", "80"))
SEED = int(os.environ.get("JPIPE_FUZZ_SEED", "0"))
# One test of pytest, so that workers share them; after it, JAX forgets what it traced,
# which is 40 MiB for each program.
PER_SHARD = 20


@pytest.mark.parametrize("shard", range(-(-EXAMPLES // PER_SHARD)))
def test_random_programs_give_the_numbers_of_one_device(double, shard):
    @seed(1000 * SEED + shard)
    @settings(
        max_examples=min(PER_SHARD, EXAMPLES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(programs())
    def run(program: Program) -> None:
        program.run()

    try:
        run()
    finally:
        jax.clear_caches()

"""Random programs: see `tests.fuzz`."""

import os

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .fuzz.programs import Program, programs

EXAMPLES = int(os.environ.get("JPIPE_FUZZ_EXAMPLES", "60"))
SEED = int(os.environ.get("JPIPE_FUZZ_SEED", "0"))
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

    run()
    jax.clear_caches()

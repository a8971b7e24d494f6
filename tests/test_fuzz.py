"""Random models in random pipelines: loss, gradients and training of one device.

The same programs each time; `make fuzz` runs others, as many as one likes. What fails
is shown as a program to paste: see `tests.fuzz`.
"""

import os
import re

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from .fuzz.programs import Program, programs

EXAMPLES = int(os.environ.get("JPIPE_FUZZ_EXAMPLES", "5"))
SEED = int(os.environ.get("JPIPE_FUZZ_SEED", "0"))
# One test of pytest, so that workers share them; after it, JAX forgets what it traced,
# which is 40 MiB for each program.
PER_SHARD = 20


# Programs that failed once.
FOUND = {
    "the gradient of what is computed once was beside its last reader": """
dtype = jnp.float64
tied, layers = dense(2, dtype), [dense(3, dtype) for _ in range(3)]
check(
    [batch_first, layers[0], tied, layers[1], forget, tied, layers[2]],
    time_major(1, dtype),
    1,
    balance=[5, 1, 1],
    devices=[0, 0, 1],
    **dict(schedule='gpipe', remat='full', reduction='mean', has_aux=False),
    **dict(optimizer='sgd', by_hand='whole', rough=0),
)
""",
    "the second half of a backward reads the cotangent of the loss": """
dtype = jnp.float64
embedding = embed(dtype)
check(
    [embedding, Keep('s0', dtype), add('s0'), forget, jpipe.layer(embedding, 'attend')],
    tokens(6, dtype),
    2,
    remat='none',
    trainable=lambda path, leaf: path[0] % 2 == 0,
    balance=[1, 1, 1, 2],
    devices=[6],
    schedule='0F0 1F0 2F0 0F1 3F0 1F1 2F1 3F1 3I0 2I0 1B0 3W0 2W0 0B0 3B1 2B1 1B1 0B1',
    **dict(reduction='sum', has_aux=False, optimizer='skipping', by_hand='whole'),
    rough=0,
)
""",
    "a gradient took the memory of what was offloaded": """
dtype = jnp.float64
offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    "device", "pinned_host"
)
check(
    [Keep('s0', dtype), dense(2, dtype), nn.relu, noise, Averages(dtype), add('s0')],
    floats(3, 0, dtype),
    2,
    remat=['full', 'none', 'full', offload, offload],
    balance=[1, 1, 2, 1, 1],
    devices=[6, 4, 2, 3],
    schedule='''
        2F0 2F1 2B0 2I1 2W1
        0F0 0F1 0I0 0W0 0B1
        1F0 1F1 1I0 1W0 1B1
        3F0 3F1 4F0 4F1 4I0 4W0 3I0 4B1 3W0 3B1
    ''',
    **dict(reduction='sum', has_aux=True, optimizer='every other', by_hand='nothing'),
    rough=0,
)
""",
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(double, name):
    Program(FOUND[name]).run()


# Most need a few of the devices that there are.
@pytest.mark.filterwarnings("ignore:.* runs \\d+ stages per rank:UserWarning")
@pytest.mark.filterwarnings("ignore:nothing here has parameters:UserWarning")
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
        try:
            program.run()
        except ValueError as error:  # one model of fewer operations than stages
            if re.search("can be divided in|cannot be divided", str(error)):
                reject()
            raise

    try:
        run()
    finally:
        jax.clear_caches()

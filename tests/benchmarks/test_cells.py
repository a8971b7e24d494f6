"""How cells of the tables are filled: compiled, predicted, measured, searched."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cells import largest
from benchmarks.cells.compiled import Way, peak
from benchmarks.cells.measure import prepare
from benchmarks.experiment import Setting, Work

from .. import reference as ref


def work(**options):
    """A stack of small dense layers."""
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    options = {"tx": optax.sgd(0.1), **options}
    return Work([nn.Dense(8) for _ in range(6)], spec, spec, ref.mse, **options)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 500), st.integers(1, 80))
def test_search_finds_the_largest_size_under_the_limit_and_tries_no_size_twice(
    slope, power, offset, guess
):
    def most(n):
        return offset + slope * n ** (1 + power % 2)

    limit = 4000
    tried = []
    found = largest.search(lambda n: tried.append(n) or most(n), limit, guess)
    assert most(found) <= limit or found == 0
    assert most(found + 1) > limit
    assert len(set(tried)) == len(tried), "a size was compiled twice"
    assert len(tried) <= 16, "at full size each takes minutes"


def test_model_bytes_are_parameters_gradients_and_slots():
    setting = Setting(work(tx=optax.adam(1e-3)), (3, 3), 2, 2)
    found = peak(setting, Way("gpipe", "full"))
    parameters = 6 * (8 * 8 + 8)
    assert found.parameters == parameters
    # Parameters, gradients, two moments, and the count of each stage.
    assert found.model == 4 * 4 * parameters + 2 * 4
    assert found.activations > 0


def test_the_plain_step_and_stages_on_one_device_train_alike():
    one = jax.devices()[:1]

    def compiled(setting, way):
        with ThreadPoolExecutor(1) as pool:
            return prepare(setting, way, one, pool).result()

    plain = compiled(Setting(work(), (6,), 1, 8), Way("gpipe", "none"))
    piped = compiled(Setting(work(), (2, 2, 2), 1, 8), Way("gpipe", "full"))
    assert (plain.programs, piped.programs > 1) == (1, True)
    steps = plain.start(), piped.start()
    for _ in range(2):
        by_hand, ours = (step() for step in steps)
    for a, b in zip(jax.tree.leaves(by_hand), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert b.devices() == set(one)

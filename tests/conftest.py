"""The strictest JAX, on eight CPU devices, before anything touches a device."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# No silent promotion of dtypes: a library that mixes them by accident is caught.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def double():
    """Double precision, where the arithmetic allows comparisons at 1e-12.

    XLA leaves out most of its optimizations, which halves the time to compile: these
    tests ask for the numbers of many programs, the others for the programs.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)

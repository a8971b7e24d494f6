"""The strictest JAX, on eight CPU devices, before anything touches a device."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# No silent promotion of dtypes: a library that mixes them by accident is caught.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def x64():
    """Double precision, where the arithmetic allows comparisons at 1e-12."""
    with jax.enable_x64(True):
        yield

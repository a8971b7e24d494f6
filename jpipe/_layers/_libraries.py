"""Libraries whose functions are no user's: what they hold and ask for is known."""

import sys
from typing import Any

LIBRARIES = sys.stdlib_module_names | {
    *("jax", "jaxlib", "flax", "numpy", "optax", "chex", "jpipe", "scipy", "ml_dtypes"),
}


def is_of(name: Any, libraries: frozenset[str] = LIBRARIES) -> bool:
    """Whether a module of Python, by its name, is of a library."""
    return isinstance(name, str) and name.partition(".")[0] in libraries

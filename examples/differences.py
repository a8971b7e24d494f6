"""How far two trees of numbers are apart."""

from typing import Any

import jax
import numpy as np


def largest_difference(ours: Any, expected: Any) -> float:
    """Of the leaves, relative to the largest of each."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.abs(np.subtract(a, b)).max() / np.abs(b).max()) for a, b in pairs
    )

"""Trees of arrays: how far two are apart, and how many bytes a device holds."""

from collections import Counter
from typing import Any

import jax
import numpy as np

import jpipe


def largest_difference(values: Any, expected: Any) -> float:
    """The largest over all leaves, relative to the largest number of each."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.abs(np.subtract(a, b)).max() / np.abs(b).max()) for a, b in pairs
    )


def count_bytes(tree: Any) -> dict[Any, int]:
    """The bytes of a tree's arrays on each device."""
    count = Counter[Any]()
    for leaf in jax.tree.leaves(tree):
        # A stack of which stages hold different numbers of layers is several arrays.
        for array in leaf.arrays if isinstance(leaf, jpipe.Stacked) else [leaf]:
            for shard in array.addressable_shards:
                count[shard.device] += shard.data.nbytes
    return dict(sorted(count.items(), key=lambda item: item[0].id))

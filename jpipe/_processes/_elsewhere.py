"""Arrays that live in other processes, and those of which each process has a copy."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def is_here(device: Any) -> bool:
    """Whether a device, or a mesh of them, is one of this process."""
    return device.process_index == jax.process_index()


def ghost(shape: Sequence[int], dtype: Any, sharding: Any) -> jax.Array:
    """An array that lives wholly in another process: all but its values is known."""
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [], dtype=dtype
    )


def copies(devices: Sequence[Any]) -> NamedSharding:
    """How an array lies of which each of some devices has a copy."""
    listed = sorted(devices, key=lambda device: device.id)
    return NamedSharding(Mesh(np.asarray(listed), ("copy",)), P())


def of_copies(here: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array of which each process has a copy, given the one of this process."""
    parts = [shard.data for shard in here.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        here.shape, sharding, parts, dtype=here.dtype
    )


def is_elsewhere(leaf: Any) -> bool:
    """Whether an array has no part in this process."""
    return isinstance(leaf, jax.Array) and not leaf.addressable_shards


def is_copied(leaf: jax.Array) -> bool:
    """Whether each of several processes has a copy of an array."""
    is_spread = leaf.is_fully_replicated and not leaf.is_fully_addressable
    return is_spread and not is_elsewhere(leaf)


def own_copy(leaf: Any) -> Any:
    """A leaf as this process has it: of an array that lies in several, its own copy."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return leaf.addressable_data(0) if is_copied(leaf) else leaf

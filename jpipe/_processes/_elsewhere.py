"""Arrays in other processes, and arrays of which each process has a copy."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def is_here(device: Any) -> bool:
    """Whether a device, or a mesh of them, belongs to this process."""
    return device.process_index == jax.process_index()


def ghost(shape: Sequence[int], dtype: Any, sharding: Any) -> jax.Array:
    """An array of another process: all but its values is known here."""
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [], dtype=dtype
    )


def copies(devices: Sequence[Any]) -> NamedSharding:
    """The sharding of an array of which each of some devices has a copy."""
    mesh = Mesh(sorted(devices, key=lambda device: device.id), ("copy",))
    return NamedSharding(mesh, P())


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
    """The copy of this process, of an array that several have; any other leaf as is."""
    if isinstance(leaf, jax.Array) and is_copied(leaf):
        return leaf.addressable_data(0)
    return leaf

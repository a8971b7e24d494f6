"""Arrays in a job of several processes: non-addressable ones, copies, random keys.

An array of another process is *non-addressable*: its shape, dtype and sharding are
known here, its values are not. A small array that all processes need, such as the loss,
is *replicated*: one array with a copy in each process. A random key passes from process
to process as the numbers that it is made of.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import _compat


def is_here(device: Any) -> bool:
    """True if a device, or a mesh of them, belongs to this process."""
    return device.process_index == jax.process_index()


def placeholder(
    shape: Sequence[int], dtype: Any, sharding: Any, *, weak_type: bool = False
) -> jax.Array:
    """A non-addressable array: it stands here for one of another process."""
    array = jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [], dtype=dtype
    )
    return _compat.as_weakly_typed(array) if weak_type else array


def is_non_addressable(leaf: Any) -> bool:
    """True if an array has no part in this process."""
    return isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices


def replicated_sharding(devices: Sequence[Any]) -> NamedSharding:
    """The sharding of an array with a copy on each of some devices."""
    mesh = Mesh(sorted(devices, key=lambda device: device.id), ("copy",))
    return NamedSharding(mesh, P())


def replicated_array(local: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array with a copy in each process, from the copy of this process."""
    shards = [shard.data for shard in local.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        local.shape, sharding, shards, dtype=local.dtype
    )


def is_replicated(leaf: jax.Array) -> bool:
    """True if an array has a copy in each of several processes, this one included."""
    is_spread = leaf.is_fully_replicated and not leaf.is_fully_addressable
    return is_spread and not is_non_addressable(leaf)


def local_copy(leaf: Any) -> Any:
    """The copy of this process, if the leaf is a replicated array; else the leaf."""
    if isinstance(leaf, jax.Array) and is_replicated(leaf):
        return leaf.addressable_data(0)
    return leaf


def is_key(leaf: Any) -> bool:
    """True if a leaf, or its spec, is a typed key of `jax.random`."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):  # at once, as most leaves have one
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> Any:
    """The numbers of a key; any other array as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_key(numbers: Any, like: Any) -> Any:
    """A key from its numbers, with the implementation of the key `like`.

    Where `like` is no key, or the numbers are one already, they are returned.
    """
    if not is_key(like) or is_key(numbers):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like))

"""The memory of the host: arrays that a remat policy or an optimizer keeps there.

JAX has the memory in the type of an array, and in no shape: a `jax.ShapeDtypeStruct` is
of the memory of the host by its sharding alone.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

KIND = "pinned_host"
# The sharding in the spec of an array there, whatever its devices are.
SHARDING = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=KIND)


def is_on_host(value: Any) -> bool:
    """True if an array, its aval or its spec is in the memory of the host."""
    if getattr(value, "memory_space", None) == jax.memory.Space.Host:
        return True
    return getattr(getattr(value, "sharding", None), "memory_kind", None) == KIND


def in_memory_of(spec: Any, value: Any) -> jax.ShapeDtypeStruct:
    """The spec of an array of the memory in which another array is."""
    return jax.ShapeDtypeStruct(
        spec.shape,
        spec.dtype,
        weak_type=spec.weak_type,
        sharding=SHARDING if is_on_host(value) else None,
    )

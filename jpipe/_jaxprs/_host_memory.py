"""The memory of the host: arrays that a remat policy or an optimizer keeps there.

JAX has the memory in the type of an array, and in no shape: a `jax.ShapeDtypeStruct` is
of the memory of the host by its sharding alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
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


def puts_several(eqn: core.JaxprEqn) -> bool:
    """True if an equation is a `jax.device_put` of several arrays.

    They may be on several devices, where one equation would gather them.
    """
    return eqn.primitive.name == "device_put" and len(eqn.invars) > 1


def put_one_by_one(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates a `jax.device_put` of several arrays, with an equation for each."""
    results = list[Any]()
    for i, operand in enumerate(operands):
        params = {name: values[i : i + 1] for name, values in eqn.params.items()}
        results += eqn.primitive.bind(operand, **params)
    return results

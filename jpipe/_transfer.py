"""The only place that moves data between devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Leaves = Sequence[Any]
# To a type checker `jax.Device` is a variable and no type.
Device = Any


def put(leaves: Leaves, device: Device) -> list[jax.Array]:
    """Flat leaves, from the host or any device, onto one device. Never waits."""
    return jax.device_put(list(leaves), device) if leaves else []


def put_tree(tree: Any, device: Device) -> Any:
    """A pytree, from the host or any device, onto one device. Never waits."""
    return jax.device_put(tree, device)


def sender(source: Device, target: Device, count: int) -> Callable[[Leaves], Leaves]:
    """A function that moves ``count`` leaves from one device to another.

    Neighbours on one device hand the arrays over: even a `jax.device_put` that has
    nothing to do costs as much as the call of a compiled function.
    """
    if source == target or not count:
        return lambda leaves: leaves
    return lambda leaves: jax.device_put(leaves, target)

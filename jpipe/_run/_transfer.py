"""The only place from which data moves between devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _compat

Leaves = Sequence[Any]
# To a type checker `jax.Device` is a variable and no type.
Device = Any


@functools.cache
def on(device: Device) -> SingleDeviceSharding:
    """A whole array on one device.

    To `jax.device_put` a device alone says less: what was spread over a mesh of
    explicit axes would be on the device and still of a type that names the mesh.
    """
    return SingleDeviceSharding(device)


def put(leaves: Leaves, device: Device) -> list[jax.Array]:
    """Flat leaves, from the host or any device, onto one device. Never waits."""
    return jax.device_put(list(leaves), on(device)) if leaves else []


def put_tree(tree: Any, device: Device) -> Any:
    """A pytree, from the host or any device, onto one device. Never waits."""
    return jax.device_put(tree, on(device))


def copy_tree(tree: Any, device: Device) -> Any:
    """As `put_tree`, but what is there already is copied."""
    # Of NumPy's arrays JAX may go on reading the memory, which the user may fill anew.
    own = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)
    return jax.device_put(own, on(device), may_alias=False)


class Group(NamedTuple):
    """Neighbours among the leaves of a result, which go to one stage.

    Attributes:
      stage: where they go.
      size: how many they are.
      device: that of the stage; that of the source if nothing moves.
      joins: whether other stages send to the same cell, before or after.
      has_keys: whether keys of `jax.random` are among all leaves of the result.
    """

    stage: int
    size: int
    device: Device
    joins: bool
    has_keys: bool


def deliverer(
    source: Device, groups: Sequence[Group]
) -> Callable[[list[list[Any]], int, Leaves], None]:
    """A function that moves a result into the cells of those who read it.

    Args:
      source: the device that made the result.
      groups: where its leaves go, in order.

    Returns:
      ``(cells, microbatch, leaves)``, where ``cells[stage][microbatch]`` is set, or
      extended if several stages send to it.
    """
    puts = [sender(source, group) for group in groups]
    if not groups:
        return lambda cells, microbatch, leaves: None
    if len(groups) == 1 and not groups[0].joins:
        (put,), stage = puts, groups[0].stage

        def deliver_all(cells: Any, microbatch: int, leaves: Leaves) -> None:
            cells[stage][microbatch] = put(leaves)

        return deliver_all

    def deliver(cells: Any, microbatch: int, leaves: Leaves) -> None:
        end = 0
        for group, put in zip(groups, puts, strict=True):
            start, end = end, end + group.size
            there = cells[group.stage][microbatch] or ()
            cells[group.stage][microbatch] = [*there, *put(leaves[start:end])]

    return deliver


def sender(source: Device, group: Group) -> Callable[[Leaves], Leaves]:
    """A function that moves the leaves of one group to its device.

    Neighbours on one device hand the arrays over: even a `jax.device_put` that has
    nothing to do costs as much as the call of a compiled function.
    """
    target = group.device
    if source == target or not group.size:
        return lambda leaves: leaves
    copy = None if group.has_keys else _compat.copier(source, target)
    return copy or (lambda leaves: jax.device_put(leaves, target))


def bringer(
    source: Device, target: Device, leaves: Sequence[Any]
) -> Callable[[Leaves], Leaves]:
    """A function that moves leaves to a device, each time from the same one.

    Args:
      source: the device where they are.
      target: the device where they go.
      leaves: jaxpr variables of their kinds.
    """
    keys = any(jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key) for x in leaves)
    return sender(source, Group(0, len(leaves), target, False, keys))

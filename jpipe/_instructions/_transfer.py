"""How data moves between devices: nothing else moves any but `_compat.copier`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _compat

Leaves = Sequence[Any]
# To a type checker `jax.Device` is a variable and no type.
Device = Any


@dataclass(frozen=True)
class OnPaper:
    """A device that is not there: what is lowered for it cannot run.

    Attributes:
      rank: its number.
    """

    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}"


@functools.cache
def on(device: Device) -> SingleDeviceSharding | None:
    """A whole array on one device; ``None`` for one that is not there.

    To `jax.device_put` a device alone says less: what was spread over a mesh of
    explicit axes would be on the device and still of a type that names the mesh.
    """
    return None if isinstance(device, OnPaper) else SingleDeviceSharding(device)


def put(leaves: Leaves, device: Device) -> list[Any]:
    """Flat leaves, from the host or any device, onto one device. Never waits."""
    if isinstance(device, OnPaper):
        return list(leaves)
    return jax.device_put(list(leaves), on(device)) if leaves else []


def put_tree(tree: Any, device: Device) -> Any:
    """A pytree, from the host or any device, onto one device. Never waits."""
    return jax.device_put(_off_numpy(tree), on(device))


def copy_tree(tree: Any, device: Device) -> Any:
    """As `put_tree`, but what is there already is copied."""
    return jax.device_put(_off_numpy(tree), on(device), may_alias=False)


def _off_numpy(tree: Any) -> Any:
    """The tree with copies of NumPy's arrays.

    JAX may go on reading their memory, which the user may fill anew.
    """
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def sender(
    source: Device, target: Device, has_keys: bool
) -> Callable[[Leaves], Sequence[jax.Array]]:
    """A function that copies leaves, each time from one device to one other.

    Args:
      source: the device where they are.
      target: the device where they go.
      has_keys: whether typed keys of `jax.random` are among them.
    """
    on_paper = isinstance(source, OnPaper) or isinstance(target, OnPaper)
    copy = None if has_keys or on_paper else _compat.copier(source, target)
    # It takes a device in less time than a sharding; a type that names a mesh stays,
    # as with `copier`.
    return copy or (lambda leaves: jax.device_put(leaves, target))

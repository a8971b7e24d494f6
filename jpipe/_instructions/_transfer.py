"""How data moves between devices: nothing else moves any but `_compat.copier`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from .. import _compat
from .._processes._elsewhere import ghost, is_elsewhere, is_here, own_copy
from .._processes._keys import is_key
from ._sharding import WHOLE, Cut, Sharding, SubMesh

Leaves = Sequence[Any]
# A `jax.Device`, which to a type checker is a variable and no type; or a `SubMesh`.
Device = Any


@dataclass(frozen=True)
class OnPaper:
    """A device that is not there, or several: what is lowered for it cannot run.

    Attributes:
      rank: its number.
      num_shards: over how many devices examples are spread.
    """

    rank: int
    num_shards: int = 1

    @property
    def process_index(self) -> int:
        """As if it were here."""
        return jax.process_index()

    def __str__(self) -> str:
        several = f" (data={self.num_shards})" if self.num_shards > 1 else ""
        return f"rank {self.rank}{several}"


@functools.lru_cache(maxsize=1024)
def on(device: Device, sharding: Sharding = WHOLE, on_host: bool = False) -> Any:
    """What JAX calls an array in a place; ``None`` in one that is not there.

    To `jax.device_put` a device alone means less: what was spread over a mesh of
    explicit axes would be on the device and still of a type that names the mesh.

    Args:
      device: the place.
      sharding: of the array, where the place is several devices.
      on_host: whether it is in the memory of their host.
    """
    if isinstance(device, SubMesh):
        return device.sharding(sharding, on_host)
    return None if isinstance(device, OnPaper) else SingleDeviceSharding(device)


def is_at(leaf: Any, device: Device, sharding: Sharding = WHOLE) -> bool:
    """Whether an array is in a place, with its sharding there."""
    if isinstance(device, SubMesh):
        found = getattr(leaf, "sharding", None)
        wanted = on(device, sharding)
        return found == wanted or (
            found is not None and wanted.is_equivalent_to(found, leaf.ndim)
        )
    return leaf.device == device


def devices_of(device: Device) -> frozenset[Any]:
    """What an array in a place answers to the question for its devices."""
    several = isinstance(device, SubMesh)
    return frozenset(device.mesh.devices.flat if several else [device])


def sharding_of(leaf: Any, device: Device) -> Sharding | None:
    """The sharding of an array in a place; ``None`` if it is one of another mesh."""
    if not isinstance(device, SubMesh):
        return WHOLE
    sharding = Sharding(spec=getattr(leaf.sharding, "spec", P()))
    is_own = set(sharding.axes) <= set(device.mesh.axis_names)
    return sharding if is_own and is_at(leaf, device, sharding) else None


def located(spec: Any, device: Device, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """An array in a place as JAX calls it, of which each shard sees a spec."""
    is_stacked = sharding.stacked and isinstance(device, SubMesh)
    return jax.ShapeDtypeStruct(
        (device.num_shards, *spec.shape) if is_stacked else spec.shape,
        spec.dtype,
        sharding=on(device, sharding),
        weak_type=getattr(spec, "weak_type", False),
    )


def one_of(device: Device) -> Device:
    """The device of a place; of several the first."""
    return device.first if isinstance(device, SubMesh) else device


def _stack(leaf: Any, cut: Cut, num_shards: int) -> Any:
    """What is cut of a leaf: ``[..., batch, ...]`` to ``[D, M, ..., size, ...]``."""
    leaf = _auto(leaf)
    axis, start, number, size = cut
    axis %= leaf.ndim
    stop = start + number * num_shards * size
    rows = leaf[(slice(None),) * axis + (slice(start, stop),)]
    before, after = rows.shape[:axis], rows.shape[axis + 1 :]
    parts = rows.reshape(*before, number, num_shards, size, *after)
    xp = np if isinstance(leaf, np.ndarray) else jnp
    return xp.moveaxis(parts, (axis + 1, axis), (0, 1))


def _auto(leaf: Any) -> Any:
    """An array without sharding in its type: any part of it can be taken."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf
    mesh = sharding.mesh
    plain = SubMesh.of(np.asarray(mesh.devices), mesh.axis_names).mesh
    return jax.device_put(leaf, NamedSharding(plain, sharding.spec))


def put(
    leaves: Leaves,
    device: Device,
    shardings: Sequence[Sharding] | None = None,
    may_alias: bool | None = None,
) -> list[Any]:
    """Flat leaves, from the host or any device, into one place. Never waits.

    Args:
      leaves: they.
      device: the place.
      shardings: theirs there, where it is several devices; default: replicated.
      may_alias: whether what is there already need not be copied.
    """
    if isinstance(device, OnPaper) or not leaves:
        return list(leaves)
    shardings = shardings or [WHOLE] * len(leaves)
    if not is_here(device):
        return [
            ghost(leaf.shape, _kept_as(leaf), on(device, each))
            for leaf, each in zip(leaves, shardings, strict=True)
        ]
    leaves = _own_copies(leaves)
    if not isinstance(device, SubMesh):
        return jax.device_put(leaves, on(device), may_alias=may_alias)
    parts = [
        _stack(leaf, each.cut, device.num_shards) if each.cut else leaf
        for leaf, each in zip(leaves, shardings, strict=True)
    ]
    # What was cut is stacked now.
    where = [on(device, each._replace(cut=None)) for each in shardings]
    return jax.device_put(parts, where, may_alias=may_alias)


def put_one(leaf: Any, device: Device, sharding: Sharding = WHOLE) -> jax.Array:
    """An array on a device, or on those of a stage."""
    return put([_off_numpy(leaf)], device, [sharding])[0]


def put_each(
    tree: Any,
    devices: Sequence[Device],
    locations: Sequence[tuple[int, Sharding]],
    may_alias: bool | None = None,
) -> Any:
    """A pytree, each leaf onto the device of a number, with its sharding there.

    Args:
      tree: from the host or any device.
      devices: they.
      locations: of each leaf.
      may_alias: see `put`.
    """
    leaves, structure = jax.tree.flatten(_off_numpy(tree))
    found: dict[int, Any] = {}
    for device in dict.fromkeys(at for at, _ in locations):
        own = [i for i, (at, _) in enumerate(locations) if at == device]
        shardings = [locations[i][1] for i in own]
        placed = put([leaves[i] for i in own], devices[device], shardings, may_alias)
        found |= zip(own, placed, strict=True)
    return structure.unflatten([found[i] for i in range(len(leaves))])


def _kept_as(leaf: Any) -> Any:
    """The dtype of an array of JAX that is made of a leaf."""
    return leaf.dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)


def _own_copies(leaves: Leaves) -> list[Any]:
    """Leaves as this process has them.

    Raises:
      ValueError: if one is in another process.
    """
    if jax.process_count() == 1:
        return list(leaves)
    found = [*map(own_copy, leaves)]
    far = [leaf for leaf in found if is_elsewhere(leaf)]
    if far:
        raise ValueError(
            f"{len(far)} arrays, such as one of shape {far[0].shape}, are in another "
            f"process, on {far[0].device}; to change who has what, save the state and "
            f"restore it: jpipe.checkpoint.save, jpipe.checkpoint.restore"
        )
    return found


def _off_numpy(tree: Any) -> Any:
    """The tree with copies of NumPy's arrays.

    JAX may go on reading their memory, which the user may fill anew.
    """
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)


def sender(
    source: Device,
    target: Device,
    has_keys: bool,
    shardings: tuple[Sharding, ...],
    source_shardings: tuple[Sharding, ...],
) -> Callable[..., Sequence[jax.Array]]:
    """A function that copies leaves, each time from one place to one other.

    Each shard goes straight to its counterpart.

    Args:
      source: the place where they are.
      target: the place where they go.
      has_keys: whether typed keys of `jax.random` are among them.
      shardings: theirs where they go.
      source_shardings: those where they are.

    Returns:
      ``(*leaves) -> leaves``.
    """
    where = [on(target, each) for each in shardings]
    ends = source, target
    shapes = [x.mesh.shape if isinstance(x, SubMesh) else None for x in ends]
    is_alike = shardings == source_shardings and shapes[0] == shapes[1]
    on_paper = isinstance(source, OnPaper) or isinstance(target, OnPaper)
    if is_alike and not (has_keys or on_paper):
        copy = _compat.copier(one_of(source), where)
        if copy is not None:
            return copy
    if isinstance(source, SubMesh) or isinstance(target, SubMesh):
        return lambda *leaves: jax.device_put(list(leaves), where)
    # It takes a device in less time than a sharding; a type that names a mesh stays,
    # as with `copier`.
    return lambda *leaves: jax.device_put(leaves, target)

"""Moves of data between devices of one process; between processes: `_transport`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from .. import _compat
from .._arguments._stacked import gather_tree
from .._jaxprs._host_memory import is_on_host
from .._processes._arrays import (
    is_here,
    is_key,
    is_non_addressable,
    local_copy,
    placeholder,
)
from ._sharding import WHOLE, MicrobatchSplit, Sharding, StageMesh

Leaves = Sequence[Any]
# A `jax.Device`, which to a type checker is a variable and no type; or a `StageMesh`.
Device = Any


@dataclass(frozen=True)
class AbstractDevice:
    """The device of a rank that does not exist, or its devices: nothing runs there.

    Attributes:
      rank: the rank.
      num_shards: the number of devices over which examples are spread.
    """

    rank: int
    num_shards: int = 1

    @property
    def process_index(self) -> int:
        """The index of this process: a rank that does not exist is local."""
        return jax.process_index()

    def __str__(self) -> str:
        data = f" (data={self.num_shards})" if self.num_shards > 1 else ""
        return f"rank {self.rank}{data}"


@functools.lru_cache(maxsize=1024)
def jax_sharding(device: Device, sharding: Sharding = WHOLE) -> Any:
    """The `jax.sharding.Sharding` of arrays in a place; ``None`` for `AbstractDevice`.

    To `jax.device_put` a device alone means less: what was spread over a mesh of
    explicit axes would be on the device and still of a type that names the mesh.

    Args:
      device: the place.
      sharding: the sharding of the array there.
    """
    if isinstance(device, StageMesh):
        return device.sharding(sharding)
    if isinstance(device, AbstractDevice):
        return None
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def is_in_place(leaf: Any, device: Device, sharding: Sharding = WHOLE) -> bool:
    """True if an array is in a place, with its sharding and in its memory there."""
    actual = getattr(leaf, "sharding", None)
    expected = jax_sharding(device, sharding)
    if actual is None or actual == expected:
        return actual is not None
    is_mesh = isinstance(device, StageMesh)
    return is_mesh and expected.is_equivalent_to(actual, leaf.ndim)


def devices_of(device: Device) -> frozenset[Any]:
    """The devices of an array in a place, as `jax.Array.devices` returns them."""
    if isinstance(device, StageMesh):
        return frozenset(device.mesh.devices.flat)
    return frozenset([device])


def sharding_of(leaf: Any, device: Device) -> Sharding | None:
    """The sharding of an array in a place; ``None`` if its mesh is another one."""
    if not isinstance(device, StageMesh):
        return WHOLE
    sharding = Sharding(
        spec=getattr(leaf.sharding, "spec", P()), on_host=is_on_host(leaf)
    )
    has_axes = set(sharding.axes) <= set(device.mesh.axis_names)
    return sharding if has_axes and is_in_place(leaf, device, sharding) else None


def array_spec(spec: Any, device: Device, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The spec of a whole array in a place; stacked, if each shard has ``spec``."""
    is_stacked = sharding.stacked and isinstance(device, StageMesh)
    return jax.ShapeDtypeStruct(
        (device.num_shards, *spec.shape) if is_stacked else spec.shape,
        spec.dtype,
        sharding=jax_sharding(device, sharding),
        weak_type=getattr(spec, "weak_type", False),
    )


def first_device(device: Device) -> Device:
    """The device of a place; the first if there are more."""
    return device.first if isinstance(device, StageMesh) else device


def stack(leaf: Any, split: MicrobatchSplit, num_shards: int) -> Any:
    """Cuts and stacks a leaf: ``[..., batch, ...]`` to ``[D, M, ..., size, ...]``."""
    axis = split.axis % leaf.ndim
    stop = split.start + split.parts * num_shards * split.size
    rows = leaf[(slice(None),) * axis + (slice(split.start, stop),)]
    before = rows.shape[:axis]
    after = rows.shape[axis + 1 :]
    parts = rows.reshape(*before, split.parts, num_shards, split.size, *after)
    xp = np if isinstance(leaf, np.ndarray) else jnp
    return xp.moveaxis(parts, (axis + 1, axis), (0, 1))


def _without_explicit_axes(leaf: Any) -> Any:
    """An array without sharding in its type, so that any part of it can be sliced."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf
    mesh = sharding.mesh
    auto_mesh = StageMesh.of(np.asarray(mesh.devices), mesh.axis_names).mesh
    return jax.device_put(leaf, NamedSharding(auto_mesh, sharding.spec))


def put(
    leaves: Leaves,
    device: Device,
    shardings: Sequence[Sharding] | None = None,
    *,
    may_alias: bool | None = None,
) -> list[Any]:
    """Puts flat leaves into one place, in the default layout. Never waits.

    Args:
      leaves: arrays on the host or any device.
      device: the place.
      shardings: the sharding of each leaf in a place of several devices; default:
        replicated.
      may_alias: True if an array that is there already need not be copied.
    """
    if isinstance(device, AbstractDevice) or not leaves:
        return list(leaves)
    shardings = shardings or [WHOLE] * len(leaves)
    if not is_here(device):
        placeholders: list[Any] = []
        for leaf, sharding in zip(leaves, shardings, strict=True):
            aval = jax.typeof(leaf)
            weak = aval.weak_type
            array_sharding = jax_sharding(device, sharding)
            placeholders.append(
                placeholder(aval.shape, aval.dtype, array_sharding, weak_type=weak)
            )
        return placeholders
    leaves = [*map(in_default_layout, _local_copies(leaves))]
    is_any_on_host = any(sharding.on_host for sharding in shardings)
    if not (isinstance(device, StageMesh) or is_any_on_host):
        # In less time than with a sharding for each.
        return jax.device_put(leaves, jax_sharding(device), may_alias=may_alias)

    arrays: list[Any] = []
    array_shardings: list[Any] = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if sharding.split and isinstance(device, StageMesh):
            leaf = _without_explicit_axes(leaf)
            leaf = stack(leaf, sharding.split, device.num_shards)
        arrays.append(leaf)
        array_shardings.append(jax_sharding(device, sharding._replace(split=None)))
    return jax.device_put(arrays, array_shardings, may_alias=may_alias)


def in_default_layout(leaf: Any) -> Any:
    """An array with its axes in the order in which JAX lays them out by itself.

    Column-major are weights that come from PyTorch transposed. What is compiled ahead
    does not take them. And between devices of a CPU JAX 0.10 copies their values in
    row-major order and says that the copy is column-major, so they are brought to the
    default layout before they are moved.
    """
    if np.ndim(leaf) < 2 or not isinstance(leaf, jax.Array) or is_key(leaf):
        return leaf
    array: Any = leaf  # to a type checker it has no layout
    layout = array.format.layout
    if layout is None or layout.major_to_minor == tuple(range(leaf.ndim)):
        return leaf
    return jax.device_put(leaf, Format(None, leaf.sharding))


def put_leaf(leaf: Any, device: Device, sharding: Sharding = WHOLE) -> jax.Array:
    """Puts an array into a place."""
    return put([_copy_numpy(leaf)], device, [sharding])[0]


def put_tree(
    tree: Any,
    devices: Sequence[Device],
    locations: Sequence[tuple[int, Sharding]],
    *,
    may_alias: bool | None = None,
) -> Any:
    """Puts each leaf of a pytree onto its device.

    Args:
      tree: arrays on the host or any device.
      devices: the devices of the places.
      locations: for each leaf the index of its device and its sharding there.
      may_alias: see `put`.
    """
    leaves, structure = jax.tree.flatten(_copy_numpy(tree))
    # index of a device -> indices of its leaves
    by_device: dict[int, list[int]] = {}
    for i, (device_index, _) in enumerate(locations):
        by_device.setdefault(device_index, []).append(i)

    arrays = list(leaves)
    for device_index, indices in by_device.items():
        device_arrays = put(
            [leaves[i] for i in indices],
            devices[device_index],
            [locations[i][1] for i in indices],
            may_alias=may_alias,
        )
        for i, array in zip(indices, device_arrays, strict=True):
            arrays[i] = array
    return structure.unflatten(arrays)


def _local_copies(leaves: Leaves) -> list[Any]:
    """Leaves as this process has them.

    Raises:
      ValueError: if one is in another process.
    """
    if jax.process_count() == 1:
        return list(leaves)
    copies = [*map(local_copy, leaves)]
    remote = [leaf for leaf in copies if is_non_addressable(leaf)]
    if remote:
        raise ValueError(
            f"{len(remote)} arrays, such as one of shape {remote[0].shape}, are in "
            f"another process, on {remote[0].device}; to change who has what, save the "
            f"state and restore it: jpipe.checkpoint.save, jpipe.checkpoint.restore"
        )
    return copies


def _copy_numpy(tree: Any) -> Any:
    """Copies the arrays of NumPy in a tree, and gathers those in pieces.

    JAX may go on reading their memory, which the user may fill anew.
    """
    tree = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tree)
    return gather_tree(tree)


def make_sender(
    *,
    source: Device,
    target: Device,
    has_keys: bool,
    shardings: tuple[Sharding, ...],
    source_shardings: tuple[Sharding, ...],
) -> Callable[..., Sequence[jax.Array]]:
    """The function ``(*leaves) -> leaves`` that copies leaves from place to place.

    Each shard goes straight to its counterpart.

    Args:
      source: the place where the leaves are.
      target: the place to which they go.
      has_keys: True if typed keys of `jax.random` are among them.
      shardings: the sharding of each leaf in the target.
      source_shardings: the sharding of each leaf in the source.
    """
    target_shardings = [jax_sharding(target, sharding) for sharding in shardings]
    is_mesh = isinstance(source, StageMesh) or isinstance(target, StageMesh)
    exists = not (
        isinstance(source, AbstractDevice) or isinstance(target, AbstractDevice)
    )
    is_laid_out_equally = shardings == source_shardings and _mesh_shape(
        source
    ) == _mesh_shape(target)
    is_any_on_host = any(sharding.on_host for sharding in shardings)
    if exists and is_laid_out_equally and not (has_keys or is_any_on_host):
        copy = _compat.copier(first_device(source), target_shardings)
        if copy is not None:
            return copy
    if is_mesh or is_any_on_host:
        return lambda *leaves: jax.device_put(list(leaves), target_shardings)
    # `device_put` takes a device in less time than a sharding; a type that names a mesh
    # stays, as with `copier`.
    return lambda *leaves: jax.device_put(leaves, target)


def _mesh_shape(device: Device) -> Any:
    return device.mesh.shape if isinstance(device, StageMesh) else None

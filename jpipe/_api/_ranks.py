"""The devices of each rank of a pipeline, from `mesh=` or `devices=`.

A mesh has the stages along its axis ``"stage"``, and the devices of each along all
others. A sequence of devices has one entry for each rank, which may be a mesh.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._instructions import _transfer
from .._instructions._sharding import DATA, StageMesh
from .._instructions._transfer import Device
from ..planning._plan_record import Plan
from ..schedules._formats import format_type

# The axis of a mesh along which the stages are placed.
_STAGE = "stage"


def _example_mesh() -> str:
    """A mesh of all devices that there are, as a user would type it."""
    count = jax.device_count()
    num_data = 2 if count > 2 and count % 2 == 0 else 1
    return f'jax.make_mesh(({count // num_data}, {num_data}), ("stage", "data"))'


def planned_mesh(plan: Plan, mesh: Any, devices: Any) -> tuple[Any, Any]:
    """The arguments ``mesh`` and ``devices`` of a pipeline with a plan.

    Args:
      plan: the plan.
      mesh: the mesh that the user passed; it has to have the shape of the plan.
      devices: the devices that the user passed; a plan for several per stage lays them
        out as a mesh.

    Raises:
      ValueError: if the mesh spreads examples over another number of devices, or there
        are too few devices.
    """
    num_ranks = plan.schedule.num_ranks
    num_data = plan.data
    if isinstance(mesh, Mesh):
        mesh_num_data = mesh.shape.get(DATA, 1)
        if mesh_num_data != num_data:
            raise ValueError(
                f"plan: it is for {num_ranks} x {num_data} devices along {_STAGE!r} "
                f"and {DATA!r}, the mesh has {mesh_num_data} along {DATA!r}; leave out "
                f"mesh=, or type "
                f'mesh=jax.make_mesh(({num_ranks}, {num_data}), ("stage", "data"))'
            )
        return mesh, devices

    all_devices = jax.devices() if devices is None else devices
    are_devices = isinstance(all_devices, Sequence) and all(
        isinstance(device, jax.Device) for device in all_devices
    )
    if num_data == 1 or mesh is not None or not are_devices:
        return mesh, devices
    count = num_ranks * num_data
    if len(dict.fromkeys(all_devices[:count])) < count:
        raise ValueError(
            f"plan: it is for {num_ranks} x {num_data} devices along {_STAGE!r} and "
            f"{DATA!r}, there are {len(dict.fromkeys(all_devices))} different ones; "
            f"plan for as many with jpipe.plan(..., num_devices=), or for one per "
            f"stage with data=1"
        )
    grid = np.array(all_devices[:count], dtype=object).reshape(num_ranks, num_data)
    return Mesh(grid, (_STAGE, DATA)), None


def check_sharding(mesh: Any, devices: Any, sharding: Any, gather: Any) -> None:
    """Checks the options of parameters in stages of several devices."""
    if gather not in ("step", "microbatch"):
        raise ValueError(f"gather={gather!r}: choose 'step' or 'microbatch'")
    if sharding is not None and not callable(sharding):
        raise TypeError(
            f"sharding={sharding!r} is {format_type(sharding)}; needs a function "
            f"(path, spec) -> PartitionSpec, such as lambda path, spec: {sharding!r}"
        )
    if mesh is not None or (sharding is None and gather == "step"):
        return
    if not isinstance(devices, Sequence) or not _has_mesh(devices):
        raise ValueError(
            f"sharding= and gather= are for stages of several devices; give mesh= "
            f"too, such as mesh={_example_mesh()}"
        )


def find_ranks(mesh: Any, devices: Any) -> Sequence[Device]:
    """Returns the devices of all ranks that there could be.

    Args:
      mesh: a mesh with those of each rank along the axis ``stage``, or ``None``.
      devices: one device, or mesh, per rank; ``None`` means `jax.devices`.

    Raises:
      ValueError: if both are given, there is no device, or meshes of ranks do not go
        together.
      TypeError: if one is of a wrong type.
    """
    if mesh is not None and devices is not None:
        raise ValueError("mesh= decides where stages run; leave out devices=")
    ranks = _ranks_of_devices(devices) if mesh is None else _ranks_of_mesh(mesh)
    if not ranks:
        raise ValueError("devices=[]: needs at least one")
    return ranks


def _ranks_of_mesh(mesh: Any) -> Sequence[Device]:
    """The devices of each rank: those of one index along the axis of stages."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r} is {format_type(mesh)}; needs a jax.sharding.Mesh, "
            f"such as {_example_mesh()}"
        )
    axis_names = list(mesh.axis_names)
    if _STAGE not in axis_names:
        raise ValueError(
            f"mesh has the axes {axis_names}, none is called {_STAGE!r}, along which "
            f"the stages are placed; type {_example_mesh()}"
        )
    stage_axis = axis_names.index(_STAGE)
    rank_axis_names = axis_names[:stage_axis] + axis_names[stage_axis + 1 :]
    grids = np.moveaxis(mesh.devices, stage_axis, 0)
    # Of a mesh with this axis alone, each grid is a device.
    return [_rank_of_grid(np.asarray(grid), rank_axis_names) for grid in grids]


def _rank_of_mesh(mesh: Mesh) -> Device:
    """The devices of a rank for which the user passed a mesh."""
    if _STAGE in mesh.axis_names:
        raise ValueError(
            f"devices: the mesh of one rank has an axis {_STAGE!r}, along which ranks "
            f"are placed; type mesh={_example_mesh()} for all of them"
        )
    return _rank_of_grid(np.asarray(mesh.devices), mesh.axis_names)


def _rank_of_grid(devices: np.ndarray, axis_names: Sequence[str]) -> Device:
    """The devices of a rank: one, or several of one process.

    Args:
      devices: the devices in the shape of a mesh.
      axis_names: the names of its axes.

    Raises:
      ValueError: if they are of several processes.
    """
    processes = sorted({device.process_index for device in devices.flat})
    if len(processes) > 1:
        raise ValueError(
            f"the devices of a stage are of processes {processes}: "
            f"{', '.join(map(str, devices.flat))}; place stages along the processes, "
            f"and the other axes of the mesh inside of each (of a plan: plan again "
            f"with data= at most the devices of a process)"
        )
    if devices.size == 1:
        return devices.flat[0]
    return StageMesh.of(devices, axis_names)


def _check_shards(ranks: Sequence[Device]) -> None:
    """Checks that all ranks spread examples over as many devices.

    Raises:
      ValueError: if they do not, or a device is in two meshes.
    """
    shapes = {
        tuple(rank.mesh.shape.items()) if isinstance(rank, StageMesh) else None
        for rank in ranks
    }
    if len(shapes) > 1 and len({rank.process_index for rank in ranks}) > 1:
        raise ValueError(
            "devices: ranks in several processes must have meshes of one shape"
        )
    shard_counts = [getattr(rank, "num_shards", 1) for rank in ranks]
    if len(set(shard_counts)) > 1:
        ranks_text = ", ".join(
            f"rank {i} over {count}" for i, count in enumerate(shard_counts)
        )
        raise ValueError(
            f"devices: all ranks must spread the examples of a micro-batch over as "
            f"many devices along {DATA!r}; there is {ranks_text}; give each as many, "
            f"and what is left another axis, such as 'model'"
        )
    first_rank: dict[Any, int] = {}  # device -> the first rank that has it
    for i, rank in enumerate(ranks):
        for device in _transfer.devices_of(rank):
            first = first_rank.setdefault(device, i)
            if ranks[first] != rank:
                raise ValueError(
                    f"devices: {device} is in the meshes of rank {first} and rank {i}; "
                    f"give each rank devices of its own, or both the same mesh"
                )


def _ranks_of_devices(devices: Any) -> Sequence[Device]:
    """The devices of each rank: one, or those of a mesh."""
    if isinstance(devices, Mesh):
        raise TypeError(_typed_as_mesh(devices))
    if isinstance(devices, str) or not hasattr(devices or [], "__iter__"):
        is_device = isinstance(devices, jax.Device)
        example = f"[{devices!r}]" if is_device else "jax.devices()[:2]"
        raise TypeError(
            f"devices={devices!r} is {format_type(devices)}; needs a sequence of "
            f"jax.Device objects, such as devices={example}"
        )
    ranks: Sequence[Any] = jax.devices() if devices is None else list(devices)
    if _has_mesh(ranks):
        ranks = [
            _rank_of_mesh(rank) if isinstance(rank, Mesh) else rank for rank in ranks
        ]
        _check_shards(ranks)
    not_devices = [
        rank for rank in ranks if not isinstance(rank, jax.Device | StageMesh)
    ]
    if not_devices:
        raise TypeError(
            f"devices: {not_devices!r} are not jax.Device objects, such as "
            f"devices=jax.devices()[:{len(ranks)}]"
        )
    return ranks


def _has_mesh(ranks: Sequence[Any]) -> bool:
    """True if the entry of a rank is a mesh."""
    return any(isinstance(rank, Mesh) for rank in ranks)


def _typed_as_mesh(mesh: Mesh) -> str:
    """The error of one mesh in place of a sequence of devices."""
    names = mesh.axis_names
    if _STAGE not in names:
        return (
            f"devices is one Mesh, with the axes {names}; type mesh= for all ranks, "
            f"such as mesh={_example_mesh()}, or devices=[mesh, ...] with one for each"
        )
    shape = tuple(mesh.shape.values())
    return (
        f"devices is a Mesh with an axis {_STAGE!r}: type mesh= in place of devices=, "
        f"as in mesh=jax.make_mesh({shape}, {names})"
    )

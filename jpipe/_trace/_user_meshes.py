"""Meshes in a user's program: each stage runs on its own devices alone.

An operation over a mesh of devices is refused. A sharding constraint is kept where the
meshes of all stages have the axes that it names, and is left out elsewhere.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .._instructions._sharding import StageMesh
from .._instructions._transfer import Device, devices_of
from .._jaxprs import _jaxpr, _sharding_constraints
from .._messages import WarnOnce, raise_all


def restrict_to_devices(
    closed: core.ClosedJaxpr, devices: Sequence[Device], warnings: WarnOnce
) -> core.ClosedJaxpr:
    """Rewrites a program so that it names no devices but those of its stages.

    Args:
      closed: the program.
      devices: the devices of the stages.
      warnings: the warnings of the pipeline.

    Returns:
      The program without sharding constraints, or with constraints by the axes of the
      meshes of its stages: see `_sharding_constraints`.

    Raises:
      ValueError: with each other operation that names devices.
    """
    device_sets = {devices_of(device) for device in devices}
    faults = list[str]()
    for name, mesh in _meshes(closed):
        if device_sets != {frozenset(mesh.devices.flat)}:
            faults.append(f"{name} over {mesh.size} devices, {dict(mesh.shape)}")
    raise_all(
        "the program contains a mesh of devices, and each of its stages runs on "
        "devices of its own; leave the operation out, and give mesh= and sharding= of "
        "the pipeline to shard parameters over the devices of a stage",
        faults,
    )
    _warn_of_constraints(closed, devices, warnings)

    def is_kept(spec: P) -> bool:
        return all(
            isinstance(device, StageMesh) and device.has_axes(spec)
            for device in devices
        )

    return _sharding_constraints.name_specs(closed, is_kept)


def _warn_of_constraints(
    closed: core.ClosedJaxpr, devices: Sequence[Device], warnings: WarnOnce
) -> None:
    """Warns of constraints by axes that the meshes of stages lack: see `StageMesh`.

    A stage on one device has nothing to shard.
    """
    stage_meshes = [device for device in devices if isinstance(device, StageMesh)]
    left_out = list[Any]()
    for sharding in _sharding_constraints.constraint_shardings(closed):
        has_axes = [_has_axes(stage_mesh, sharding) for stage_mesh in stage_meshes]
        if not all(has_axes):
            left_out.append(sharding)
    if not left_out:
        return
    mesh = getattr(left_out[0], "mesh", None)
    user_mesh = f" over a mesh {dict(mesh.shape)}" if mesh is not None else ""
    warnings(
        "constraints",
        f"with_sharding_constraint{user_mesh} is left out, {len(left_out)} times: each "
        f"stage runs on a mesh of its own, {dict(stage_meshes[0].mesh.shape)}, and no "
        f"value depends on a constraint. To shard arrays within a stage, give mesh= of "
        f"the pipeline with the axes that they name",
    )


def _has_axes(stage_mesh: StageMesh, sharding: Any) -> bool:
    """True if a mesh has the axes that a constraint names."""
    spec = getattr(sharding, "spec", None)
    return spec is not None and stage_mesh.has_axes(spec)


def _meshes(closed: core.ClosedJaxpr) -> Iterator[tuple[str, Mesh]]:
    """Yields operations with meshes of devices, in loops and branches too."""
    for eqn in _jaxpr.equations(closed):
        if _sharding_constraints.is_constraint(eqn):
            continue
        for value in jax.tree.leaves(list(eqn.params.values())):
            mesh: Any = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh

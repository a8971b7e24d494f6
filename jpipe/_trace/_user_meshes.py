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
    """Warns of constraints that are left out: see `StageMesh.constrained`."""
    left_out = list[Any]()
    for sharding in _sharding_constraints.constraint_shardings(closed):
        if any(_leaves_out(device, sharding) for device in devices):
            left_out.append(sharding)
    if not left_out:
        return
    mesh = getattr(left_out[0], "mesh", None)
    user_mesh = f" over a mesh {dict(mesh.shape)}" if mesh is not None else ""
    stage_devices = "one device"
    if isinstance(devices[0], StageMesh):
        stage_devices = f"a mesh of its own, {dict(devices[0].mesh.shape)}"
    warnings(
        "constraints",
        f"with_sharding_constraint{user_mesh} is left out, {len(left_out)} times: each "
        f"stage runs on {stage_devices}, and no value depends on a constraint. To "
        f"shard arrays within a stage, give mesh= of the pipeline with the axes that "
        f"they name",
    )


def _leaves_out(device: Device, sharding: Any) -> bool:
    """True if a constraint would change something there, and cannot be kept.

    On one device each array is already as a mesh of that device needs it.
    """
    if isinstance(device, StageMesh):
        spec = getattr(sharding, "spec", None)
        return spec is None or not device.has_axes(spec)
    mesh = getattr(sharding, "mesh", None)
    return not isinstance(mesh, Mesh) or {*mesh.devices.flat} != devices_of(device)


def _meshes(closed: core.ClosedJaxpr) -> Iterator[tuple[str, Mesh]]:
    """Yields operations with meshes of devices, in loops and branches too."""
    for eqn in _jaxpr.equations(closed):
        if _sharding_constraints.is_constraint(eqn):
            continue
        for value in jax.tree.leaves(list(eqn.params.values())):
            mesh: Any = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh

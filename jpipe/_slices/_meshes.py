"""Meshes of a user's own in what is divided: a stage runs on its own devices alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from .._faults import refuse
from .._instructions._transfer import Device, devices_of
from .._jaxprs import _jaxpr


def check(closed: core.ClosedJaxpr, places: Sequence[Device]) -> None:
    """Checks that a program names no devices but those on which each stage runs.

    Args:
      closed: the program.
      places: where stages run.

    Raises:
      ValueError: with each operation that does.
    """
    stages = {devices_of(place) for place in places}
    refuse(
        "the program contains a mesh of devices, and each of its stages runs on "
        "devices of its own; leave the operation out, or type "
        "nn.with_logical_constraint, and give mesh= and sharding= of the pipeline "
        "to shard parameters over the devices of a stage",
        [
            f"{name} over {mesh.size} devices, {dict(mesh.shape)}"
            for name, mesh in _meshes(closed)
            if stages != {frozenset(mesh.devices.flat)}
        ],
    )


def _meshes(closed: core.ClosedJaxpr) -> Iterator[tuple[str, Mesh]]:
    """The operations with meshes of devices, in loops and branches too."""
    for eqn in closed.jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values())):
            mesh: Any = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield eqn.primitive.name, mesh
        for inner in _jaxpr.inside(eqn):
            yield from _meshes(inner)

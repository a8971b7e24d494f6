"""Shardings of arrays on a place of several devices: replicated, sharded or stacked.

A stage may have a mesh of its own. Along its axis ``data`` each device runs what one
device would run, on examples of its own: what a shard has made is stacked along a new
first axis, and programs map over it. What is not stacked is one array for the whole
place. All other axes are left to XLA, which partitions programs by their arguments.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Leaves = Sequence[Any]
# The axis over which examples are spread.
DATA = "data"


class Cut(NamedTuple):
    """Micro-batches of one size, of a leaf of a mini-batch.

    Shard ``d`` of micro-batch ``m`` is number ``m * D + d`` of ``M * D`` parts.

    Attributes:
      axis: of the examples.
      start: the first of its examples.
      parts: how many micro-batches there are.
      size: the examples of one shard of each.
    """

    axis: int
    start: int
    parts: int
    size: int


class Sharding(NamedTuple):
    """The sharding of one array on a place of several devices; without effect on one.

    Attributes:
      stacked: whether it is what each shard has, along a new first axis.
      spec: which other axes of the mesh it is cut along.
      cut: what of a leaf of the mini-batch it is, on its way to a place.
    """

    stacked: bool = False
    spec: P = P()
    cut: Cut | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether each shard has all of it."""
        return DATA not in self.axes

    @property
    def axes(self) -> list[str]:
        """The axes of the mesh that it is cut along, but for what is stacked."""
        return jax.tree.leaves(tuple(self.spec))

    def gathered(self) -> "Sharding":
        """The same with all of it in each shard."""
        return self._replace(spec=narrowed(self.spec, lambda name: name != DATA))


WHOLE = Sharding()
STACKED = Sharding(stacked=True)


@dataclass(frozen=True)
class SubMesh:
    """The devices of a place, where they are several.

    Attributes:
      mesh: all its axes are auto; none is of stages.
    """

    mesh: Mesh

    @classmethod
    def of(cls, devices: np.ndarray, names: Sequence[str]) -> "SubMesh":
        """Devices along named axes."""
        return cls(
            Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))
        )

    @cached_property
    def num_shards(self) -> int:
        """Over how many shards examples are spread."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def first(self) -> Any:
        """The first of its devices."""
        return self.mesh.devices.flat[0]

    @property
    def process_index(self) -> int:
        """The process of its devices."""
        return self.first.process_index

    def __str__(self) -> str:
        devices = [str(device) for device in self.mesh.devices.flat]
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{devices[0]} to {devices[-1]} ({axes})"

    def sharding(self, sharding: Sharding, on_host: bool = False) -> NamedSharding:
        """What JAX calls it."""
        spec = P(DATA, *sharding.spec) if sharding.stacked else sharding.spec
        kind = "pinned_host" if on_host else None
        return NamedSharding(self.mesh, spec, memory_kind=kind)

    def fitting(self, sharding: Sharding, shape: Sequence[int]) -> Sharding:
        """The same sharding on this place, without the axes that do not fit.

        Those are axes that other meshes have, and axes that do not divide the shape.
        """
        sizes = self.mesh.shape

        def fits(part: Any, size: int) -> bool:
            return size % math.prod(sizes[name] for name in jax.tree.leaves(part)) == 0

        spec = narrowed(sharding.spec, sizes.__contains__)
        pairs = zip(spec, shape, strict=False)
        parts = [part if fits(part, size) else None for part, size in pairs]
        return sharding._replace(spec=narrowed(P(*parts)))

    def has_axes(self, spec: P) -> bool:
        """Whether a constraint of a user's program has a meaning here.

        The mesh must have all of its axes but `DATA`, along which a stage may have one
        device.
        """
        names = {*jax.tree.leaves(tuple(spec))}
        return names <= {DATA, P.UNCONSTRAINED, *self.mesh.axis_names}

    def constrained(self, array: Any, spec: P | None, *, mapped: bool) -> Any:
        """An array of a user's program, constrained as far as that has a meaning here.

        Args:
          array: an array in a program of this place.
          spec: how it is to lie on a mesh of the user's; ``None`` if that is not known.
          mapped: whether the program is that of one shard, see `mapped`. Then examples
            are spread already, and `DATA` has no meaning.
        """
        axes = {*self.mesh.axis_names} - ({DATA} if mapped else set())
        if spec is None or not axes or not self.has_axes(spec):
            return array
        wanted = narrowed(spec, {P.UNCONSTRAINED, *axes}.__contains__)
        for size, part in zip(array.shape, wanted, strict=False):
            names = jax.tree.leaves(part)
            if size % math.prod(self.mesh.shape.get(name, 1) for name in names):
                return array
        sharding = wanted if mapped else NamedSharding(self.mesh, wanted)
        return jax.lax.with_sharding_constraint(array, sharding)

    def local_bytes(self, nbytes: int, sharding: Sharding) -> int:
        """What each device holds of what is ``nbytes`` for a shard."""
        if not len(sharding.spec):
            return nbytes
        return nbytes // math.prod(self.mesh.shape[name] for name in sharding.axes)

    def mapped(
        self, run: Callable[..., Leaves], given: Sequence[Sharding]
    ) -> Callable[..., Leaves]:
        """A function of one shard as one of all, with stacked results.

        What is not stacked and not in each shard is gathered first. A shard's program
        is that of one device: nothing is summed over shards, as XLA would on its own.

        Args:
          run: ``run(*leaves) -> leaves``.
          given: of its arguments.
        """

        def local(*leaves: Any) -> tuple[Any, ...]:
            results = run(*map(_local, leaves, given))
            return tuple([jnp.expand_dims(result, 0) for result in results])

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(
                P(DATA) if sharding.stacked else _only_data(sharding)
                for sharding in given
            ),
            out_specs=P(DATA),
            axis_names={DATA},
            # What a shard differentiates is its own; nobody differentiates this.
            check_vma=False,
        )


def _local(leaf: Any, sharding: Sharding) -> Any:
    """What one shard sees of an argument."""
    if sharding.stacked:
        return leaf[0]
    for axis, part in enumerate(_only_data(sharding)):
        if part:
            leaf = jax.lax.all_gather(leaf, DATA, axis=axis, tiled=True)
    return leaf


def _only_data(sharding: Sharding) -> P:
    return narrowed(sharding.spec, lambda name: name == DATA)


def narrowed(spec: P, keeps: Callable[[str], bool] = bool) -> P:
    """A spec with some of its axes alone, as short as it can be."""
    parts: list[Any] = []
    for part in spec:
        names = [name for name in jax.tree.leaves(part) if keeps(name)]
        parts.append(tuple(names) if len(names) > 1 else (names or [None])[0])
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)

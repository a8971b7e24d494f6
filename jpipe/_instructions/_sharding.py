"""Shardings of arrays on a place of several devices: replicated, sharded or stacked.

A stage may have a mesh. Along its axis ``data`` each device runs the program of one
device on its part of the examples: such a call is *mapped* over the shards, and its
results are *stacked* along a new first axis. What is not stacked is one array for the
whole place. All other axes are left to XLA, which partitions programs by their
arguments.

    stacked:     [D, ...]  shard d holds [...], the result of its examples
    not stacked: [...]     sharded by a spec over the mesh, or replicated

A mapped call may read both: each shard its part of what is stacked, and all of what is
not. A call that is not mapped reads a stacked array with its axis of shards. A result
that is an argument unchanged is that argument, stacked or not, whatever the call.
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

from .._jaxprs._host_memory import KIND

Leaves = Sequence[Any]
# The axis over which examples are spread.
DATA = "data"


class MicrobatchSplit(NamedTuple):
    """Micro-batches of one size, of a leaf of a mini-batch.

    Shard ``d`` of micro-batch ``m`` is part ``m * D + d`` of ``M * D`` equal parts.

    Attributes:
      axis: the axis of the examples.
      start: the index of the first example.
      parts: the number of micro-batches.
      size: the number of examples of one shard of a micro-batch.
    """

    axis: int
    start: int
    parts: int
    size: int


class Sharding(NamedTuple):
    """The sharding of one array on a place; on one device only the memory matters.

    Attributes:
      stacked: True if shards have arrays of their own, along a new first axis.
      spec: the other axes of the mesh along which it is sharded.
      split: the micro-batches that it holds, of a leaf that is on its way to a place.
      on_host: True if it is in the memory of the host of the devices.
    """

    stacked: bool = False
    spec: P = P()
    split: MicrobatchSplit | None = None
    on_host: bool = False

    @property
    def memory_kind(self) -> str | None:
        """The kind of its memory, as JAX calls it; ``None``: the default."""
        return KIND if self.on_host else None

    @property
    def is_gathered(self) -> bool:
        """True if each shard has all of it."""
        return DATA not in self.axes

    @property
    def axes(self) -> list[str]:
        """The axes of the mesh along which it is sharded, without that of the stack."""
        return jax.tree.leaves(tuple(self.spec))

    def gathered(self) -> "Sharding":
        """The sharding after a gather along `DATA`: each shard has all of it."""
        return self._replace(spec=narrowed(self.spec, lambda name: name != DATA))


WHOLE = Sharding()
STACKED = Sharding(stacked=True)


@dataclass(frozen=True)
class StageMesh:
    """The devices of a place that has more than one.

    Attributes:
      mesh: the devices; all axes are auto, and none is of stages.
    """

    mesh: Mesh

    @classmethod
    def of(cls, devices: np.ndarray, names: Sequence[str]) -> "StageMesh":
        """The mesh of devices along named axes."""
        axis_types = (AxisType.Auto,) * len(names)
        return cls(Mesh(devices, tuple(names), axis_types=axis_types))

    @cached_property
    def num_shards(self) -> int:
        """The number of shards over which examples are spread."""
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

    def sharding(self, sharding: Sharding) -> NamedSharding:
        """The `jax.sharding.NamedSharding` that it is here."""
        spec = P(DATA, *sharding.spec) if sharding.stacked else sharding.spec
        return NamedSharding(self.mesh, spec, memory_kind=sharding.memory_kind)

    def fitting(self, sharding: Sharding, shape: Sequence[int]) -> Sharding:
        """The sharding on this place, without the axes that do not fit.

        These are axes that only other meshes have, and axes that do not divide the
        shape.
        """
        sizes = self.mesh.shape
        spec = narrowed(sharding.spec, sizes.__contains__)
        parts: list[Any] = []
        for part, size in zip(spec, shape, strict=False):
            num_parts = math.prod(sizes[name] for name in jax.tree.leaves(part))
            parts.append(part if size % num_parts == 0 else None)
        return sharding._replace(spec=narrowed(P(*parts)))

    def has_axes(self, spec: P) -> bool:
        """True if a constraint of a user's program has a meaning here.

        The mesh must have all of its axes but `DATA`, along which a stage may have one
        device.
        """
        names = {*jax.tree.leaves(tuple(spec))}
        return names <= {DATA, P.UNCONSTRAINED, *self.mesh.axis_names}

    def constrained(self, array: Any, spec: P | None, *, mapped: bool) -> Any:
        """An array of a user's program, constrained as far as that has a meaning here.

        Args:
          array: an array in a program of this place.
          spec: its spec on a mesh of the user's; ``None``: unknown.
          mapped: True if the program is that of one shard, see `mapped`. Then examples
            are spread already, and `DATA` has no meaning.
        """
        axes = {*self.mesh.axis_names}
        if mapped:
            axes -= {DATA}
        if spec is None or not axes or not self.has_axes(spec):
            return array

        local_spec = narrowed(spec, {P.UNCONSTRAINED, *axes}.__contains__)
        for size, part in zip(array.shape, local_spec, strict=False):
            names = jax.tree.leaves(part)
            if size % math.prod(self.mesh.shape.get(name, 1) for name in names):
                return array
        sharding = local_spec if mapped else NamedSharding(self.mesh, local_spec)
        return jax.lax.with_sharding_constraint(array, sharding)

    def local_bytes(self, nbytes: int, sharding: Sharding) -> int:
        """The bytes on each device of an array that has ``nbytes`` for a shard."""
        if not len(sharding.spec):
            return nbytes
        return nbytes // math.prod(self.mesh.shape[name] for name in sharding.axes)

    def mapped(
        self, run: Callable[..., Leaves], shardings: Sequence[Sharding]
    ) -> Callable[..., Leaves]:
        """Maps a function of one shard over all shards; its results are stacked.

        What is not stacked and not in each shard is gathered first. A shard's program
        is that of one device: nothing is summed over shards, as XLA would by itself.

        Args:
          run: ``run(*leaves) -> leaves``.
          shardings: the sharding of each argument.
        """

        def local(*leaves: Any) -> tuple[Any, ...]:
            results = run(*map(_of_shard, leaves, shardings))
            return tuple([jnp.expand_dims(result, 0) for result in results])

        in_specs = [P(DATA) if x.stacked else _data_spec(x) for x in shardings]
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=P(DATA),
            axis_names={DATA},
            # Derivatives are taken within a shard; nobody differentiates this.
            check_vma=False,
        )


def _of_shard(leaf: Any, sharding: Sharding) -> Any:
    """The part of an argument that the program of one shard reads."""
    if sharding.stacked:
        return leaf[0]
    for axis, part in enumerate(_data_spec(sharding)):
        if part:
            leaf = jax.lax.all_gather(leaf, DATA, axis=axis, tiled=True)
    return leaf


def _data_spec(sharding: Sharding) -> P:
    """The spec of a sharding along `DATA` alone."""
    return narrowed(sharding.spec, lambda name: name == DATA)


def narrowed(spec: P, keeps: Callable[[str], bool] = bool) -> P:
    """A spec with only the axes that a predicate keeps, as short as it can be."""
    parts: list[Any] = []
    for part in spec:
        names = [name for name in jax.tree.leaves(part) if keeps(name)]
        if len(names) > 1:
            parts.append(tuple(names))
        else:
            parts.append(names[0] if names else None)
    while parts and parts[-1] is None:
        parts.pop()
    return P(*parts)

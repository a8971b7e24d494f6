"""Where parameters are between steps: the stage and the sharding of each."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._arguments import _variables
from .._instructions import _transfer
from .._instructions._agreement import stage_facts
from .._instructions._sharding import Sharding
from .._instructions._transfer import Device, devices_of
from .._messages import raise_all
from ._stage_placement import StagePlacement

PyTree = Any


class ParamLayout:
    """Where the leaves of a tree of parameters are between steps.

    Args:
      pipe: the schedule and the devices.
      specs: the tree.
      owner_stages: the stage of each leaf.
      shardings: the sharding of each leaf there.
      marks: one bool per leaf; True if it is trained.
      has_collections: whether it has parameters in ``"params"`` and others, of a model
        or of each layer of a list.
      advice: what to type where one is not in place.

    Attributes:
      paths: the path of each leaf.
      specs: the spec and the place of each leaf.
      params: the indices of the leaves that are in ``"params"``.
      trained: one bool for each of these; True if it is trained.
    """

    def __init__(
        self,
        pipe: StagePlacement,
        specs: PyTree,
        *,
        owner_stages: Sequence[int],
        shardings: Sequence[Sharding],
        marks: Sequence[bool],
        has_collections: bool,
        advice: str,
    ) -> None:
        flat = jax.tree_util.tree_leaves_with_path(specs)
        self.paths = [path for path, _ in flat]
        self.specs = [
            (leaf, pipe.place(stage))
            for (_, leaf), stage in zip(flat, owner_stages, strict=True)
        ]
        self.owner_stages = [*owner_stages]
        self.shardings = [*shardings]
        self.params = _variables.param_indices(specs, has_collections)
        self.marks = [*marks]
        self.trained = [marks[i] for i in self.params]
        self._pipe = pipe
        self._advice = advice

    @property
    def state(self) -> list[int]:
        """The indices of the leaves that are no parameters."""
        params = set(self.params)
        return [i for i in range(len(self.specs)) if i not in params]

    @property
    def locations(self) -> list[tuple[int, Sharding]]:
        """The owner stage of each leaf, and its sharding there."""
        return [*zip(self.owner_stages, self.shardings, strict=True)]

    @property
    def keys(self) -> list[list[str]]:
        """The keys that lead to each leaf, without the collection of parameters."""
        paths = [
            [jax.tree_util.keystr((key,), simple=True) for key in path]
            for path in self.paths
        ]
        return [path[1:] if path[0] == "params" else path for path in paths if path]

    @property
    def facts(self) -> dict[str, str]:
        """What processes compare of them, in words."""
        specs: list[list[Any]] = [[] for _ in self._pipe.stages]
        for (spec, _), stage in zip(self.specs, self.owner_stages, strict=True):
            specs[stage].append(spec)
        return stage_facts(self._pipe.stages, specs)

    def check(self, leaves: Sequence[Any], tree: str = "params") -> None:
        """Raises if a leaf was overwritten, or is not where it is read."""
        _variables.check_alive(leaves)
        faults: dict[int, str] = {}  # one of each stage
        for path, leaf, stage, sharding in zip(
            self.paths, leaves, self.owner_stages, self.shardings, strict=True
        ):
            device, own = self._pipe.devices[stage], self._pipe.stages[stage]
            if isinstance(leaf, jax.Array) and _transfer.is_in_place(
                leaf, device, sharding
            ):
                continue
            faults[stage] = faults.get(stage) or (
                f"stage {stage}{f' ({own})' * bool(own.layers)} runs on {device}, and "
                f"{tree}{jax.tree_util.keystr(path)} is "
                f"{_place(leaf, device, sharding)}"
            )
        place = "state = pipe.place(state)" if tree == "state" else self._advice
        raise_all(f"{tree}: not in place; type {place}", [*faults.values()])


def _place(leaf: Any, device: Device, sharding: Sharding) -> str:
    """Where a parameter is; on its own device how it lies there."""
    there = getattr(leaf, "sharding", None)
    if isinstance(there, NamedSharding) and there.device_set == devices_of(device):
        unsaid = " (under other nn.logical_axis_rules?)" if not sharding.axes else ""
        return f"there as {there.spec}, needed as {sharding.spec}{unsaid}"
    # A leaf of NumPy answers "cpu", a sharded one its sharding.
    return f"on {leaf.device}"

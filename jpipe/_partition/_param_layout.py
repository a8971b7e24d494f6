"""The layout of parameters between steps: the stage and the sharding of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._arguments import _stacked, _variables
from .._instructions import _transfer
from .._instructions._sharding import Sharding
from .._instructions._transfer import Device, devices_of
from .._jaxprs._host_memory import is_on_host
from .._jaxprs._pieces import Pieces
from .._layers._text import shape_text
from .._messages import raise_all
from ._stage_placement import StagePlacement

PyTree = Any


class ParamLayout:
    """The layout of a tree of parameters between steps.

    Of a model it is the tree of all variables, state included. A parameter in pieces
    is one leaf to its user, and as many leaves here as it has pieces.

    Args:
      placement: the schedule and the devices.
      specs: the tree, with a node of pieces for each parameter in pieces.
      pieces: index of a leaf of the user's tree -> its pieces.
      owner_stages: the stage of each leaf.
      shardings: the sharding of each leaf there.
      is_leaf_trained: one bool per leaf; True if it is trained.
      has_collections: True if the tree, or each entry of a list, has the collection
        ``"params"`` and others.
      name: the name of the tree, for errors.
      advice: the call to type if a leaf is not in place.

    Attributes:
      paths: the path of each leaf.
      names: the name of each leaf, for errors.
      specs: the spec of each leaf.
      places: the place of the owner stage of each leaf.
      pieces: as in the arguments; so are `owner_stages`, `shardings` and
        `is_leaf_trained`.
      params: the indices of the leaves that are in ``"params"``.
      is_param_trained: one bool per index in `params`; True if it is trained.
    """

    def __init__(
        self,
        placement: StagePlacement,
        specs: PyTree,
        *,
        pieces: Mapping[int, Pieces],
        owner_stages: Sequence[int],
        shardings: Sequence[Sharding],
        is_leaf_trained: Sequence[bool],
        has_collections: bool,
        name: str,
        advice: str,
    ) -> None:
        self.pieces = pieces
        self.paths = list[Any]()
        self.specs = list[Any]()
        for path, spec in jax.tree_util.tree_leaves_with_path(specs):
            self.paths.append(path)
            self.specs.append(spec)
        self.names = [f"{name}{jax.tree_util.keystr(path)}" for path in self.paths]
        self.places = [placement.place_of(stage) for stage in owner_stages]
        self.owner_stages = [*owner_stages]
        self.shardings = [*shardings]
        self.params = _variables.param_indices(specs, has_collections=has_collections)
        self.is_leaf_trained = [*is_leaf_trained]
        self.is_param_trained = [is_leaf_trained[i] for i in self.params]
        self._structure = jax.tree.structure(specs)
        self._placement = placement
        self._advice = advice

    def split_params(self, params: PyTree) -> PyTree:
        """A user's tree of parameters, with nodes for parameters in pieces."""
        return _stacked.split_pieces(params, self.pieces)

    def join_params(self, leaves: Sequence[Any]) -> PyTree:
        """The tree of a user, from its leaves here; ``None`` for some is allowed."""
        tree = self._structure.unflatten(leaves)
        return _stacked.join_pieces(tree) if self.pieces else tree

    def place(self, params: PyTree) -> PyTree:
        """Puts each leaf of a user's tree onto the devices of its stage.

        Args:
          params: the tree, on the host or any devices.
        """
        placed = _transfer.put_tree(
            self.split_params(params), self._placement.devices, self.locations
        )
        return self.join_params(jax.tree.leaves(placed))

    @property
    def param_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters, as their user has them."""
        is_param = set(self.params)
        specs = [x if i in is_param else None for i, x in enumerate(self.specs)]
        params = _stacked.join_pieces(self._structure.unflatten(specs))
        return tuple(tuple(spec.shape) for spec in jax.tree.leaves(params))

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
    def param_locations(self) -> list[tuple[int, Sharding]]:
        """The owner stage of each leaf of `params`, and its sharding there."""
        return [(self.owner_stages[i], self.shardings[i]) for i in self.params]

    @property
    def keys(self) -> list[list[str]]:
        """The keys that lead to each leaf, without the collection of parameters.

        There are none if the tree is a leaf.
        """
        keys_of_leaves = list[list[str]]()
        for path in self.paths:
            keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
            if keys:
                keys_of_leaves.append(keys[1:] if keys[0] == "params" else keys)
        return keys_of_leaves

    @property
    def facts(self) -> dict[str, str]:
        """The parameters of each stage in words, which processes compare."""
        specs: list[list[Any]] = [[] for _ in self._placement.stages]
        for spec, stage in zip(self.specs, self.owner_stages, strict=True):
            specs[stage].append(spec)
        return {
            f"stage {i}": f"{layers}, {shape_text(stage_specs)}"
            for i, (layers, stage_specs) in enumerate(
                zip(self._placement.stages, specs, strict=True)
            )
        }

    def check(self, leaves: Sequence[Any], tree_name: str = "params") -> None:
        """Checks that no leaf was overwritten, and that each is where it is read.

        Args:
          leaves: the leaves of the parameters.
          tree_name: the name of the parameters in errors.

        Raises:
          ValueError: with one leaf of each stage that is not in place.
        """
        _variables.check_alive(leaves)
        faults: dict[int, str] = {}  # stage -> its first leaf that is not in place
        for path, leaf, stage, sharding in zip(
            self.paths, leaves, self.owner_stages, self.shardings, strict=True
        ):
            device = self._placement.devices[stage]
            if isinstance(leaf, jax.Array) and _transfer.is_in_place(
                leaf, device, sharding
            ):
                continue
            if stage not in faults:
                group = self._placement.stages[stage]
                layers = f" ({group})" if group.layers else ""
                faults[stage] = (
                    f"stage {stage}{layers} runs on {device}, and "
                    f"{tree_name}{jax.tree_util.keystr(path)} is "
                    f"{_describe_place(leaf, device, sharding)}"
                )
        advice = "state = pipe.place(state)" if tree_name == "state" else self._advice
        raise_all(f"{tree_name}: not in place; type {advice}", [*faults.values()])


def _describe_place(leaf: Any, device: Device, sharding: Sharding) -> str:
    """The device of a leaf; if it is the right one, its memory or sharding there."""
    if is_on_host(leaf):
        return "in the memory of the host (pinned_host)"
    actual = getattr(leaf, "sharding", None)
    if isinstance(actual, NamedSharding) and actual.device_set == devices_of(device):
        hint = " (under other nn.logical_axis_rules?)" if not sharding.axes else ""
        return f"there as {actual.spec}, needed as {sharding.spec}{hint}"
    # A leaf of NumPy answers "cpu", a sharded one its sharding.
    return f"on {leaf.device}"

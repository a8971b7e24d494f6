"""A function on mini-batches of one kind: divided, and written into a graph."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._functions._batch import Batch
from .._instructions import _transfer
from .._instructions._agreed import batch_facts, stage_facts
from .._instructions._collector import paused
from .._instructions._graph import OUTSIDE, Graph, Value
from .._instructions._program import Program
from .._instructions._sharding import Sharding
from .._instructions._transfer import Device, devices_of
from .._messages import raise_all
from .._run import _variables
from .._run._pipe import Pipe
from ..schedules import Action
from ..schedules._action import FORWARD
from ._cuts import Cuts
from ._epilogue import StepOutputs
from ._join import Join
from ._lower import Lowering
from ._residuals import Residuals
from ._stages import Stages

PyTree = Any


class Layout:
    """Where the leaves of a tree of parameters are between steps.

    Args:
      pipe: the schedule and the devices.
      specs: the tree.
      owner_stages: of each leaf its stage.
      shardings: how it lies there.
      marks: whether it is trained.
      has_collections: whether it has parameters in ``"params"`` and others, of a model
        or of each layer of a list.
      advice: what to type where one is not in place.

    Attributes:
      paths: of each leaf.
      specs: of each leaf what it is like, and its place.
      params: the numbers of those that are in ``"params"``.
      trained: of these whether each is trained.
    """

    def __init__(
        self,
        pipe: Pipe,
        specs: PyTree,
        owner_stages: list[int],
        shardings: list[Sharding],
        marks: Sequence[bool],
        has_collections: bool,
        advice: str,
    ) -> None:
        flat = jax.tree_util.tree_leaves_with_path(specs)
        self.paths = [path for path, _ in flat]
        pairs = zip(flat, owner_stages, strict=True)
        self.specs = [(leaf, pipe.place(stage)) for (_, leaf), stage in pairs]
        self.owner_stages, self.shardings = owner_stages, shardings
        self.params = _variables.numbers_of_params(specs, has_collections)
        self.marks = [*marks]
        self.trained = [marks[i] for i in self.params]
        self._pipe, self._advice = pipe, advice

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
            if isinstance(leaf, jax.Array) and _transfer.is_at(leaf, device, sharding):
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


class Built:
    """A function on a mini-batch, divided.

    Args:
      pipe: the schedule and the devices.
      stages: the slices.
      layout: where the parameters are.
      cuts: where it is divided; ``None`` of a list of layers.
      batch: the mini-batch, all that is given of it as one tree.
      aux: specs of what is returned beside the loss, without what is written.
      joins: how that is joined; ``None`` where the batch may have too few examples,
        so that nothing of this runs.
    """

    def __init__(
        self,
        pipe: Pipe,
        stages: Stages,
        layout: Layout,
        cuts: Cuts | None,
        batch: Batch,
        aux: PyTree,
        joins: Sequence[Join] | None,
    ) -> None:
        self.pipe, self.stages, self.layout, self.cuts = pipe, stages, layout, cuts
        self.batch, self.runs, self._joins = batch, joins is not None, joins or ()
        self.aux_tree = jax.tree.structure(aux)
        # Of what is written, by its number, which leaf of what is returned it is.
        leaves = (zip(own.at, own.leaves, strict=True) for own in stages.states)
        self.written = sorted(pair for own in leaves for pair in own)

    def into(
        self, graph: Graph, params: Sequence[Value], given: Sequence[Value]
    ) -> StepOutputs:
        """Writes the mini-batch into a graph.

        Args:
          graph: the graph.
          params: the leaves of the parameters, in place.
          given: those of the mini-batch, anywhere.
        """
        pipe, stages, batch = self.pipe, self.stages, self.batch
        graph.facts |= batch_facts(batch) | self.layout.facts
        count = len(params)
        constants = [
            graph.constant(jnp.asarray(array), pipe.place(stage))
            for array, stage in zip(
                stages.first.constants, stages.owner_stages[count:], strict=False
            )
        ]
        lowering = Lowering(
            graph=graph,
            pipe=pipe,
            stages=stages,
            batch=batch,
            params=[*params, *constants],
            given=list(given),
            joins=self._joins,
        )
        return lowering.run() if stages.first.has_loss else lowering.forwards()

    def given(self, params: PyTree, args: PyTree, tree: str = "variables") -> list[Any]:
        """What the program is given; ``tree`` is what errors call the parameters.

        Raises:
          ValueError: if parameters were overwritten or are not in place.
          TypeError: if a leaf belongs to a trace.
        """
        leaves, batch = jax.tree.leaves(params), jax.tree.leaves(args)
        _variables.check_concrete([*leaves, *batch])
        self.layout.check(leaves, tree)
        return [*leaves, *batch]

    def returned(self, outputs: Sequence[Any]) -> tuple[Any, PyTree, Iterator[Any]]:
        """Of the outputs of a program the loss, aux, and what comes after these."""
        loss, *rest = outputs
        count = self.aux_tree.num_leaves
        return loss, self.aux_tree.unflatten(rest[:count]), iter(rest[count:])

    def arguments(self, graph: Graph) -> tuple[list[Value], list[Value]]:
        """The parameters and the mini-batch as arguments of a graph."""
        pairs = zip(self.layout.specs, self.layout.shardings, strict=True)
        params = [graph.argument(*spec, sharding=sharding) for spec, sharding in pairs]
        specs = jax.tree.leaves(self.batch.args)
        return params, [graph.argument(spec, OUTSIDE) for spec in specs]

    @cached_property
    def program(self) -> Program:
        """``(*params, *mini-batch) -> (*loss, *aux, *grads)``."""
        return self._lowered([])

    @cached_property
    def program_with_state(self) -> Program:
        """The same, which gives what is no parameter too, as it is after training."""
        return self._lowered(self.state)

    @property
    def state(self) -> list[int]:
        """The numbers of the leaves that are no parameters."""
        params = set(self.layout.params)
        return [i for i in range(len(self.layout.specs)) if i not in params]

    @cached_property
    def compiled_actions(self) -> tuple[Action, ...]:
        """The actions of which a step runs a program."""
        labels = [i.label for i in self.program.instructions if not i.is_move]
        return tuple(label for label in labels if not isinstance(label, str))

    def residuals(self, stage: int) -> Residuals | None:
        """What a stage stores of a micro-batch, if it has forwards of their own."""
        by_itself = any(
            a.op == FORWARD and a.stage == stage for a in self.compiled_actions
        )
        return self.stages.residuals(stage) if by_itself else None

    @paused()
    def _lowered(self, state: Sequence[int]) -> Program:
        graph = self.pipe.graph()
        params, given = self.arguments(graph)
        loss, aux, grads, changed = self.into(graph, params, given)
        metrics, new = [*loss, *aux], [changed.get(i, params[i]) for i in state]
        own = graph.own([*metrics, *(grads[i] for i in sorted(grads)), *new])
        # Metrics are in each process; new values of parameters stay where these are.
        count = len(metrics) if loss else 0
        outputs = [*map(graph.everywhere, own[:count]), *own[count:]]
        return Program(graph, outputs)

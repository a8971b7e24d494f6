"""A function on mini-batches of one kind: divided, and written into a graph."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import _variables
from .._arguments._batch import Batch
from .._instructions._agreement import batch_facts
from .._instructions._garbage_collector import pause_collector
from .._instructions._graph import OUTSIDE, Graph, Value
from .._instructions._program import Program
from .._lower._epilogue import StepOutputs
from .._lower._join import Join
from .._lower._lowering import Lowering
from .._partition._cut_points import CutPoints
from .._partition._param_layout import ParamLayout
from .._partition._stage_placement import StagePlacement
from .._stage._residuals import Residuals
from .._stage._stages import Stages
from ..schedules import Action
from ..schedules._action import FORWARD

PyTree = Any


class Specialization:
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
        pipe: StagePlacement,
        stages: Stages,
        layout: ParamLayout,
        cuts: CutPoints | None,
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
        return self._lowered(self.layout.state)

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

    @pause_collector()
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

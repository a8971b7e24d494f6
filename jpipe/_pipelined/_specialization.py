"""A function on mini-batches of one signature: divided, and lowered to a program."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import _variables
from .._arguments._batch import Batch
from .._instructions._garbage_collector import pause_collector
from .._instructions._graph import OUTSIDE, Graph, Value
from .._instructions._program import Program
from .._layers._text import shape_text
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
      placement: the schedule and the devices.
      stages: the stages.
      layout: the stage and the sharding of each parameter.
      cuts: the cut points; ``None`` for a list of layers.
      batch: the mini-batch; its arguments are one tree.
      aux: specs of aux, without the state that is written.
      joins: the join of each leaf of aux; ``None`` if the batch may have too few
        examples to run.

    Attributes:
      runs: True if the batch has enough examples to run.
      aux_tree: the structure of aux.
      written: ``(index of the leaf among those of all variables, index in aux of its
        new value)`` of each state leaf that is written, in the order of the variables.
    """

    def __init__(
        self,
        *,
        placement: StagePlacement,
        stages: Stages,
        layout: ParamLayout,
        cuts: CutPoints | None,
        batch: Batch,
        aux: PyTree,
        joins: Sequence[Join] | None,
    ) -> None:
        self.placement = placement
        self.stages = stages
        self.layout = layout
        self.cuts = cuts
        self.batch = batch
        self.runs = joins is not None
        self._joins = () if joins is None else joins
        self.aux_tree = jax.tree.structure(aux)
        written = list[tuple[int, int]]()
        for state in stages.states:
            written += zip(state.param_indices, state.aux_indices, strict=True)
        self.written = sorted(written)

    def into(
        self, graph: Graph, params: Sequence[Value], batch_leaves: Sequence[Value]
    ) -> StepOutputs:
        """Writes the mini-batch into a graph.

        Args:
          graph: the graph.
          params: the leaves of the parameters, in place.
          batch_leaves: the leaves of the mini-batch, anywhere.
        """
        graph.facts["mini-batch"] = shape_text(self.batch.args)
        graph.facts |= self.layout.facts
        # Arrays that the function closes over are weights behind the parameters.
        constants = self.stages.traced().captured_arrays
        num_inputs = len(params) + len(constants)
        owner_stages = self.stages.owner_stages[len(params) : num_inputs]
        constant_values = list[Value]()
        for array, stage in zip(constants, owner_stages, strict=True):
            place = self.placement.place_of(stage)
            constant_values.append(graph.constant(jnp.asarray(array), place))

        lowering = Lowering(
            graph,
            placement=self.placement,
            stages=self.stages,
            batch=self.batch,
            params_and_constants=[*params, *constant_values],
            batch_leaves=list(batch_leaves),
            joins=self._joins,
        )
        if self.stages.traced().has_loss:
            return lowering.run()
        return lowering.run_forwards()

    def batch_arguments(self, graph: Graph, args: Sequence[PyTree]) -> list[Value]:
        """Adds the leaves of the first arguments of the batch to those of a graph.

        Args:
          graph: the graph.
          args: specs of these arguments.
        """
        leaf_specs = jax.tree.leaves(args)
        names = self.batch.leaf_names[: len(leaf_specs)]
        return [
            graph.argument(spec, OUTSIDE, name=name)
            for name, spec in zip(names, leaf_specs, strict=True)
        ]

    def check_arguments(
        self, params: PyTree, args: PyTree, tree_name: str = "variables"
    ) -> list[Any]:
        """Checks the arguments of the program; returns their leaves.

        Args:
          params: the parameters.
          args: the mini-batch.
          tree_name: the name of the parameters in errors.

        Raises:
          ValueError: if parameters were overwritten or are not in place.
          TypeError: if a leaf belongs to a trace.
        """
        param_leaves = jax.tree.leaves(self.layout.split_params(params))
        batch_leaves = jax.tree.leaves(args)
        _variables.check_concrete([*param_leaves, *batch_leaves])
        self.layout.check(param_leaves, tree_name)
        return [*param_leaves, *batch_leaves]

    def split_outputs(
        self, outputs: Sequence[Any]
    ) -> tuple[Any, PyTree, Iterator[Any]]:
        """Splits the outputs of a program: the loss, aux, and all that follows."""
        num_metrics = 1 + self.aux_tree.num_leaves
        aux = self.aux_tree.unflatten(outputs[1:num_metrics])
        return outputs[0], aux, iter(outputs[num_metrics:])

    @cached_property
    def program(self) -> Program:
        """``(*params, *mini-batch) -> (*loss, *aux, *grads)``."""
        return self._lowered([])

    @cached_property
    def program_with_state(self) -> Program:
        """``(*params, *mini-batch) -> (*loss, *aux, *grads, *new state)``."""
        return self._lowered(self.layout.state)

    @cached_property
    def compiled_actions(self) -> tuple[Action, ...]:
        """The actions for which a step runs a program."""
        labels = [x.label for x in self.program.instructions if not x.is_move]
        return tuple(label for label in labels if not isinstance(label, str))

    def residuals(self, stage: int) -> Residuals | None:
        """The residuals of a stage, if its forwards are programs of their own."""
        has_forwards = any(
            action.op == FORWARD and action.stage == stage
            for action in self.compiled_actions
        )
        return self.stages.residuals(stage) if has_forwards else None

    @pause_collector()
    def _lowered(self, state_indices: Sequence[int]) -> Program:
        """The program that also returns the new state of some leaves of the parameters.

        Args:
          state_indices: the indices of these leaves.
        """
        graph = self.placement.graph()
        params = list[Value]()
        for name, spec, place, sharding in zip(
            self.layout.names,
            self.layout.specs,
            self.layout.places,
            self.layout.shardings,
            strict=True,
        ):
            params.append(graph.argument(spec, place, name=name, sharding=sharding))
        batch_leaves = self.batch_arguments(graph, self.batch.args)

        step = self.into(graph, params, batch_leaves)
        metrics = [*step.loss, *step.aux]
        ordered_grads = [step.grads[i] for i in sorted(step.grads)]
        new_state = [step.new_state.get(i, params[i]) for i in state_indices]
        outputs = graph.as_own_arrays([*metrics, *ordered_grads, *new_state])

        # Each process gets the metrics of a loss; gradients and state stay in place.
        num_metrics = len(metrics) if step.loss else 0
        copies = [graph.bring_to_processes(value) for value in outputs[:num_metrics]]
        return Program(graph, [*copies, *outputs[num_metrics:]])

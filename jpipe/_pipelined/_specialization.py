"""A function on mini-batches of one signature, divided, to be written in a graph."""

import itertools
from collections.abc import Sequence
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
      state_axes: the axis of the examples of each of the function's state inputs.
      joins: the join of each leaf of aux, and of state; ``None`` if the batch may have
        too few examples to run.

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
        state_axes: Sequence[int | None],
        aux: PyTree,
        joins: Sequence[Join] | None,
    ) -> None:
        self.placement = placement
        self.stages = stages
        self.layout = layout
        self.cuts = cuts
        self.batch = batch
        self._state_axes = state_axes
        self.runs = joins is not None
        self._joins = () if joins is None else joins
        self.aux_tree = jax.tree.structure(aux)
        written = list[tuple[int, int]]()
        for state in stages.states:
            written += zip(state.param_indices, state.aux_indices, strict=True)
        self.written = sorted(written)

    def write(
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
        # State of examples is a part of the mini-batch.
        states = [params[i] for i in self.joined_state]
        batch = self.batch.with_argument(
            "state", [graph.specs[value] for value in states], self._state_axes
        )
        batch_leaves = [*batch_leaves, *states]
        # Arrays that the function closes over are weights behind the parameters.
        captured_arrays = self.stages.traced().captured_arrays
        num_inputs = len(params) + len(captured_arrays)
        owner_stages = self.stages.owner_stages[len(params) : num_inputs]
        captured_values = list[Value]()
        for array, stage in zip(captured_arrays, owner_stages, strict=True):
            place = self.placement.place_of(stage)
            captured_values.append(graph.constant(jnp.asarray(array), place))

        lowering = Lowering(
            graph,
            placement=self.placement,
            stages=self.stages,
            batch=batch,
            params_and_captured=[*params, *captured_values],
            batch_leaves=batch_leaves,
            joins=self._joins,
        )
        if self.stages.traced().has_loss:
            return lowering.write()
        return lowering.write_forwards()

    def write_batch_arguments(
        self, graph: Graph, args: Sequence[PyTree]
    ) -> list[Value]:
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

    def unpack(
        self, outputs: Sequence[Any], state_indices: Sequence[int] = ()
    ) -> StepOutputs:
        """The outputs of a program of a loss, by name: see `_make_program`.

        Args:
          outputs: the outputs.
          state_indices: the indices of the leaves whose new state is among them.
        """
        layout = self.layout
        trained_indices = itertools.compress(
            layout.param_indices, layout.is_param_trained
        )
        remaining = iter(outputs)
        loss = [next(remaining)]
        aux = [next(remaining) for _ in range(self.aux_tree.num_leaves)]
        grads = {i: next(remaining) for i in trained_indices}
        new_state = dict(zip(state_indices, remaining, strict=True))
        return StepOutputs(loss=loss, aux=aux, grads=grads, new_state=new_state)

    @cached_property
    def program(self) -> Program:
        """``(*params, *mini-batch) -> (*loss, *aux, *grads)``; lowered when it is read.

        Of the gradients alone: a training step runs `LoweredStep.program`.
        """
        return self._make_program([])

    @cached_property
    def program_with_state(self) -> Program:
        """``(*params, *mini-batch) -> (*loss, *aux, *grads, *new state)``."""
        return self._make_program(self.layout.state_indices)

    @property
    def joined_state(self) -> list[int]:
        """The parameters that are state of examples, of which a call returns new."""
        return [x.param_index for x in self.stages.traced().state_inputs]

    @cached_property
    def program_with_joined_state(self) -> Program:
        """``(*params, *mini-batch) -> (*outputs, *new state of examples)``."""
        return self._make_program(self.joined_state)

    @cached_property
    def program_overwriting_state(self) -> Program:
        """The same, which overwrites the state that it reads."""
        return self._make_program(self.joined_state, donated=self.joined_state)

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
    def _make_program(
        self, state_indices: Sequence[int], *, donated: Sequence[int] = ()
    ) -> Program:
        """The program that also returns the new state of some leaves of the parameters.

        Args:
          state_indices: the indices of these leaves.
          donated: the indices of the leaves that it overwrites.
        """
        graph = self.placement.graph()
        params = list[Value]()
        for i, (name, spec, place, sharding) in enumerate(
            zip(
                self.layout.names,
                self.layout.specs,
                self.layout.places,
                self.layout.shardings,
                strict=True,
            )
        ):
            params.append(
                graph.argument(
                    spec, place, name=name, donated=i in donated, sharding=sharding
                )
            )
        batch_leaves = self.write_batch_arguments(graph, self.batch.args)

        results = self.write(graph, params, batch_leaves)
        metrics = [*results.loss, *results.aux]
        ordered_grads = [results.grads[i] for i in sorted(results.grads)]
        new_state = [results.new_state.get(i, params[i]) for i in state_indices]
        outputs = graph.as_own_arrays([*metrics, *ordered_grads, *new_state])

        # Each process gets the metrics of a loss; gradients and state stay in place.
        num_metrics = len(metrics) if results.loss else 0
        copies = [graph.bring_to_processes(value) for value in outputs[:num_metrics]]
        return Program(graph, [*copies, *outputs[num_metrics:]])

"""Lowers a schedule to a graph of calls, one for each action.

    F(s, m):  p, x, b             -> y, residuals[s, m]
    B(s, m):  residuals[s, m], dy -> dp, added to the sums of s, and dx
    I(s, m):  residuals[s, m], dy -> dx, more residuals[s, m]     (B in two halves)
    W(s, m):  residuals[s, m], dy -> dp, added to the sums of s

p are the weights of stage s, x its input activations and b its batch inputs of
micro-batch m. Among the residuals is all that the forward read. dy is the sum of the dx
of the stages that read y; for the loss it is the loss divisor. A forward also adds the
loss, and the state that it writes, such as statistics, to the sums of s. The last stage
runs F and B, or F and I, as one call if nothing comes between them on their rank, or if
F would store nothing but what it reads: they are *fused*, and run when the backward is
due.

A loss of the whole mini-batch is computed by the *tail*, between all forwards and all
backwards: see `_tail`. Then dy has a term from the tail, and nothing is fused.

No transfer is written here: where a value is read in another place, `Graph.bring` makes
a copy, sent as soon as the value is there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Sharding, StageMesh
from .._jaxprs._computation import Computation
from .._partition._remat_mode import Stored
from .._partition._stage_placement import StagePlacement
from .._stage._stage_functions import StageFunctions
from .._stage._stages import Stages
from .._trace._traced_function import Tail
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._epilogue import Epilogue, StepOutputs
from ._join import Join
from ._microbatch_inputs import MicrobatchInputs
from ._microbatch_sums import MicrobatchSums
from ._prologue import Prologue
from ._tail import TailOutputs, write_tail

Values = list[Value]
# A stage and a micro-batch.
Cell = tuple[int, int]


class Lowering:
    """The actions of a mini-batch, written into a graph.

    One that is made has written what comes before the actions: the prologue, the parts
    of the mini-batch, the zeros of sums and the loss divisor.

    Args:
      graph: the graph that is written.
      placement: the schedule and the devices.
      stages: the stages that run.
      batch: the mini-batch.
      params_and_captured: the parameters, and behind them the arrays that the
        function closes over, as values.
      batch_leaves: the leaves of the mini-batch, as values.
      joins: the join of each leaf of aux.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        placement: StagePlacement,
        stages: Stages,
        batch: Batch,
        params_and_captured: Values,
        batch_leaves: Values,
        joins: Sequence[Join],
    ) -> None:
        self._graph = graph
        self._placement = placement
        self._stages = stages
        self._batch = batch
        self._num_microbatches = len(batch.sizes)
        # True if each shard of a stage runs its actions by itself.
        self._is_mapped = batch.num_shards > 1
        # True if a stage has several devices.
        self._has_meshes = any(
            isinstance(x, StageMesh) for x in placement.devices_of_places
        )

        microbatch_inputs = MicrobatchInputs(graph, placement, batch)
        self._prologue = Prologue(graph, placement, stages, params_and_captured)
        self._weights = [
            *microbatch_inputs.gather_weights(params_and_captured),
            *self._prologue.write_values(),
        ]
        self._epilogue = Epilogue(self._prologue, batch, self._weights, joins)
        # [stage][microbatch] -> the batch inputs of the stage
        self._batch_inputs = [
            self._split_inputs(microbatch_inputs, batch_leaves, stage)
            for stage in range(stages.num_stages)
        ]
        # (variable, microbatch) -> the value that its stage computes
        self._outputs: dict[tuple[core.Var, int], Value] = {}
        # (variable, microbatch) -> {reader stage -> its cotangent}; the arrays that the
        # tail joins count as stages behind the last one
        self._cotangents: dict[tuple[core.Var, int], dict[int, Value]] = {}
        # (stage, microbatch) -> all that the next backward reads but its sums: operands
        # and residuals of the forward, then cotangents or the loss divisor, and what I
        # stores for W
        self._backward_operands: dict[Cell, Values] = {}
        # (number of cotangents, shape, dtype) -> the function that adds them
        self._cotangent_sums: dict[Any, Computation] = {}
        self._stage_names = [str(stage) for stage in placement.layer_groups]
        # A forward pass alone has neither sums nor a loss divisor.
        self._sums = MicrobatchSums(
            graph,
            placement=placement,
            stages=stages,
            batch=batch,
            weights=self._weights,
        )
        self._loss_divisor = self._prologue.write_loss_divisor(
            batch, self._batch_inputs[self._last_stage]
        )
        self._fused_cells = self._find_fused_cells()

    @property
    def _last_stage(self) -> int:
        return self._stages.num_stages - 1

    @property
    def _last_place(self) -> Place:
        return self._placement.place_of(self._last_stage)

    # ------------------------------------------------------------------- batch inputs

    def _split_inputs(
        self, microbatch_inputs: MicrobatchInputs, batch_leaves: Values, stage: int
    ) -> list[Values]:
        """The batch inputs of a stage, for each micro-batch.

        Batch inputs of the function are the leaves of the mini-batch, the index of
        the micro-batch, and numbers that are folded into keys.
        """
        all_inputs = self._stages.traced().batch_inputs
        stage_inputs = self._stages.slice_of(stage).batch_inputs
        indices = [all_inputs.index(var) for var in stage_inputs]
        num_leaves = len(batch_leaves)
        leaf_indices = [i for i in indices if i < num_leaves]
        rows = microbatch_inputs.split(
            [batch_leaves[i] for i in leaf_indices],
            axes=[self._batch.axes[i] for i in leaf_indices],
            stage=stage,
        )

        inputs_of_microbatches = list[Values]()
        for m, parts in enumerate(rows):
            # index of a batch input of the function -> its value
            values = dict(zip(leaf_indices, parts, strict=True))
            for i in indices:
                if i == num_leaves:
                    values[i] = self._microbatch_index(stage, m)
                elif i > num_leaves:
                    values[i] = self._folded_number(stage, m, i - num_leaves - 1)
            inputs_of_microbatches.append([values[i] for i in indices])
        return inputs_of_microbatches

    def _folded_number(self, stage: int, m: int, number_index: int) -> Value:
        """A number that is folded into a key."""
        folded_number = self._stages.traced(m).folded_numbers[number_index]
        place = self._placement.place_of(stage)
        return self._graph.constant(np.asarray(folded_number), place)

    def _microbatch_index(self, stage: int, m: int) -> Value:
        """The index of a micro-batch; shards count as micro-batches."""
        place = self._placement.place_of(stage)
        num_shards = self._batch.num_shards
        first = m * num_shards
        shard_indices = np.arange(first, first + num_shards, dtype=np.int32)
        if self._is_mapped:
            return self._graph.constant(shard_indices, place, stacked=True)
        return self._graph.constant(np.asarray(shard_indices[0]), place)

    # ------------------------------------------------------------------- the schedule

    def write(self) -> StepOutputs:
        """Writes the whole schedule of a training step."""
        actions = self._placement.schedule.order()
        tail_outputs = None
        if self._tail is not None:
            # Each rank runs its forwards first, and so they may all be written first.
            actions = sorted(actions, key=lambda action: action.op != FORWARD)
        for action in actions:
            if self._tail is not None and tail_outputs is None and action.op != FORWARD:
                tail_outputs = self._run_tail(self._tail)
            is_fused = _cell(action) in self._fused_cells
            if action.op == FORWARD:
                if not is_fused:
                    self._forward(action)
            elif is_fused and action.op != WEIGHT:
                self._forward_backward(action)
            else:
                self._backward(action)

        loss_weights = Values()
        for m in range(self._num_microbatches):
            for atom in self._stages.traced(m).loss_weight:
                loss_weights.append(self._result_value(atom, m))
        return self._epilogue.write(
            sums=[self._sums.of_places(s) for s in range(self._stages.num_stages)],
            loss_weights=loss_weights,
            loss_divisor=self._loss_divisor,
            aux=self._aux() if tail_outputs is None else [tail_outputs.aux],
            tail_outputs=tail_outputs,
        )

    @property
    def _tail(self) -> Tail | None:
        return self._stages.traced().tail

    def _run_tail(self, tail: Tail) -> TailOutputs:
        """Writes the tail, and keeps the cotangents that it returns."""
        stages = self._stages
        weights = stages.tail_weights
        columns = list[Values]()
        for k in range(len(tail.axes)):
            column = Values()
            for m in range(self._num_microbatches):
                column.append(self._result_value(stages.traced(m).joined[k], m))
            columns.append(column)
        has_cotangent = [stages.has_gradient(var, 0) for var in stages.traced().joined]
        outputs = write_tail(
            self._graph,
            tail,
            place=self._last_place,
            weights=[self._weights[i] for i in weights],
            is_trained=[stages.trained[i] for i in weights],
            columns=columns,
            has_cotangent=has_cotangent,
            sizes=self._batch.sizes,
            num_shards=self._batch.num_shards,
        )
        indices = itertools.compress(range(len(columns)), has_cotangent)
        for k, cotangents in zip(indices, outputs.cotangents, strict=True):
            for m, value in enumerate(cotangents):
                of_readers = self._cotangents.setdefault(
                    (stages.traced(m).joined[k], m), {}
                )
                of_readers[stages.num_stages + k] = value  # it counts as later stages
        return outputs

    def write_forwards(self) -> StepOutputs:
        """Writes the forwards of the schedule alone."""
        for action in self._placement.schedule.order():
            if action.op == FORWARD:
                stage, m = _cell(action)
                forward = self._stages.forward(stage, m)
                results = self._call(forward, action, self._inputs(stage, m))
                self._keep_outputs(stage, m, results)
        return self._epilogue.write_outputs(self._aux())

    def _aux(self) -> list[Values]:
        """The results of each micro-batch that are joined, in the order of their joins.

        They are aux. In a forward pass they are its outputs and its new state.
        """
        rows = list[Values]()
        for m in range(self._num_microbatches):
            aux_vars = self._stages.traced(m).aux_vars
            atoms = [aux_vars[join.leaf_index] for join in self._epilogue.joins]
            rows.append([self._result_value(atom, m) for atom in atoms])
        return rows

    def _result_value(self, atom: Any, m: int) -> Value:
        """The value of a result of the function for a micro-batch."""
        if isinstance(atom, core.Literal):
            return self._graph.constant(np.asarray(atom.val), self._last_place)
        params = self._stages.traced(m).params
        if atom in params:
            return self._weights[params.index(atom)]
        return self._outputs[atom, m]

    def _find_fused_cells(self) -> set[Cell]:
        """Finds forwards of the last stage that run as one program with B, or with I.

        These are the ones that come right before their backwards; and wherever they
        stand, those that would store only their operands, since nobody reads their
        outputs before.
        """
        last = self._last_stage
        fused_cells = set[Cell]()
        if self._tail is not None:
            return fused_cells
        for m in range(self._num_microbatches):
            if self._stages.mode(last, m).stores is Stored.INPUTS:
                fused_cells.add((last, m))
        if fused_cells and self._stages.states[last].has_integers:
            # An integer of the state keeps the value of the last micro-batch that runs.
            # Fused forwards run later than their actions stand: if some are fused and
            # some are not, the last one to run may not be the last micro-batch.
            fused_cells |= {(last, m) for m in range(self._num_microbatches)}

        schedule = self._placement.schedule
        for rank in schedule.ranks_of[last]:
            actions = [x for x in schedule.rows[rank] if self._has_work(x)]
            for action, next_action in itertools.pairwise(actions):
                is_last_forward = action.op == FORWARD and action.stage == last
                if is_last_forward and _cell(next_action) == _cell(action):
                    fused_cells.add(_cell(action))
        return fused_cells

    def _has_work(self, action: Action) -> bool:
        """True if an action has anything to compute."""
        if action.op == FORWARD:
            return True
        stage, m = _cell(action)
        stage_slice = self._stages.slice_of(stage, m)
        if action.op == WEIGHT:
            return stage_slice.has_weight_grads
        return stage_slice.has_backward

    def _functions(self, action: Action) -> StageFunctions:
        """The functions of the stage of an action, in the action's remat mode."""
        stage, m = _cell(action)
        mode = self._stages.mode(stage, m)
        if (stage, m) in self._fused_cells:
            mode = mode.when_fused(is_whole_backward=action.op == BACKWARD)
        return self._stages.functions(stage, m, mode)

    # -------------------------------------------------------- operands and results

    def _call(
        self,
        function: Computation,
        action: Action,
        operands: Values,
        shardings: Sequence[Sharding] | None = None,
    ) -> Values:
        """Writes the call of an action."""
        return self._graph.call(
            function,
            self._placement.place_of(action.stage, action.microbatch),
            operands,
            label=action,
            layers=self._stage_names[action.stage],
            mapped=self._is_mapped,
            shardings=shardings,
        )

    def _inputs(self, stage: int, m: int) -> Values:
        """The inputs of a forward: weights, input activations and batch inputs."""
        stage_slice = self._stages.slice_of(stage, m)
        weights = zip(
            stage_slice.weight_vars, self._stages.weight_indices(stage, m), strict=True
        )
        # variable of the stage -> its value
        values = {var: self._weights[i] for var, i in weights}
        values |= {var: self._outputs[var, m] for var in stage_slice.input_activations}
        batch_inputs = self._batch_inputs[stage][m]
        values |= zip(stage_slice.batch_inputs, batch_inputs, strict=True)
        return [values[var] for var in stage_slice.closed.jaxpr.invars]

    def _keep_outputs(self, stage: int, m: int, results: Values) -> None:
        """Keeps the results of a forward that other stages read, or the user."""
        outputs = self._stages.slice_of(stage, m).outputs
        for var, value in zip(outputs, results[: len(outputs)], strict=True):
            self._outputs[var, m] = value

    def _keep_forward(
        self,
        action: Action,
        functions: StageFunctions,
        *,
        inputs: Values,
        results: Values,
    ) -> Values:
        """Keeps what the backward of a forward reads, and its outputs and sums.

        Args:
          action: the forward, or the backward with which it is fused.
          functions: the functions of its stage.
          inputs: the inputs of the forward.
          results: the results of `StageFunctions.forward_adding`, then those of what
            is fused with it.

        Returns:
          The results of what is fused.
        """
        stage, m = _cell(action)
        num_outputs = len(self._stages.slice_of(stage, m).outputs)
        end_residuals = num_outputs + functions.num_residuals
        end = end_residuals + self._sums.num_forward_sums(stage)

        self._keep_outputs(stage, m, results)
        residuals = results[num_outputs:end_residuals]
        self._backward_operands[stage, m] = [*inputs, *residuals]
        self._sums.keep_forward_sums(stage, m, results[end_residuals:end])
        return results[end:]

    def _keep_backward(
        self, action: Action, functions: StageFunctions, results: Values
    ) -> None:
        """Keeps the results of `StageFunctions.backward_adding`."""
        stage, m = _cell(action)
        num_input_grads = 0 if action.op == WEIGHT else functions.slice.num_input_grads
        input_grads = results[:num_input_grads]
        grad_sums_or_residuals = results[num_input_grads:]

        if action.op == INPUT:
            self._backward_operands[stage, m] += grad_sums_or_residuals
        else:
            self._sums.keep_grad_sums(stage, m, grad_sums_or_residuals)

        # Activations with a gradient come first.
        activations = self._stages.slice_of(stage, m).input_activations
        for var, value in zip(activations[:num_input_grads], input_grads, strict=True):
            self._cotangents.setdefault((var, m), {})[stage] = value

    # ------------------------------------------------------------------- the actions

    def _forward(self, action: Action) -> None:
        """Writes a forward by itself."""
        stage, m = _cell(action)
        functions = self._functions(action)
        function = functions.forward_adding(self._sums.accumulation(stage, m))
        inputs = self._inputs(stage, m)
        operands = [
            *inputs,
            *self._sums.accumulation_operands(stage, m, self._result_value),
        ]
        results = self._call(function, action, operands)
        self._keep_forward(action, functions, inputs=inputs, results=results)

    def _forward_backward(self, action: Action) -> None:
        """Writes a forward fused with its backward, or with the first half of it."""
        if not self._has_work(action):
            self._forward(action)
            return
        stage, m = _cell(action)
        functions = self._functions(action)
        output_grads = self._output_grads(action)

        function = functions.forward_backward(
            action.op, self._sums.accumulation(stage, m)
        )
        inputs = self._inputs(stage, m)
        operands = [
            *inputs,
            *self._sums.accumulation_operands(stage, m, self._result_value),
            *output_grads,
            *self._grad_sums(action),
        ]
        shardings = self._backward_shardings(action, function)
        results = self._call(function, action, operands, shardings)

        backward_results = self._keep_forward(
            action, functions, inputs=inputs, results=results
        )
        self._backward_operands[stage, m] += output_grads
        self._keep_backward(action, functions, backward_results)

    def _backward(self, action: Action) -> None:
        """Writes a backward, or a half of one, by itself."""
        if not self._has_work(action):
            return
        stage, m = _cell(action)
        functions = self._functions(action)
        if action.op != WEIGHT:
            self._backward_operands[stage, m] += self._output_grads(action)

        function = functions.backward_adding(action.op)
        operands = [*self._backward_operands[stage, m], *self._grad_sums(action)]
        shardings = self._backward_shardings(action, function)
        results = self._call(function, action, operands, shardings)
        self._keep_backward(action, functions, results)

    def _grad_sums(self, action: Action) -> Values:
        """The sums to which an action adds the gradients of weights."""
        return [] if action.op == INPUT else self._sums.grad_sums(*_cell(action))

    def _backward_shardings(
        self, action: Action, function: Computation
    ) -> list[Sharding] | None:
        """The shardings of results, of which the last are sums of gradients."""
        if not self._has_meshes or action.op == INPUT:
            return None
        grad_shardings = self._sums.grad_shardings[action.stage]
        num_other_results = len(function.results) - len(grad_shardings)
        sharding = Sharding(stacked=self._is_mapped)
        return [*[sharding] * num_other_results, *grad_shardings]

    def _output_grads(self, action: Action) -> Values:
        """The cotangents of a stage's outputs, each the sum over its readers.

        For the last stage it is the loss divisor, if there is one, unless the tail
        computes the loss.
        """
        if action.stage == self._last_stage and self._tail is None:
            return [] if self._loss_divisor is None else [self._loss_divisor]
        stage, m = _cell(action)
        output_grads = Values()
        for var in self._stages.slice_of(stage, m).differentiated_outputs:
            of_readers = self._cotangents.pop((var, m))
            terms = [of_readers[s] for s in sorted(of_readers, reverse=True)]
            if len(terms) > 1:
                terms = self._graph.call(
                    self._add_cotangents(len(terms), self._graph.specs[terms[0]]),
                    self._placement.place_of(stage, m),
                    terms,
                    mapped=self._is_mapped,
                )
            output_grads.append(terms[0])
        return output_grads

    def _add_cotangents(self, count: int, spec: Any) -> Computation:
        """``(*cotangents) -> sum``, of so many of one spec."""
        key = count, spec.shape, spec.dtype
        if key not in self._cotangent_sums:
            self._cotangent_sums[key] = Computation(
                f"add_{count}_cotangents", lambda *x: [sum(x[1:], x[0])], [spec]
            )
        return self._cotangent_sums[key]


def _cell(action: Action) -> Cell:
    return action.stage, action.microbatch

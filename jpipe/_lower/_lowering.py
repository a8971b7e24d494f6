"""Lowers a schedule to a graph of calls, one for each action.

    F(s, m):  p, x, b             -> y, residuals[s, m]
    B(s, m):  residuals[s, m], dy -> dp, added to the sums of s, and dx
    I(s, m):  residuals[s, m], dy -> dx, more residuals[s, m]     (B in two halves)
    W(s, m):  residuals[s, m], dy -> dp, added to the sums of s

p are the weights of stage s, x its input activations and b its batch inputs of
micro-batch m. Among the residuals is all that the forward read. dy is the sum of the dx
of the stages that read y; for the loss it is the loss divisor. A forward also adds the
loss, and the state that it writes, such as statistics, to the sums of s. The last stage
runs F and B, or F and I, as one call where nothing comes between them: they are fused.

No transfer is written here: where a value is read in another place, `Graph.bring` makes
a copy, sent as soon as the value is there.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Sharding, StageMesh
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Argument, ArgumentOrResult, Computation, Result
from .._partition._remat_mode import RematMode
from .._partition._stage_placement import StagePlacement
from .._stage._stage_functions import Accumulation, StageFunctions
from .._stage._stages import Stages
from .._trace._accumulation import accumulate, sum_spec
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._epilogue import Epilogue, StageSums, StepOutputs
from ._join import Join
from ._microbatch_inputs import MicrobatchInputs
from ._prologue import Prologue

Values = list[Value]
# A stage and a micro-batch.
Cell = tuple[int, int]


class Lowering:
    """The actions of a mini-batch, written into a graph.

    Args:
      graph: the graph that is written.
      placement: the schedule and the devices.
      stages: the stages that run.
      batch: the mini-batch.
      params: the parameters, as values.
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
        params: Values,
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
        self._has_meshes = any(isinstance(x, StageMesh) for x in placement.places)

        microbatch_inputs = MicrobatchInputs(graph, placement, batch)
        self._prologue = Prologue(graph, placement, stages, params)
        self._weights = [
            *microbatch_inputs.gather_weights(params),
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
        # (variable, microbatch) -> {reader stage -> its cotangent}
        self._cotangents: dict[tuple[core.Var, int], dict[int, Value]] = {}
        # (stage, microbatch) -> operands and residuals of the forward, and of I
        self._residuals: dict[Cell, Values] = {}
        # (stage, place) -> the sums over the micro-batches of the stage that run there
        self._sums: dict[tuple[int, Place], StageSums] = {}
        # (number of cotangents, shape, dtype) -> the function that adds them
        self._cotangent_sums: dict[Any, Computation] = {}
        # (stage, size of the micro-batch) -> the function that adds results to sums
        self._result_sums_cache: dict[tuple[int, int], Accumulation] = {}
        self._stage_names = [str(stage) for stage in placement.stages]

    @property
    def _last_stage(self) -> int:
        return self._stages.num_stages - 1

    @property
    def _last_place(self) -> Place:
        return self._placement.place(self._last_stage)

    # ------------------------------------------------------------------- batch inputs

    def _split_inputs(
        self, microbatch_inputs: MicrobatchInputs, batch_leaves: Values, stage: int
    ) -> list[Values]:
        """The batch inputs of a stage, for each micro-batch.

        Batch inputs of the whole program are the leaves of the mini-batch, the index of
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
            # index of a batch input of the program -> its value
            values = dict(zip(leaf_indices, parts, strict=True))
            for i in indices:
                if i >= num_leaves:
                    values[i] = self._number(stage, m, i - num_leaves)
            inputs_of_microbatches.append([values[i] for i in indices])
        return inputs_of_microbatches

    def _number(self, stage: int, m: int, number_index: int) -> Value:
        """The index of a micro-batch, or after it a number that is folded into a key.

        Shards count as micro-batches: each has an index.
        """
        place = self._placement.place(stage)
        if number_index > 0:
            folded_numbers = self._stages.traced(m).folded_numbers
            array = np.asarray(folded_numbers[number_index - 1])
            return self._graph.constant(array, place)

        num_shards = self._batch.num_shards
        first = m * num_shards
        shard_indices = np.arange(first, first + num_shards, dtype=np.int32)
        if self._is_mapped:
            return self._graph.constant(shard_indices, place, stacked=True)
        return self._graph.constant(np.asarray(shard_indices[0]), place)

    # ------------------------------------------------------------------- the schedule

    def run(self) -> StepOutputs:
        """Writes the whole schedule of a training step."""
        self._start_sums()
        self._loss_divisor = self._prologue.write_loss_divisor(
            self._batch, self._batch_inputs[self._last_stage]
        )
        fused_cells = self._find_fused_cells()
        for action in self._placement.schedule.order():
            is_fused = _cell(action) in fused_cells
            if action.op == FORWARD:
                if not is_fused:
                    self._forward(action, self._mode(action, is_fused=False))
            elif is_fused and action.op != WEIGHT:
                self._forward_backward(action)
            else:
                self._backward(action, self._mode(action, is_fused=is_fused))

        loss_weights = Values()
        for m in range(self._num_microbatches):
            for atom in self._stages.traced(m).loss_weight:
                loss_weights.append(self._returned(atom, m))
        return self._epilogue.write(
            sums=[self._sums_of_places(s) for s in range(self._stages.num_stages)],
            loss_weights=loss_weights,
            loss_divisor=self._loss_divisor[0] if self._loss_divisor else None,
            aux=self._aux(),
        )

    def run_forwards(self) -> StepOutputs:
        """Writes the forwards of the schedule alone."""
        for action in self._placement.schedule.order():
            if action.op == FORWARD:
                stage, m = _cell(action)
                forward = self._stages.forward(stage, m)
                results = self._call(forward, action, self._operands(stage, m))
                self._keep_outputs(stage, m, results)
        return self._epilogue.write_outputs(self._aux())

    def _sums_of_places(self, stage: int) -> list[StageSums]:
        """The sums of each place that runs a stage."""
        places = self._placement.places_of(stage)
        return [self._sums[stage, place] for place in places]

    def _aux(self) -> list[Values]:
        """The aux of each micro-batch, without the state that it writes."""
        rows = list[Values]()
        for m in range(self._num_microbatches):
            atoms = self._stages.traced(m).aux_vars[: self._epilogue.num_aux]
            rows.append([self._returned(atom, m) for atom in atoms])
        return rows

    def _returned(self, atom: Any, m: int) -> Value:
        """The value of a result of the program for a micro-batch."""
        if isinstance(atom, core.Literal):
            return self._graph.constant(np.asarray(atom.val), self._last_place)
        params = self._stages.traced(m).params
        if atom in params:
            return self._weights[params.index(atom)]
        return self._outputs[atom, m]

    def _find_fused_cells(self) -> set[Cell]:
        """Finds forwards of the last stage that run as one program with B, or with I.

        These are the ones that would store nothing, and those that come right before
        their backwards.
        """
        last = self._last_stage
        fused_cells = set[Cell]()
        for m in range(self._num_microbatches):
            if self._stages.mode(last, m).stores_only_inputs:
                fused_cells.add((last, m))
        if fused_cells and self._stages.states[last].has_integers:
            # All of them, or one that is not would run before those that are.
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

    def _mode(self, action: Action, *, is_fused: bool) -> RematMode:
        """The remat mode of an action: what its forward stores."""
        mode = self._stages.mode(*_cell(action))
        if is_fused:
            return mode.when_fused(is_whole_backward=action.op == BACKWARD)
        return mode

    # ---------------------------------------------------------------------- the sums

    def _start_sums(self) -> None:
        """Starts all sums at zero, those of a place with one call."""
        num_stages = self._stages.num_stages
        # For each stage the specs of its sums, and the shardings of those of gradients.
        self._sum_specs = [self._specs_of_sums(s) for s in range(num_stages)]
        self._grad_shardings = [self._shardings_of_grads(s) for s in range(num_stages)]
        stages_of_place = dict[Place, list[int]]()
        for s in range(num_stages):
            for place in self._placement.places_of(s):
                stages_of_place.setdefault(place, []).append(s)

        for place, stages in stages_of_place.items():
            shardings = list[Sharding]()
            for s in stages:
                num_results = len(self._sum_specs[s].results)
                shardings += self._grad_shardings[s]
                shardings += [Sharding(stacked=self._is_mapped)] * num_results
            specs, tree = jax.tree.flatten([self._sum_specs[s] for s in stages])
            zeros = jax.tree.unflatten(tree, self._zeros(place, specs, shardings))
            for s, sums in zip(stages, zeros, strict=True):
                self._sums[s, place] = sums

    def _zeros(
        self, place: Place, specs: Sequence[Any], shardings: Sequence[Sharding]
    ) -> Values:
        """Arrays of zeros in a place, of each of its shards if these run apart."""
        if not specs:
            return []

        def zeros() -> list[Any]:
            return [jnp.zeros(spec.shape, spec.dtype) for spec in specs]

        return self._graph.call(
            Computation("zeros", zeros, specs),
            place,
            [],
            mapped=self._is_mapped,
            shardings=shardings,
        )

    def _specs_of_sums(self, stage: int) -> StageSums:
        """Specs of the sums of a stage."""
        trained = self._stages.trained_weights(stage)
        losses = self._stages.traced().loss if stage == self._last_stage else []
        return StageSums(
            grads=[sum_spec(self._graph.specs[self._weights[i]]) for i in trained],
            loss=[sum_spec(loss.aval) for loss in losses],
            state=self._stages.states[stage].sum_specs,
        )

    def _shardings_of_grads(self, stage: int) -> list[Sharding]:
        """The shardings of the sums of gradients of a stage: those of their weights."""
        shardings = list[Sharding]()
        for i in self._stages.trained_weights(stage):
            weight_sharding = self._graph.shardings[self._weights[i]].gathered()
            shardings.append(weight_sharding._replace(stacked=self._is_mapped))
        return shardings

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
            self._placement.place(action.stage, action.microbatch),
            operands,
            label=action,
            layers=self._stage_names[action.stage],
            mapped=self._is_mapped,
            shardings=shardings,
        )

    def _operands(self, stage: int, m: int) -> Values:
        """The operands of a forward: weights, input activations and batch inputs."""
        stage_slice = self._stages.slice_of(stage, m)
        weights = zip(stage_slice.weights, self._stages.weights(stage, m), strict=True)
        # variable of the stage -> its value
        values = {var: self._weights[i] for var, i in weights}
        values |= {var: self._outputs[var, m] for var in stage_slice.input_activations}
        batch_inputs = self._batch_inputs[stage][m]
        values |= zip(stage_slice.batch_inputs, batch_inputs, strict=True)
        return [values[var] for var in stage_slice.closed.jaxpr.invars]

    def _keep_outputs(self, stage: int, m: int, results: Values) -> None:
        """Keeps the results of a forward that other stages read, or the user."""
        outputs = self._stages.slice_of(stage, m).outputs
        for var, value in zip(outputs, results, strict=False):
            self._outputs[var, m] = value

    def _keep_forward(
        self, action: Action, functions: StageFunctions, results: Values
    ) -> None:
        """Keeps the results of `StageFunctions.forward_adding`."""
        stage, m = _cell(action)
        num_outputs = len(self._stages.slice_of(stage, m).outputs)
        num_saved = num_outputs + functions.num_residuals

        self._keep_outputs(stage, m, results)
        residuals = results[num_outputs:num_saved]
        self._residuals[stage, m] = [*self._operands(stage, m), *residuals]
        new_sums = results[num_saved:]
        if new_sums:
            place = self._placement.place(stage, m)
            num_losses = len(self._sum_specs[stage].loss)
            self._sums[stage, place] = self._sums[stage, place]._replace(
                loss=new_sums[:num_losses], state=new_sums[num_losses:]
            )

    def _keep_backward(
        self, action: Action, functions: StageFunctions, results: Values
    ) -> None:
        """Keeps the results of `StageFunctions.backward_adding`."""
        stage, m = _cell(action)
        num_input_grads = 0 if action.op == WEIGHT else functions.slice.num_input_grads
        input_grads = results[:num_input_grads]
        grad_sums_or_residuals = results[num_input_grads:]

        if action.op == INPUT:
            self._residuals[stage, m] += grad_sums_or_residuals
        elif grad_sums_or_residuals:
            place = self._placement.place(stage, m)
            self._sums[stage, place] = self._sums[stage, place]._replace(
                grads=grad_sums_or_residuals
            )

        activations = self._stages.slice_of(stage, m).input_activations
        for var, value in zip(activations, input_grads, strict=False):
            self._cotangents.setdefault((var, m), {})[stage] = value

    # ------------------------------------------------------------------- the actions

    def _forward(self, action: Action, mode: RematMode) -> None:
        """Writes a forward by itself."""
        stage, m = _cell(action)
        functions = self._stages.functions(stage, m, mode)
        function = functions.forward_adding(self._result_sums(stage, m))
        operands = [*self._operands(stage, m), *self._result_operands(stage, m)]
        results = self._call(function, action, operands)
        self._keep_forward(action, functions, results)

    def _forward_backward(self, action: Action) -> None:
        """Writes a forward fused with its backward, or with the first half of it."""
        stage, m = _cell(action)
        mode = self._mode(action, is_fused=True)
        if not self._has_work(action):
            self._forward(action, mode)
            return
        functions = self._stages.functions(stage, m, mode)
        output_grads = self._output_grads(action)

        function = functions.forward_backward(action.op, self._result_sums(stage, m))
        results = self._call(
            function,
            action,
            [
                *self._operands(stage, m),
                *self._result_operands(stage, m),
                *output_grads,
                *self._grad_sums(action),
            ],
            self._backward_shardings(action, function),
        )

        num_outputs = len(self._stages.slice_of(stage, m).closed.jaxpr.outvars)
        num_sums = len(self._sum_specs[stage].results)
        num_forward = num_outputs + functions.num_residuals + num_sums
        self._keep_forward(action, functions, results[:num_forward])
        self._residuals[stage, m] += output_grads
        self._keep_backward(action, functions, results[num_forward:])

    def _backward(self, action: Action, mode: RematMode) -> None:
        """Writes a backward, or a half of one, by itself."""
        if not self._has_work(action):
            return
        stage, m = _cell(action)
        functions = self._stages.functions(stage, m, mode)
        if action.op != WEIGHT:
            self._residuals[stage, m] += self._output_grads(action)

        function = functions.backward_adding(action.op)
        operands = [*self._residuals[stage, m], *self._grad_sums(action)]
        shardings = self._backward_shardings(action, function)
        results = self._call(function, action, operands, shardings)
        self._keep_backward(action, functions, results)

    def _grad_sums(self, action: Action) -> Values:
        """The sums to which a backward adds the gradients of weights."""
        if action.op == INPUT:
            return []
        stage, m = _cell(action)
        return self._sums[stage, self._placement.place(stage, m)].grads

    def _backward_shardings(
        self, action: Action, function: Computation
    ) -> list[Sharding] | None:
        """The shardings of results, of which the last are sums of gradients."""
        if not self._has_meshes or action.op == INPUT:
            return None
        grad_shardings = self._grad_shardings[action.stage]
        num_other_results = len(function.results) - len(grad_shardings)
        sharding = Sharding(stacked=self._is_mapped)
        return [*[sharding] * num_other_results, *grad_shardings]

    def _output_grads(self, action: Action) -> Values:
        """The cotangents of a stage's outputs, each the sum over its readers.

        For the last stage it is the loss divisor, if there is one.
        """
        if action.stage == self._last_stage:
            return self._loss_divisor
        stage, m = _cell(action)
        output_grads = Values()
        for var in self._stages.slice_of(stage, m).differentiated_outputs:
            of_readers = self._cotangents.pop((var, m))
            terms = [of_readers[s] for s in sorted(of_readers, reverse=True)]
            if len(terms) > 1:
                terms = self._graph.call(
                    self._add_cotangents(len(terms), self._graph.specs[terms[0]]),
                    self._placement.place(stage, m),
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

    # ---------------------------------------------- sums of losses and of new state

    def _summed_results(self, stage: int, m: int) -> list[Any]:
        """The results that a forward adds to sums: the loss, then the state."""
        traced = self._stages.traced(m)
        losses = traced.loss if stage == self._last_stage else []
        state = [traced.aux_vars[i] for i in self._stages.states[stage].aux_indices]
        return [*losses, *state]

    def _result_sums(self, stage: int, m: int) -> Accumulation | None:
        """The function that adds summed results to sums; ``None`` if there are none."""
        if not self._sum_specs[stage].results:
            return None
        key = stage, self._batch.sizes[m]
        if key not in self._result_sums_cache:
            self._result_sums_cache[key] = self._trace_result_sums(stage, m)
        return self._result_sums_cache[key]

    def _trace_result_sums(self, stage: int, m: int) -> Accumulation:
        """Traces ``(sums, results, share of the examples) -> sums``."""
        state = self._stages.states[stage]
        sum_specs = self._sum_specs[stage].results
        num_losses = len(self._sum_specs[stage].loss)
        results = self._summed_results(stage, m)

        def add(sums: list[Any], new: list[Any], share: list[Any]) -> list[Any]:
            total = accumulate(sums[:num_losses], new[:num_losses])
            return [*total, *state.add(sums[num_losses:], new[num_losses:], *share)]

        result_specs = [_spec(atom) for atom in results]
        share_spec = jax.ShapeDtypeStruct((), jnp.result_type(float))
        share_specs = [share_spec] if state.has_means else []
        closed, _ = _jaxpr.trace(add, sum_specs, result_specs, share_specs)

        # variable of the stage -> the operand or the result of the forward that it is
        stage_slice = self._stages.slice_of(stage, m)
        forward_values = dict[core.Var, ArgumentOrResult]()
        for i, var in enumerate(stage_slice.closed.jaxpr.invars):
            forward_values[var] = Argument(i)
        for i, var in enumerate(stage_slice.outputs):
            forward_values[var] = Result(i)
        return Accumulation(
            closed,
            [
                *[None] * len(sum_specs),
                *[_forward_value(atom, forward_values) for atom in results],
                *[None] * len(share_specs),
            ],
        )

    def _result_operands(self, stage: int, m: int) -> Values:
        """The operands of `_result_sums` that the forward neither reads nor makes."""
        result_sums = self._result_sums(stage, m)
        if result_sums is None:
            return []
        place = self._placement.place(stage, m)
        sums = self._sums[stage, place].results
        results = self._summed_results(stage, m)
        result_args = result_sums.args[len(sums) : len(sums) + len(results)]

        operands = [*sums]
        for atom, arg in zip(results, result_args, strict=True):
            if arg is None:
                operands.append(self._returned(atom, m))
        if self._stages.states[stage].has_means:
            operands.append(self._share(m, place))
        return operands

    def _share(self, m: int, place: Place) -> Value:
        """The share of the examples that one shard of a micro-batch has."""
        sizes = self._batch.sizes
        share = sizes[m] / sum(sizes) / self._batch.num_shards
        return self._graph.constant(np.asarray(share, jnp.result_type(float)), place)


def _cell(action: Action) -> Cell:
    return action.stage, action.microbatch


def _spec(atom: Any) -> Any:
    """The spec of a result of a program, as a value of the graph."""
    is_literal = isinstance(atom, core.Literal)
    return _jaxpr.spec(np.asarray(atom.val) if is_literal else atom.aval)


def _forward_value(
    atom: Any, forward_values: Mapping[core.Var, ArgumentOrResult]
) -> ArgumentOrResult | None:
    """The argument or the result of the forward that an atom is, if it is one."""
    return None if isinstance(atom, core.Literal) else forward_values.get(atom)

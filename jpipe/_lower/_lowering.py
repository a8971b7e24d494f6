"""Lowers a schedule to a graph of calls, one for each action.

    F(s, m):  p, x, b             -> y, residuals[s, m]
    B(s, m):  residuals[s, m], dy -> dp, added to grads[s], and dx
    I(s, m):  residuals[s, m], dy -> dx, more residuals[s, m]     (B in two halves)
    W(s, m):  residuals[s, m], dy -> dp, added to grads[s]

p are the weights of stage s, x the activations of earlier stages and b the leaves of
micro-batch m that it reads. Among the residuals is all that the forward read. dy is the
sum of the dx of the stages that read y; for the loss it is what the loss is divided by.
A forward also adds the loss, and what it writes, such as statistics, to sums[s]. The
last stage runs F and B, or F and I, as one call where nothing comes between them.

No transfer is written here: where a value is read in another place, `Graph.at` makes a
copy, sent as soon as the value is there.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Sharding, StageMesh
from .._jaxprs import _jaxpr
from .._jaxprs._computation import ArgumentSource, Computation, ResultSource, Source
from .._partition import _remat
from .._partition._stage_placement import StagePlacement
from .._stage._stage import ResultSums, Stage
from .._stage._stages import Stages
from .._trace._accumulation import accumulate, sum_spec
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._epilogue import Epilogue, StageSums, StepOutputs
from ._join import Join
from ._microbatch_inputs import MicrobatchInputs
from ._prologue import Prologue

Values = list[Value]
Cell = tuple[int, int]


class Lowering:
    """The actions of a mini-batch, written into a graph.

    Args:
      graph: where they are written.
      pipe: the schedule and the devices.
      stages: what runs.
      batch: the mini-batch.
      params: the parameters, as values.
      given: the leaves of the mini-batch, likewise.
      joins: how each leaf of aux is joined.
    """

    def __init__(
        self,
        graph: Graph,
        pipe: StagePlacement,
        stages: Stages,
        batch: Batch,
        params: Values,
        given: Values,
        joins: Sequence[Join],
    ) -> None:
        self._graph, self._pipe, self._stages = graph, pipe, stages
        self._batch, self._count, self._params = batch, len(batch.sizes), params
        # Whether each shard of a stage runs its actions by itself.
        self._is_mapped = batch.num_shards > 1
        self._is_spread = any(isinstance(device, StageMesh) for device in pipe.places)
        incoming = MicrobatchInputs(graph, pipe, batch)
        self._prologue = Prologue(graph, pipe, stages, params)
        self._weights = [*incoming.weights(params), *self._prologue.values()]
        self._epilogue = Epilogue(self._prologue, batch, self._weights, joins)
        # By stage, of each micro-batch what it reads of what that is given.
        self._given = [
            self._rows(incoming, batch, given, s) for s in range(stages.num_stages)
        ]
        # By variable and micro-batch: what was made, and the cotangents from readers.
        self._made: dict[tuple[core.Var, int], Value] = {}
        self._cotangents: dict[tuple[core.Var, int], dict[int, Value]] = {}
        self._residuals: dict[Cell, Values] = {}
        # By stage and place, the sums of what runs there: of gradients; of the loss and
        # of what micro-batches write.
        self._grads: dict[tuple[int, Place], Values] = {}
        self._sums: dict[tuple[int, Place], Values] = {}
        # (number of cotangents, shape, dtype) -> the function that adds them
        self._cotangent_sums: dict[Any, Computation] = {}
        # (stage, size of the micro-batch) -> how its results are added to the sums
        self._known_result_sums: dict[tuple[int, int], ResultSums] = {}
        self._names = [str(stage) for stage in pipe.stages]

    @property
    def _last(self) -> Place:
        return self._pipe.place(self._stages.num_stages - 1)

    # --------------------------------------------------------------- what comes with m

    def _rows(
        self, incoming: MicrobatchInputs, batch: Batch, given: Values, stage: int
    ) -> list[Values]:
        """Of each micro-batch what a stage reads of its leaves and its number."""
        position = {v: i for i, v in enumerate(self._stages.first.given)}
        shards = self._batch.num_shards
        wanted = [position[v] for v in self._stages.part(stage).given]
        leaves = [i for i in wanted if i < len(given)]
        axes = [batch.axes[i] for i in leaves]
        rows = incoming.split([given[i] for i in leaves], axes, stage)
        place = self._pipe.place(stage)
        found = []
        for m, row in enumerate(rows):
            own = dict(zip(leaves, row, strict=True))
            # Its number, of shards those of each; and those that are folded into keys.
            first = m * shards
            number = np.arange(first, first + shards, dtype=np.int32)
            number = number if self._is_mapped else number[0]
            numbers = [number, *self._stages.program(m).numbers]
            for i in wanted:
                if i not in own:
                    stacked = self._is_mapped and i == len(given)
                    array = np.asarray(numbers[i - len(given)])
                    own[i] = self._graph.constant(array, place, stacked)
            found.append([own[i] for i in wanted])
        return found

    # --------------------------------------------------------------------- the schedule

    def run(self) -> StepOutputs:
        """The whole schedule."""
        self._start_sums()
        last_inputs = self._given[self._stages.num_stages - 1]
        self._divisor = self._prologue.loss_divisor(self._batch, last_inputs)
        joined = self._joined()
        for action in self._pipe.schedule.order():
            cell = _cell(action)
            if action.op == FORWARD:
                if cell not in joined:
                    self._forward(action, self._stages.mode(*cell))
            elif cell in joined and action.op != WEIGHT:
                self._forward_backward(action)
            else:
                self._backward(action, self._mode(action, joined))

        loss_weights = Values()
        for m in range(self._count):
            for atom in self._stages.program(m).weight:
                loss_weights.append(self._returned(atom, m))
        return self._epilogue.write(
            sums=[self._stage_sums(s) for s in range(self._stages.num_stages)],
            loss_weights=loss_weights,
            loss_divisor=self._divisor[0] if self._divisor else None,
            aux=self._aux(),
        )

    def forwards(self) -> StepOutputs:
        """The forwards of the schedule alone."""
        for action in self._pipe.schedule.order():
            if action.op == FORWARD:
                function = self._stages.forward(*_cell(action))
                results = self._call(function, action, self._operands(*_cell(action)))
                self._keep_outputs(action.stage, action.microbatch, results)
        return self._epilogue.write_outputs(self._aux())

    def _stage_sums(self, stage: int) -> list[StageSums]:
        """The sums of a stage, of each place that runs it."""
        num_losses = int(stage == self._stages.num_stages - 1)
        replicas = list[StageSums]()
        for place in self._pipe.places_of(stage):
            sums = self._sums[stage, place]
            replicas.append(
                StageSums(
                    grads=self._grads[stage, place],
                    loss=sums[:num_losses],
                    state=sums[num_losses:],
                )
            )
        return replicas

    def _aux(self) -> list[Values]:
        """What each micro-batch returned besides the loss and what it writes."""
        rows = list[Values]()
        for m in range(self._count):
            atoms = self._stages.program(m).aux_vars[: self._epilogue.num_aux]
            rows.append([self._returned(atom, m) for atom in atoms])
        return rows

    def _returned(self, atom: Any, m: int) -> Value:
        if isinstance(atom, core.Literal):
            return self._graph.constant(np.asarray(atom.val), self._last)
        params = self._stages.program(m).params
        if atom in params:
            return self._weights[params.index(atom)]
        return self._made[atom, m]

    def _joined(self) -> set[Cell]:
        """Forwards of the last stage that run as one program with their backwards."""
        schedule, last = self._pipe.schedule, self._stages.num_stages - 1
        full = {
            (last, m)
            for m in range(self._count)
            if _remat.keeps_nothing(self._stages.mode(last, m))
        }
        if full and self._stages.states[last].has_integers:
            # All of them, or one that is not would run before those that are.
            full = {(last, m) for m in range(self._count)}
        rows = [
            [action for action in schedule.rows[rank] if self._does(action)]
            for rank in schedule.ranks_of[last]
        ]
        return full | {
            _cell(action)
            for row in rows
            for action, after in itertools.pairwise(row)
            if action.op == FORWARD
            and action.stage == last
            and _cell(after) == _cell(action)
        }

    def _does(self, action: Action) -> bool:
        if action.op == FORWARD:
            return True
        return self._stages.does(*_cell(action), action.op == WEIGHT)

    def _start_sums(self) -> None:
        """Starts all sums at zero, those of a place with one call."""
        num_stages = self._stages.num_stages
        # Specs of the loss and of what micro-batches write, by stage; shardings of
        # sums of gradients.
        self._sum_specs = [*map(self._specs_of_sums, range(num_stages))]
        self._grads_shardings = [*map(self._shardings_of_grads, range(num_stages))]
        stages_of_place = dict[Place, list[int]]()
        for s in range(num_stages):
            for place in self._pipe.places_of(s):
                stages_of_place.setdefault(place, []).append(s)

        for place, stages in stages_of_place.items():
            specs, shardings = list[Any](), list[Sharding]()
            for s in stages:
                specs += [*self._specs_of_grads(s), *self._sum_specs[s]]
                shardings += self._grads_shardings[s]
                shardings += [Sharding(self._is_mapped)] * len(self._sum_specs[s])
            zeros = iter(self._zeros(place, specs, shardings))
            for s in stages:
                num_grads = len(self._grads_shardings[s])
                self._grads[s, place] = [*itertools.islice(zeros, num_grads)]
                num_sums = len(self._sum_specs[s])
                self._sums[s, place] = [*itertools.islice(zeros, num_sums)]

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

    def _specs_of_grads(self, stage: int) -> list[Any]:
        trained = self._stages.trained_by(stage)
        return [sum_spec(self._graph.specs[self._weights[i]]) for i in trained]

    def _specs_of_sums(self, stage: int) -> list[Any]:
        """Of the loss, where it is, and of what micro-batches write."""
        is_last = stage == self._stages.num_stages - 1
        loss = [sum_spec(self._stages.first.closed.out_avals[0])] * is_last
        return [*loss, *self._stages.states[stage].sum_specs]

    def _shardings_of_grads(self, stage: int) -> list[Sharding]:
        """The shardings of the sums of gradients of a stage: those of their weights."""
        known = self._graph.shardings
        found = [
            known[self._weights[i]].gathered() for i in self._stages.trained_by(stage)
        ]
        return [each._replace(stacked=self._is_mapped) for each in found]

    def _call(
        self,
        function: Computation,
        action: Action,
        reads: Values,
        shardings: Sequence[Sharding] | None = None,
    ) -> Values:
        return self._graph.call(
            function,
            self._pipe.place(action.stage, action.microbatch),
            reads,
            label=action,
            layers=self._names[action.stage],
            mapped=self._is_mapped,
            shardings=shardings,
        )

    def _operands(self, stage: int, m: int) -> Values:
        """What a forward reads: weights, activations and leaves of the micro-batch."""
        part = self._stages.part(stage, m)
        weights = zip(part.weights, self._stages.weights(stage, m), strict=True)
        values = {var: self._weights[i] for var, i in weights}
        values |= {var: self._made[var, m] for var in part.arrives}
        values |= zip(part.given, self._given[stage][m], strict=True)
        return [values[var] for var in part.closed.jaxpr.invars]

    def _keep_outputs(self, stage: int, m: int, results: Values) -> None:
        """Notes what a forward made for other stages, or for the user."""
        part = self._stages.part(stage, m)
        outputs = [*part.leaves, *part.aux]
        for var, value in zip(outputs, results, strict=False):
            self._made[var, m] = value

    def _keep_forward(self, action: Action, functions: Stage, results: Values) -> None:
        """Notes the results of `Stage.forward_adding`."""
        stage, m = cell = _cell(action)
        part = self._stages.part(stage, m)
        num_outputs = len(part.leaves) + len(part.aux)
        num_saved = num_outputs + functions.num_residuals

        self._keep_outputs(stage, m, results)
        residuals = results[num_outputs:num_saved]
        self._residuals[cell] = [*self._operands(stage, m), *residuals]
        if self._sum_specs[stage]:
            self._sums[stage, self._pipe.place(stage, m)] = results[num_saved:]

    def _keep_backward(self, action: Action, functions: Stage, results: Values) -> None:
        """Notes the results of `Stage.backward_adding`."""
        stage, m = cell = _cell(action)
        num_input_grads = 0 if action.op == WEIGHT else functions.num_differentiated
        input_grads, others = results[:num_input_grads], results[num_input_grads:]

        if action.op == INPUT:
            self._residuals[cell] += others
        elif others:
            self._grads[stage, self._pipe.place(stage, m)] = others

        activations = self._stages.part(stage, m).arrives[:num_input_grads]
        for var, value in zip(activations, input_grads, strict=True):
            self._cotangents.setdefault((var, m), {})[stage] = value

    def _forward(self, action: Action, mode: Any) -> None:
        """A forward by itself."""
        stage, m = _cell(action)
        functions = self._stages.functions(stage, m, mode)
        function = functions.forward_adding(self._result_sums(stage, m))
        reads = [*self._operands(stage, m), *self._result_operands(stage, m)]
        results = self._call(function, action, reads)
        self._keep_forward(action, functions, results)

    def _forward_backward(self, action: Action) -> None:
        """A forward, and the backward, or its first half, that comes right after it."""
        stage, m = _cell(action)
        mode = self._mode(action, {_cell(action)})
        if not self._does(action):
            self._forward(action, mode)
            return
        functions = self._stages.functions(stage, m, mode)
        result_sums = self._result_sums(stage, m)
        cotangents = self._received(action)

        function = functions.forward_backward(action.op, result_sums)
        results = self._call(
            function,
            action,
            [
                *self._operands(stage, m),
                *self._result_operands(stage, m),
                *cotangents,
                *self._grads_of(action),
            ],
            self._backward_shardings(action, function),
        )

        num_outputs = len(self._stages.part(stage, m).closed.jaxpr.outvars)
        num_sums = len(self._sum_specs[stage])
        num_forward = num_outputs + functions.num_residuals + num_sums
        self._keep_forward(action, functions, results[:num_forward])
        self._residuals[stage, m] += cotangents
        self._keep_backward(action, functions, results[num_forward:])

    def _backward(self, action: Action, mode: Any) -> None:
        """A backward, or a half of one, by itself."""
        if not self._does(action):
            return
        stage, m = _cell(action)
        functions = self._stages.functions(stage, m, mode)
        if action.op != WEIGHT:
            self._residuals[stage, m] += self._received(action)

        function = functions.backward_adding(action.op)
        reads = [*self._residuals[stage, m], *self._grads_of(action)]
        shardings = self._backward_shardings(action, function)
        results = self._call(function, action, reads, shardings)
        self._keep_backward(action, functions, results)

    def _mode(self, action: Action, joined: Collection[Cell]) -> Any:
        """What the forward stored that a backward follows."""
        mode = self._stages.mode(*_cell(action))
        if _cell(action) in joined:
            return _remat.mode_in_one_program(mode, whole=action.op == BACKWARD)
        return mode

    def _grads_of(self, action: Action) -> Values:
        """The sums to which a backward adds the gradients of weights."""
        if action.op == INPUT:
            return []
        return self._grads[action.stage, self._pipe.place(*_cell(action))]

    def _backward_shardings(
        self, action: Action, function: Computation
    ) -> list[Sharding] | None:
        """The shardings of results, of which the last are sums of gradients."""
        if not self._is_spread or action.op == INPUT:
            return None
        sums = self._grads_shardings[action.stage]
        others = len(function.results) - len(sums)
        return [*[Sharding(stacked=self._is_mapped)] * others, *sums]

    def _summed(self, stage: int, m: int) -> list[Any]:
        """What a forward adds to sums: the loss, where it is, and what it writes."""
        program = self._stages.program(m)
        is_last = stage == self._stages.num_stages - 1
        losses = program.loss if is_last else []
        written = [program.aux_vars[i] for i in self._stages.states[stage].leaves]
        return [*losses, *written]

    def _result_sums(self, stage: int, m: int) -> ResultSums | None:
        """The function that adds these; ``None`` if there are none."""
        key = stage, self._batch.sizes[m]
        if self._sum_specs[stage] and key not in self._known_result_sums:
            self._known_result_sums[key] = self._new_result_sums(stage, m)
        return self._known_result_sums.get(key)

    def _new_result_sums(self, stage: int, m: int) -> ResultSums:
        state, sum_specs = self._stages.states[stage], self._sum_specs[stage]
        summed = self._summed(stage, m)
        num_losses = len(summed) - len(state.leaves)

        def add(sums: list[Any], new: list[Any], share: list[Any]) -> list[Any]:
            total = accumulate(sums[:num_losses], new[:num_losses])
            return [*total, *state.add(sums[num_losses:], new[num_losses:], *share)]

        new_specs = [_spec(atom) for atom in summed]
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))
        share_specs = [share] if state.has_means else []
        closed, _ = _jaxpr.trace(add, sum_specs, new_specs, share_specs)

        # variable that the stage reads or makes -> which argument or result it is
        part = self._stages.part(stage, m)
        reads = part.closed.jaxpr.invars
        sources: dict[Any, Source] = {v: ArgumentSource(i) for i, v in enumerate(reads)}
        outputs = [*part.leaves, *part.aux]
        sources |= {v: ResultSource(i) for i, v in enumerate(outputs)}
        return ResultSums(
            closed,
            [
                *[None] * len(sum_specs),
                *[_source(atom, sources) for atom in summed],
                *[None] * len(share_specs),
            ],
        )

    def _result_operands(self, stage: int, m: int) -> Values:
        """What `_result_sums` reads besides arguments and results of the forward."""
        if (adds := self._result_sums(stage, m)) is None:
            return []
        place = self._pipe.place(stage, m)
        sums = self._sums[stage, place]
        new = zip(self._summed(stage, m), adds.sources[len(sums) :], strict=False)
        others = [self._returned(atom, m) for atom, source in new if source is None]
        has_means = self._stages.states[stage].has_means
        return [*sums, *others, *([self._share(m, place)] if has_means else [])]

    def _share(self, m: int, place: Place) -> Value:
        """The part of the examples that a micro-batch has, of one shard."""
        sizes = self._batch.sizes
        part = sizes[m] / sum(sizes) / self._batch.num_shards
        return self._graph.constant(np.asarray(part, jnp.result_type(float)), place)

    def _add_cotangents(self, count: int, spec: Any) -> Computation:
        """``(*cotangents) -> sum`` of so many of one spec."""
        key = count, spec.shape, spec.dtype
        if key not in self._cotangent_sums:
            self._cotangent_sums[key] = Computation(
                f"add_{count}_cotangents", lambda *x: [sum(x[1:], x[0])], [spec]
            )
        return self._cotangent_sums[key]

    def _received(self, action: Action) -> Values:
        """The cotangents of what a stage made: of each the sum over its readers.

        Of the loss what it is divided by.
        """
        if action.stage == self._stages.num_stages - 1:
            return self._divisor
        stage, m = _cell(action)
        cotangents = []
        for var in self._stages.part(stage, m).leaves:
            of_readers = self._cotangents.pop((var, m))
            terms = [of_readers[s] for s in sorted(of_readers, reverse=True)]
            if len(terms) > 1:
                terms = self._graph.call(
                    self._add_cotangents(len(terms), self._graph.specs[terms[0]]),
                    self._pipe.place(stage, m),
                    terms,
                    mapped=self._is_mapped,
                )
            cotangents.append(terms[0])
        return cotangents


def _cell(action: Action) -> Cell:
    return action.stage, action.microbatch


def _spec(atom: Any) -> Any:
    """The spec of what a program returns, as a value of the graph."""
    is_literal = isinstance(atom, core.Literal)
    return _jaxpr.spec(np.asarray(atom.val) if is_literal else atom.aval)


def _source(atom: Any, sources: Mapping[core.Var, Source]) -> Source | None:
    return None if isinstance(atom, core.Literal) else sources.get(atom)

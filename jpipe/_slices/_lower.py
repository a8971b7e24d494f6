"""From a schedule and slices to a graph: who reads which variable.

Who sends what where follows from who reads what is made.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._functions import _remat
from .._functions._batch import Batch
from .._functions._weights import accumulate, sum_spec
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Sharding, SubMesh
from .._jaxprs._function import Function
from .._run import _divisors, _sums
from .._run._incoming import Incoming
from .._run._pipe import Pipe
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._once import Once
from ._slice import Slice
from ._stages import Stages
from ._totals import Totals

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
    """

    def __init__(
        self,
        graph: Graph,
        pipe: Pipe,
        stages: Stages,
        batch: Batch,
        params: Values,
        given: Values,
    ) -> None:
        self._graph, self._pipe, self._stages = graph, pipe, stages
        self._batch, self._count, self._params = batch, len(batch.sizes), params
        # Whether each shard of a stage runs its actions by itself.
        self._is_mapped = batch.num_shards > 1
        self._is_spread = any(isinstance(device, SubMesh) for device in pipe.places)
        incoming = Incoming(graph, pipe, batch)
        self._once = Once(graph, pipe, stages, params)
        self._weights = [*incoming.weights(params), *self._once.values()]
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
        self._known: dict[Any, Function] = {}
        self._names = [str(stage) for stage in pipe.stages]

    @property
    def _last(self) -> Place:
        return self._pipe.place(self._stages.num_stages - 1)

    # --------------------------------------------------------------- what comes with m

    def _rows(
        self, incoming: Incoming, batch: Batch, given: Values, stage: int
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

    def run(self) -> tuple[Value, dict[int, Value], dict[int, Value]]:
        """The whole schedule.

        Returns:
          The loss; by the number of a parameter the gradient of each that is trained,
          and the new value of each that micro-batches write.
        """
        self._start_sums()
        self._divisor = self._known_divisor() if self._stages.divides else []
        deferred = self._deferred()
        for action in self._pipe.schedule.order():
            cell, mode = action[1:], self._stages.mode(*action[1:])
            if action.op == FORWARD:
                if cell not in deferred:
                    self._forward(action, mode)
                continue
            if cell in deferred:
                mode = _remat.in_one(mode, whole=action.op == BACKWARD)
            follows = cell in deferred and action.op != WEIGHT
            if follows:
                self._forward(action, mode)
            self._backward(action, mode, follows)
        grads, sums = (
            [
                [known[s, place] for place in self._pipe.places_of(s)]
                for s in range(self._stages.num_stages)
            ]
            for known in (self._grads, self._sums)
        )
        programs = map(self._stages.program, range(self._count))
        weights = [
            [self._returned(w, m) for w in program.weight]
            for m, program in enumerate(programs)
        ]
        totals = Totals(self._once, self._batch, self._weights)
        losses = [own[0] for own in sums[-1]]
        sums[-1] = [own[1:] for own in sums[-1]]
        states = self._stages.states
        loss, found = totals.loss_and_grads(grads, losses, weights, self._divisor)
        return loss, found, totals.written(states, sums)

    def _known_divisor(self) -> Values:
        """The sum of all weights, where what micro-batches are given tells it."""
        found = [self._stages.weight(m) for m in range(self._count)]
        given = self._given[self._stages.num_stages - 1]
        return _divisors.known(self._graph, self._last, self._batch, found, given)

    def forwards(self) -> None:
        """The forwards of the schedule alone."""
        for action in self._pipe.schedule.order():
            if action.op == FORWARD:
                cell = action[1:]
                self._forward_of(action, self._stages.forward(*cell))

    def aux(self, count: int) -> list[Values]:
        """What each micro-batch returned besides the loss, the first so many leaves."""
        programs = map(self._stages.program, range(self._count))
        return [
            [self._returned(atom, m) for atom in program.aux_vars[:count]]
            for m, program in enumerate(programs)
        ]

    def _returned(self, atom: Any, m: int) -> Value:
        if isinstance(atom, core.Literal):
            return self._graph.constant(np.asarray(atom.val), self._last)
        params = self._stages.program(m).params
        if atom in params:
            return self._weights[params.index(atom)]
        return self._made[atom, m]

    def _deferred(self) -> set[Cell]:
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
            action[1:]
            for row in rows
            for action, after in itertools.pairwise(row)
            if action.op == FORWARD and action.stage == last and after[1:] == action[1:]
        }

    def _does(self, action: Action) -> bool:
        if action.op == FORWARD:
            return True
        return self._stages.does(*action[1:], action.op == WEIGHT)

    def _start_sums(self) -> None:
        count, by_place = self._stages.num_stages, dict[Place, list[int]]()
        # Specs of the loss and of what micro-batches write, by stage; shardings of
        # sums of gradients.
        self._sum_specs = [*map(self._specs_of_sums, range(count))]
        self._grads_shardings = [*map(self._shardings_of_grads, range(count))]
        for s in range(count):
            for place in self._pipe.places_of(s):
                by_place.setdefault(place, []).append(s)
        one, mapped = Sharding(self._is_mapped), self._is_mapped
        for place, own in by_place.items():
            parts: list[tuple[Any, int, list[Any]]] = []
            shardings = list[Sharding]()
            for s in own:
                sums = self._sum_specs[s]
                parts += [(self._grads, s, self._specs_of_grads(s))]
                parts += [(self._sums, s, sums)]
                shardings += [*self._grads_shardings[s], *[one] * len(sums)]
            flat = [spec for *_, specs in parts for spec in specs]
            values = iter(())
            if flat:
                given = Function("zeros", _sums.zeros(flat), flat), place, []
                made = self._graph.call(*given, mapped=mapped, shardings=shardings)
                values = iter(made)
            for known, s, specs in parts:
                known[s, place] = [next(values) for _ in specs]

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
        function: Function,
        action: Action,
        reads: Values,
        shardings: Sequence[Sharding] | None = None,
    ) -> Values:
        place = self._pipe.place(*action[1:])
        name = self._names[action.stage]
        given = function, place, reads, action, name
        return self._graph.call(*given, mapped=self._is_mapped, shardings=shardings)

    def _forward_of(self, action: Action, function: Function) -> tuple[Values, Values]:
        """What a stage reads, and what it makes of that."""
        stage, m = cell = action[1:]
        part = self._stages.part(*cell)
        reads = [self._weights[i] for i in self._stages.weights(*cell)]
        reads += [self._made[var, m] for var in part.arrives]
        reads += self._given[stage][m]
        results = self._call(function, action, reads)
        made = [*part.leaves, *part.aux]
        self._made |= {(v, m): x for v, x in zip(made, results, strict=False)}
        return reads, results

    def _forward(self, action: Action, mode: Any) -> None:
        cell, part = action[1:], self._stages.part(*action[1:])
        function = self._stages.functions(*cell, mode).forward
        reads, results = self._forward_of(action, function)
        count = len(part.leaves) + len(part.aux)
        self._residuals[cell] = [*reads, *results[count:]]
        if self._sum_specs[action.stage]:
            self._add_results(action, results[:1])
            self._graph.fuse()

    def _add_results(self, action: Action, loss: Values) -> None:
        """Adds the loss of a micro-batch, where it is, and what it writes."""
        stage, m = action[1:]
        state, place = self._stages.states[stage], self._pipe.place(stage, m)
        losses = loss * (stage == self._stages.num_stages - 1)
        aux = self._stages.program(m).aux_vars
        new = [self._returned(aux[i], m) for i in state.leaves]
        share = [self._share(m, place)] if state.has_means else []
        count, first = len(losses), len(self._sums[stage, place])
        end = first + count + len(new)

        def add(*leaves: Any) -> list[Any]:
            sums, made = leaves[:first], leaves[first:end]
            total = accumulate(sums[:count], made[:count])
            return [*total, *state.add(sums[count:], made[count:], *leaves[end:])]

        reads = [*self._sums[stage, place], *losses, *new, *share]
        key = "add_results", stage
        if key not in self._known:
            specs = [self._graph.specs[value] for value in reads]
            self._known[key] = Function.like("add_results", add, *specs)
        self._sums[stage, place] = self._call(self._known[key], action, reads)

    def _share(self, m: int, place: Place) -> Value:
        """The part of the examples that a micro-batch has, of one shard."""
        sizes = self._batch.sizes
        part = sizes[m] / sum(sizes) / self._batch.num_shards
        return self._graph.constant(np.asarray(part, jnp.result_type(float)), place)

    def _function(self, name: str, run: Any, specs: Sequence[Any]) -> Function:
        """A function of which there is one for each kind of results."""
        key = name, *((x.shape, x.dtype) for x in specs)
        return self._known.setdefault(key, Function(name, run, specs))

    def _backward(self, action: Action, mode: Any, follows: bool) -> None:
        op, (stage, m) = action.op, action[1:]
        cell, part = (stage, m), self._stages.part(stage, m)
        if not self._does(action):
            return
        functions = self._stages.functions(stage, m, mode)
        given, count = self._residuals[cell], functions.num_grads
        if op != WEIGHT:
            given = self._residuals[cell] = [*given, *self._received(part, m, action)]
        results: list[Any]
        if op == BACKWARD:
            results = self._call(functions.backward, action, given)
        elif op == INPUT:
            results = [None] * count + self._call(functions.input_grad, action, given)
        else:
            results = self._call(functions.weight_grad, action, given)
        pairs = zip(part.arrives, functions.arrives, strict=True)
        arrives = [var for var, yes in pairs if yes]
        back = results[count : count + len(arrives)]
        if op == INPUT:
            self._residuals[cell] = [*given, *results[count + len(arrives) :]]
        elif count:
            at = stage, self._pipe.place(stage, m)
            reads = [*self._grads[at], *results[:count]]
            shardings = self._grads_shardings[stage] if self._is_spread else None
            self._grads[at] = self._call(self._adding(stage), action, reads, shardings)
            self._graph.fuse()
        if follows:
            self._graph.fuse()
        for var, value in zip(arrives, back, strict=False):
            self._cotangents.setdefault((var, m), {})[stage] = value

    def _adding(self, stage: int) -> Function:
        """``(sums, gradients) -> sums`` of what a stage trains."""
        if ("add_grads", stage) not in self._known:
            specs = self._specs_of_grads(stage)
            count = len(specs)

            def add(*leaves: Any) -> list[Any]:
                return accumulate(leaves[:count], leaves[count:])

            self._known["add_grads", stage] = self._function("add_grads", add, specs)
        return self._known["add_grads", stage]

    def _received(self, part: Slice, m: int, action: Action) -> Values:
        """The cotangents of what a stage made: of each the sum over its readers.

        Of the loss what it is divided by.
        """
        if action.stage == self._stages.num_stages - 1:
            return self._divisor
        found = []
        for var in part.leaves:
            own = self._cotangents.pop((var, m))
            terms = [own[s] for s in sorted(own, reverse=True)]
            if len(terms) > 1:
                spec = self._graph.specs[terms[0]]
                count = len(terms)
                name = f"add_{count}_cotangents"
                add = self._function(name, lambda *x: [sum(x[1:], x[0])], [spec])
                place, mapped = self._pipe.place(*action[1:]), self._is_mapped
                terms = self._graph.call(add, place, terms, mapped=mapped)
            found.append(terms[0])
        return found

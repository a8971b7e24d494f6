"""From a schedule and slices to a graph: who reads which variable.

Who sends what where follows from who reads what is made.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._functions import _remat
from .._functions._batch import Batch
from .._functions._weights import accumulate, sum_spec
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE
from .._jaxprs import _jaxpr
from .._jaxprs._function import Function
from .._run import _sums
from .._run._incoming import Incoming
from .._run._pipe import Pipe
from .._train._placed import Placed, Placement
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from ._stages import Stages, pull_once

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
        self._count, self._params = len(batch.sizes), params
        self._weights = [*params, *self._once(params)]
        incoming = Incoming(graph, pipe, batch, [])
        # By stage, of each micro-batch what it reads of what that is given.
        self._given = [
            self._rows(incoming, batch, given, s) for s in range(stages.num_stages)
        ]
        # By variable and micro-batch: what was made, and the cotangents from readers.
        self._made: dict[tuple[core.Var, int], Value] = {}
        self._cotangents: dict[tuple[core.Var, int], dict[int, Value]] = {}
        self._residuals: dict[Cell, Values] = {}
        self._sums: dict[tuple[int, Place], Values] = {}
        self._known: dict[Any, Function] = {}

    @property
    def _last(self) -> Place:
        return self._pipe.place(self._stages.num_stages - 1)

    @property
    def _loss_spec(self) -> Any:
        return sum_spec(self._stages.first.closed.out_avals[0])

    # ------------------------------------------------------- what runs once in a step

    def _place_of(self, weight: int) -> Place:
        return self._pipe.place(self._stages.owner[weight])

    def _once(self, params: Values) -> Values:
        closed = self._stages.once
        if not closed.jaxpr.outvars:
            return []
        at = [self._place_of(i) for i in range(len(params))]
        ends = [self._place_of(len(at) + k) for k in range(len(closed.jaxpr.outvars))]
        function = core.jaxpr_as_fun(closed)
        specs = [self._graph.specs[value] for value in params]
        placed = Placed(function, specs, Placement(at, lambda _: ends), "once")
        return placed.into(self._graph, params, [WHOLE] * len(ends))

    def _pull_once(self, cotangents: dict[int, Value]) -> dict[int, Value]:
        """What the gradients of values that were computed once add to parameters."""
        stages, count = self._stages, len(self._params)
        if not cotangents:
            return {}
        live = _jaxpr.live_inputs(stages.once)
        pairs = zip(stages.trained[:count], live, strict=True)
        trained = [yes and read for yes, read in pairs]
        wanted = [
            count + k in cotangents for k in range(len(stages.once.jaxpr.outvars))
        ]
        pull = pull_once(stages.once, trained, wanted)
        given = [*cotangents.values()]
        at = [
            [self._place_of(i) for i in range(count)],
            [self._place_of(weight) for weight in cotangents],
        ]
        ends = [at[0][i] for i, yes in enumerate(trained) if yes]
        specs = [[self._graph.specs[v] for v in part] for part in (self._params, given)]
        placement = Placement([*at[0], *at[1]], lambda _: ends)
        placed = Placed(pull, specs, placement, "once_backward")
        reads = [*self._params, *given]
        grads = placed.into(self._graph, reads, [WHOLE] * len(ends))
        numbers = [i for i, yes in enumerate(trained) if yes]
        return dict(zip(numbers, grads, strict=True))

    # --------------------------------------------------------------- what comes with m

    def _rows(
        self, incoming: Incoming, batch: Batch, given: Values, stage: int
    ) -> list[Values]:
        """Of each micro-batch what a stage reads of its leaves and its number."""
        position = {v: i for i, v in enumerate(self._stages.first.given)}
        wanted = [position[v] for v in self._stages.part(stage).batch]
        leaves = [i for i in wanted if i < len(given)]
        axes = [batch.x_axes[i] for i in leaves]
        rows = incoming.split([given[i] for i in leaves], axes, stage)
        place = self._pipe.place(stage)
        found = []
        for m, row in enumerate(rows):
            own = dict(zip(leaves, row, strict=True))
            # Its number, and those that are folded into keys.
            numbers = [np.array(m, np.int32), *self._stages.program(m).numbers]
            for i in wanted:
                if i not in own:
                    number = numbers[i - len(given)]
                    own[i] = self._graph.constant(number, place)
            found.append([own[i] for i in wanted])
        return found

    # --------------------------------------------------------------------- the schedule

    def run(self) -> tuple[Value, dict[int, Value]]:
        """The whole schedule: the loss, and the gradient of each trained parameter."""
        zero = np.zeros((), self._loss_spec.dtype)
        self._loss = self._graph.constant(zero, self._last)
        self._start_sums()
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
        return self._finished()

    def forwards(self) -> None:
        """The forwards of the schedule alone."""
        for action in self._pipe.schedule.order():
            if action.op == FORWARD:
                cell = action[1:]
                self._forward_of(action, self._stages.forward(*cell))

    def aux(self) -> list[Values]:
        """What each micro-batch returned beside the loss."""
        programs = map(self._stages.program, range(self._count))
        return [
            [self._returned(atom, m) for atom in program.beside]
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
        rows = [
            [action for action in schedule.rows[rank] if self._does(action)]
            for rank in schedule.homes.ranks(last)
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
        by_place: dict[Place, list[int]] = {}
        for s in range(self._stages.num_stages):
            for place in self._pipe.places_of(s):
                by_place.setdefault(place, []).append(s)
        for place, own in by_place.items():
            specs = [self._sum_specs(s) for s in own]
            flat = [spec for part in specs for spec in part]
            zeros = Function("zeros", _sums.zeros(flat), flat)
            values = iter(self._graph.call(zeros, place, []) if flat else [])
            for s, part in zip(own, specs, strict=True):
                self._sums[s, place] = [next(values) for _ in part]

    def _trained(self, stage: int) -> list[int]:
        return [i for i in self._stages.weights(stage) if self._stages.trained[i]]

    def _sum_specs(self, stage: int) -> list[jax.ShapeDtypeStruct]:
        own = self._trained(stage)
        return [sum_spec(self._graph.specs[self._weights[i]]) for i in own]

    def _call(self, function: Function, action: Action, reads: Values) -> Values:
        place = self._pipe.place(*action[1:])
        return self._graph.call(function, place, reads, action, f"stage {action.stage}")

    def _forward_of(self, action: Action, function: Function) -> tuple[Values, Values]:
        """What a stage reads, and what it makes of that."""
        stage, m = cell = action[1:]
        part = self._stages.part(*cell)
        reads = [self._weights[i] for i in self._stages.weights(*cell)]
        reads += [self._made[var, m] for var in part.arrives]
        reads += self._given[stage][m]
        results = self._call(function, action, reads)
        made = [*part.leaves, *part.beside]
        self._made |= {(v, m): x for v, x in zip(made, results, strict=False)}
        return reads, results

    def _forward(self, action: Action, mode: Any) -> None:
        cell, part = action[1:], self._stages.part(*action[1:])
        function = self._stages.functions(*cell, mode).forward
        reads, results = self._forward_of(action, function)
        count = len(part.leaves) + len(part.beside)
        self._residuals[cell] = [*reads, *results[count:]]
        if action.stage == self._stages.num_stages - 1:
            reads = [self._loss, results[0]]
            (self._loss,) = self._call(self._add_loss(), action, reads)
            self._graph.fuse()

    def _add_loss(self) -> Function:
        def add(old: jax.Array, new: jax.Array) -> list[jax.Array]:
            return accumulate([old], [new])

        return self._function("add_loss", add, [self._loss_spec])

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
        arrives = [v for v in part.arrives if self._stages.has_gradient(v, m)]
        back = results[count : count + len(arrives)]
        if op == INPUT:
            self._residuals[cell] = [*given, *results[count + len(arrives) :]]
        elif count:
            at = stage, self._pipe.place(stage, m)
            specs = self._sum_specs(stage)

            def add(*leaves: Any) -> list[Any]:
                return accumulate(leaves[:count], leaves[count:])

            reads = [*self._sums[at], *results[:count]]
            function = self._function("add_grads", add, specs)
            self._sums[at] = self._call(function, action, reads)
            self._graph.fuse()
        if follows:
            self._graph.fuse()
        for var, value in zip(arrives, back, strict=False):
            self._cotangents.setdefault((var, m), {})[stage] = value

    def _received(self, part: Any, m: int, action: Action) -> Values:
        """The cotangents of what a stage made: of each the sum over its readers."""
        found = []
        for var in part.leaves:
            if action.stage == self._stages.num_stages - 1:
                continue  # the loss
            own = self._cotangents.pop((var, m))
            terms = [own[s] for s in sorted(own, reverse=True)]
            if len(terms) > 1:
                spec = self._graph.specs[terms[0]]
                count = len(terms)
                name = f"add_{count}_cotangents"
                add = self._function(name, _sums.adding([count]), [spec])
                terms = self._graph.call(add, self._pipe.place(*action[1:]), terms)
            found.append(terms[0])
        return found

    # ------------------------------------------------------------------------- the end

    def _finished(self) -> tuple[Value, dict[int, Value]]:
        terms: dict[int, Values] = {}
        for s in range(self._stages.num_stages):
            for place in self._pipe.places_of(s):
                pairs = zip(self._trained(s), self._sums[s, place], strict=True)
                for weight, value in pairs:
                    terms.setdefault(weight, []).append(value)
        stages, count = self._stages, len(self._params)
        totals = {i: self._total(i, values) for i, values in terms.items()}
        cotangents = {i: value for i, value in totals.items() if i >= count}
        if stages.first.rest:
            weight = len(self._weights) - 1
            (self._loss,) = self._graph.call(
                self._add_loss(), self._last, [self._loss, self._weights[weight]]
            )
            if stages.trained[weight]:
                one = np.ones((), self._graph.specs[self._weights[weight]].dtype)
                cotangents[weight] = self._graph.constant(one, self._last)
        once = self._pull_once(cotangents)
        grads = {
            i: self._total(i, [part[i] for part in (totals, once) if i in part])
            for i in range(count)
            if stages.trained[i]
        }
        if stages.first.is_weighted:
            grads = self._divided(grads)
        dtype = stages.first.closed.out_avals[0].dtype
        (loss,) = self._cast([self._loss], dtype, self._last)
        return loss, grads

    def _divided(self, grads: dict[int, Value]) -> dict[int, Value]:
        """The loss, which is replaced, and gradients by the sum of all weights."""
        last, specs, weights = self._last, self._graph.specs, Values()
        for m in range(self._count):
            weights += [self._returned(w, m) for w in self._stages.program(m).weight]
        add = _sums.adding([len(weights)])
        function = Function("add_weights", add, [specs[weights[0]]])
        (total,) = self._graph.call(function, last, weights)

        def divide(total: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            return [leaf / total.astype(leaf.dtype) for leaf in leaves]

        found = dict(grads)
        by_place: dict[Place, list[int]] = {}
        for i in grads:
            by_place.setdefault(self._place_of(i), []).append(i)
        for place, own in by_place.items():
            reads = [grads[i] for i in own]
            function = Function("divide", divide, [specs[v] for v in reads])
            made = self._graph.call(function, place, [total, *reads])
            found |= zip(own, made, strict=True)
        function = Function("divide", divide, [specs[self._loss]])
        (self._loss,) = self._graph.call(function, last, [total, self._loss])
        return found

    def _total(self, weight: int, values: Values) -> Value:
        """The sum of gradients of a weight, of its dtype, where it is."""
        place, spec = self._place_of(weight), self._graph.specs[self._weights[weight]]
        if not values:
            zeros = self._function("zeros", _sums.zeros([spec]), [spec])
            return self._graph.call(zeros, place, [])[0]
        if len(values) > 1:
            own = self._graph.specs[values[0]]
            add = self._function(
                f"add_{len(values)}", _sums.adding([len(values)]), [own]
            )
            values = self._graph.call(add, place, values)
        return self._cast(values, spec.dtype, place)[0]

    def _cast(self, values: Values, dtype: Any, place: Place) -> Values:
        spec = self._graph.specs[values[0]]
        if spec.dtype == dtype:
            return values
        result = jax.ShapeDtypeStruct(spec.shape, dtype)
        cast = self._function("cast", lambda x: [x.astype(dtype)], [result])
        return self._graph.call(cast, place, values)

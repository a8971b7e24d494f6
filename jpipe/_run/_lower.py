"""From a schedule and its stages to a graph: who computes what, on which values.

Transfers, frees and donation are not written here: they follow from who reads what.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from .._functions import _remat
from .._functions._batch import Batch
from .._functions._task import Task
from .._functions._weights import sum_spec
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding, SubMesh
from .._jaxprs._function import Function
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from . import _divisors, _facts, _sums
from ._incoming import Incoming
from ._layout import Layout
from ._pipe import Pipe
from ._totals import Sums, Totals
from ._work import Works

Values = list[Value]
Cell = tuple[int, int]


class Lowering:
    """The actions of a mini-batch, written into a graph.

    Args:
      graph: where they are written.
      pipe: the stages.
      layout: which variables each uses.
      batch: the mini-batch.
      works: what each stage does on each micro-batch.
      variables: all leaves of the variables, as values.
      x: those of the input.
      targets: those of the targets.
      rngs: those of the keys of the step.
    """

    def __init__(
        self,
        graph: Graph,
        pipe: Pipe,
        layout: Layout,
        batch: Batch,
        works: Works,
        variables: Sequence[Value],
        x: Sequence[Value],
        targets: Sequence[Value],
        rngs: Sequence[Value],
    ) -> None:
        graph.facts |= _facts.of_batch(batch)
        graph.facts |= _facts.of_stages(pipe, works)
        self._graph = graph
        self._pipe = pipe
        self._layout = layout
        self._batch = batch
        self._works = works
        # Whether each shard of a stage runs its actions by itself.
        self._is_mapped = batch.num_shards > 1
        self._is_spread = any(isinstance(d, SubMesh) for d in pipe.places)
        self._incoming = incoming = Incoming(graph, pipe, batch, rngs)
        at_hand = incoming.weights(variables)
        self._weights = [[at_hand[i] for i in order] for order in layout.order]
        self._names = [str(stage) for stage in pipe.stages]
        rows = incoming.split(x, batch.x_axes, 0)
        # By stage and micro-batch, what each stage is given, what its backward reads,
        # the cotangents of its outputs; what a loss function returned beside the loss.
        self._x: dict[Cell, Values] = {(0, m): row for m, row in enumerate(rows)}
        self._skips: dict[tuple[Any, int], Values] = {}
        self._residuals: dict[Cell, Values] = {}
        self._cotangents: dict[tuple[Cell, Any], Values] = {}
        self._aux: dict[int, Values] = {}
        last = len(pipe.stages) - 1
        has_loss = works.task(last).has_loss
        self._targets = incoming.split(targets, batch.target_axes, last) * has_loss
        # By what backwards of a weighted loss divide: the sum of weights, if known;
        # else, by micro-batch, a guess, and gradients are multiplied by it.
        self._divisor = Values()
        if has_loss and works.task(last).divisors and batch.num_parts > 1:
            found = [works.derivatives(last, m).weight for m in range(len(batch.sizes))]
            given = graph, pipe.place(last), batch, found, self._targets
            self._divisor = _divisors.known(*given)
        self._guess = _divisors.guess(works, batch)
        self._guesses: dict[int, Values] = {}
        # By stage and place, the sums of what runs there.
        self._grads: dict[Cell, Values] = {}
        self._sums: dict[Cell, Values] = {}

    # ----------------------------------------------------------------- inference

    def _extra(self, task: Task, m: int) -> Values:
        """What a micro-batch brings to a stage beside its input."""
        targets = self._targets[m] if self._targets else []
        return self._incoming.extra(task, m, targets)

    def inference(self) -> list[Values]:
        """The forwards of the schedule; the output of each micro-batch."""
        for action in self._pipe.schedule.forwards().order():
            cell = action[1:]
            task = self._works.task(*cell)
            function = self._works.derivatives(*cell).infer
            self._send(task, cell, self._call(function, action, self._given(cell)))
        last = len(self._pipe.stages)
        return [self._x[last, m] for m in range(len(self._batch.sizes))]

    # ------------------------------------------------------------------ training

    def training(self) -> Sums:
        """The whole schedule, and what its micro-batches sum up to."""
        self._start_sums()
        deferred = self._deferred()
        for action in self._pipe.schedule.order():
            cell = action[1:]
            if action.op == FORWARD:
                if cell not in deferred:
                    self._forward(action, self._works.mode(*cell))
                continue
            mode = self._works.mode(*cell)
            if cell in deferred:
                mode = _remat.in_one(mode, whole=action.op == BACKWARD)
            if cell in deferred and action.op != WEIGHT:
                self._forward(action, mode)
                self._backward(action, mode, follows=True)
            else:
                self._backward(action, mode)
        aux = [self._aux[m] for m in range(len(self._batch.sizes))]
        given = self._graph, self._pipe, self._layout, self._batch, self._works
        stages = range(len(self._pipe.stages))
        sums, grads = (
            [[known[s, place] for place in self._pipe.places_of(s)] for s in stages]
            for known in (self._sums, self._grads)
        )
        multiplied = bool(self._guesses) and self._guess is not None
        return Totals(*given).sums(self._weights, sums, grads, aux, multiplied)

    def _deferred(self) -> set[Cell]:
        """The forwards of the stage with the loss that run with their backwards.

        As one program, in which nothing is kept in between: if nothing runs in
        between; and if nothing is to be kept, for then the forward by itself would
        compute only what the backward computes again.
        """
        schedule, works = self._pipe.schedule, self._works
        last, count = schedule.num_stages - 1, schedule.num_microbatches
        full = {
            (last, m) for m in range(count) if _remat.keeps_nothing(works.mode(last, m))
        }
        if full and works.task(last).changes_integers:
            # All of them, or one that is not would run before those that are.
            full = {(last, m) for m in range(count)}
        rows = [
            [action for action in schedule.rows[rank] if self._does(action)]
            for rank in schedule.homes.ranks(last)
        ]
        adjacent = {
            action[1:]
            for row in rows
            for action, after in itertools.pairwise(row)
            if action.op == FORWARD and action.stage == last and after[1:] == action[1:]
        }
        return full | adjacent

    def _does(self, action: Action) -> bool:
        """Whether an action has anything to compute."""
        wanted = self._works.task(*action[1:]).wanted
        if action.op == WEIGHT:
            return any(wanted.weights)
        return action.op == FORWARD or any(wanted.x) or any(wanted.weights)

    def _start_sums(self) -> None:
        """Sums at zero, all of a place made at one stroke."""
        by_place: dict[Place, list[int]] = {}
        for s in range(len(self._pipe.stages)):
            for place in self._pipe.places_of(s):
                by_place.setdefault(place, []).append(s)
        one = WHOLE._replace(stacked=self._is_mapped)
        for place, stages in by_place.items():
            parts: list[tuple[dict[Cell, Values], int, list[Any]]] = []
            lies: list[Sharding] = []
            for s in stages:
                task = self._works.task(s)
                grads = [sum_spec(leaf) for leaf in task.weights.trainable_specs]
                parts += [(self._grads, s, grads), (self._sums, s, task.sum_specs)]
                lies += [*self._sums_lie(s), *[one] * len(task.sum_specs)]
            specs = [spec for _, _, own in parts for spec in own]
            values = iter(())
            if specs:
                zeros = Function("zeros", _sums.zeros(specs), specs)
                how = lies if self._is_spread else None
                given = zeros, place, []
                values = iter(self._graph.call(*given, mapped=self._is_mapped, how=how))
            for known, s, own in parts:
                known[s, place] = [next(values) for _ in own]

    def _given(self, cell: Cell) -> Values:
        """The weights, the input and the rest of a stage on a micro-batch."""
        task = self._works.task(*cell)
        stage, m = cell
        arrived = [
            value
            for route in task.ports.incoming
            for value in self._skips[route.key, m]
        ]
        x = [*arrived, *self._x[cell]]
        return [*self._weights[stage], *x, *self._extra(task, m)]

    def _call(
        self,
        function: Function,
        action: Action,
        reads: Values,
        how: Sequence[Sharding] | None = None,
    ) -> Values:
        place = self._pipe.place(*action[1:])
        given = function, place, reads, action, self._names[action.stage]
        return self._graph.call(*given, mapped=self._is_mapped, how=how)

    def _sums_lie(self, stage: int) -> list[Sharding]:
        """How the sums of gradients of a stage lie: cut as their leaves are."""
        pairs = zip(
            self._weights[stage], self._works.task(stage).weights.trainable, strict=True
        )
        shardings = self._graph.shardings
        return [
            shardings[value].gathered()._replace(stacked=self._is_mapped)
            for value, yes in pairs
            if yes
        ]

    def _send(self, task: Task, cell: Cell, results: Values) -> None:
        """Says who reads what leaves a stage."""
        stage, m = cell
        tree = jax.tree.structure(task.y)
        if task.has_loss:
            self._aux[m] = task.loss_aux(results)
            return
        y = jax.tree.unflatten(tree, task.sent(results))
        if task.ports.outgoing:
            skips, y = y
            for route, skip in zip(task.ports.outgoing, skips, strict=True):
                self._skips[route.key, m] = jax.tree.leaves(skip)
        self._x[stage + 1, m] = jax.tree.leaves(y)

    def _forward(self, action: Action, mode: Any) -> None:
        cell = action[1:]
        stage, _ = cell
        task, functions = self._works.task(*cell), self._works.derivatives(*cell, mode)
        given = self._given(cell)
        results = self._call(functions.forward, action, given)
        self._send(task, cell, results)
        self._residuals[cell] = [*given, *results[task.num_results :]]
        if task.divisors and not self._divisor:
            own = results[1 : task.num_losses]
            if self._guess:
                own = self._call(self._guess, action, own)
                self._graph.fuse()
            self._guesses[action.microbatch] = own
        if task.sum_specs:
            end = len(given) - len(task.extra_specs)
            added = [*results[: task.num_results], *given[end:]]
            at = stage, self._pipe.place(*cell)
            reads = [*self._sums[at], *added]
            self._sums[at] = self._call(functions.add_results, action, reads)
            self._graph.fuse()

    def _backward(self, action: Action, mode: Any, follows: bool = False) -> None:
        """A backward, or a half of one; as one program with what it follows."""
        op, stage, m = action
        cell = stage, m
        task, functions = self._works.task(*cell), self._works.derivatives(*cell, mode)
        if not self._does(action):
            return
        given = self._residuals[cell]
        if op != WEIGHT:
            given = self._residuals[cell] = [*given, *self._received(task, m)]
        weights = task.weights.trainable_specs
        if op == BACKWARD:
            results, count = self._call(functions.backward, action, given), len(weights)
            grads, x_grads = results[:count], results[count:]
        elif op == INPUT:
            results = self._call(functions.input_grad, action, given)
            count = sum(task.wanted.x)
            grads, x_grads = [], results[:count]
            self._residuals[cell] = [*given, *results[count:]]
        else:
            grads, x_grads = self._call(functions.weight_grad, action, given), []
        if grads:
            at = stage, self._pipe.place(*cell)
            factor = self._guesses.get(m, []) if self._guess else []
            sums = [*self._grads[at], *grads, *factor]
            lie = self._sums_lie(stage) if self._is_spread else None
            self._grads[at] = self._call(functions.add_grads, action, sums, lie)
            self._graph.fuse()
        if follows:
            self._graph.fuse()
        if op != WEIGHT:
            self._return(task, m, x_grads)

    def _received(self, task: Task, m: int) -> Values:
        """The cotangents of the outputs of a stage, skip connections first.

        Of a loss what it is divided by.
        """
        if task.has_loss:
            return self._divisor or self._guesses.get(m, [])
        sources = [*(route.key for route in task.ports.outgoing), None]
        return [v for key in sources for v in self._cotangents[(task.index, m), key]]

    def _return(self, task: Task, m: int, x_grads: Values) -> None:
        """Says who reads the gradients of the input of a stage."""
        grads = iter(x_grads)
        values = [next(grads) if yes else None for yes in task.wanted.x]
        arrived, x = (), jax.tree.unflatten(task.x_tree, range(len(values)))
        if task.ports.incoming:
            arrived, x = x
        ends = [
            *((route.source, route.key) for route in task.ports.incoming),
            (task.index - 1, None),
        ]
        for (source, key), part in zip(ends, [*arrived, x], strict=True):
            found = [values[i] for i in jax.tree.leaves(part)]
            self._cotangents[(source, m), key] = [v for v in found if v is not None]

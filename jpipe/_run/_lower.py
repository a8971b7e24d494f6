"""From a schedule and its stages to a graph: who computes what, on which values.

Transfers, frees and donation are not written here: they follow from who reads what.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._functions import _microbatch, _remat
from .._functions._batch import Batch
from .._functions._task import Task
from .._functions._weights import sum_spec
from .._instructions._graph import Graph, Value
from .._jaxprs._function import Function
from ..schedules import Action
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from . import _sums
from ._layout import Layout
from ._pipe import Pipe
from ._work import Works

Values = list[Value]
Cell = tuple[int, int]


class Sums(NamedTuple):
    """What the micro-batches of a mini-batch sum up to.

    Attributes:
      loss: the loss of the whole mini-batch.
      aux: what the loss function returned beside it, of each micro-batch.
      grads: the gradient of each trained leaf, by its position among all variables.
      changed: the new value of each leaf that training changes, likewise.
    """

    loss: Value
    aux: list[Values]
    grads: dict[int, Value]
    changed: dict[int, Value]


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
        self._graph = graph
        self._pipe = pipe
        self._layout = layout
        self._batch = batch
        self._works = works
        self._weights = [[variables[i] for i in order] for order in layout.order]
        self._names = [str(stage) for stage in pipe.stages]
        self._rngs = rngs
        rows = self._split(x, batch.x_axes, 0)
        # By stage and micro-batch, what each stage is given, what its backward reads,
        # the cotangents of its outputs; what a loss function returned beside the loss.
        self._x: dict[Cell, Values] = {(0, m): row for m, row in enumerate(rows)}
        self._skips: dict[tuple[Any, int], Values] = {}
        self._residuals: dict[Cell, Values] = {}
        self._cotangents: dict[tuple[Cell, Any], Values] = {}
        self._aux: dict[int, Values] = {}
        last = len(pipe.stages) - 1
        has_loss = works.task(last).has_loss
        self._targets = self._split(targets, batch.target_axes, last) * has_loss
        self._grads: list[Values] = []
        self._sums: list[Values] = []

    # ------------------------------------------------------------- what comes in

    def _split(
        self, leaves: Sequence[Value], axes: Sequence[int | None], stage: int
    ) -> list[Values]:
        """The leaves of each micro-batch where a stage reads them.

        A leaf without a batch axis is the same in every micro-batch, not a copy.
        """
        graph, place = self._graph, self._pipe.place(stage)
        local = [graph.at(value, place) for value in leaves]
        cut = [v for v, axis in zip(local, axes, strict=True) if axis is not None]
        sizes = self._batch.sizes
        if len(sizes) == 1 or not cut:
            return [local for _ in sizes]
        split = _microbatch.splitter([a for a in axes if a is not None], sizes)
        function = Function.like("split", split, *[graph.specs[v] for v in cut])
        parts = iter(graph.call(function, place, cut))
        return [
            [v if a is None else next(parts) for v, a in zip(local, axes, strict=True)]
            for _ in sizes
        ]

    def _extra(self, task: Task, cell: Cell) -> Values:
        """What a micro-batch brings to a stage beside its input: see `_task.EXTRA`."""
        stage, m = cell
        place, sizes = self._pipe.place(stage), self._batch.sizes
        found: Values = []
        for name in task.extra:
            if name == "targets":
                found += self._targets[m]
            elif name == "rngs":
                found += self._rngs
            elif name == "numbers":
                numbers = np.array([m, task.stage.first], np.int32)
                found.append(self._graph.constant(numbers, place))
            else:
                share = np.asarray(sizes[m] / sum(sizes), jnp.result_type(float))
                found.append(self._graph.constant(share, place))
        return found

    # ----------------------------------------------------------------- inference

    def inference(self) -> list[Values]:
        """The forwards of the schedule; the output of each micro-batch."""
        for action in self._pipe.schedule.forwards().simulate().order():
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
        for action in self._pipe.schedule.simulate().order():
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
        return self._totals()

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
        row = [a for a in schedule.rows[schedule.placement[last]] if self._does(a)]
        adjacent = {
            action[1:]
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
        groups: list[tuple[int, list[Any]]] = []
        for s in range(len(self._pipe.stages)):
            task = self._works.task(s)
            grads = [sum_spec(leaf) for leaf in task.weights.trainable_specs]
            groups += [(s, grads), (s, task.sum_specs)]
        found: list[Values] = [[] for _ in groups]
        for place in dict.fromkeys(self._pipe.place(s) for s, _ in groups):
            own = [i for i, (s, _) in enumerate(groups) if self._pipe.place(s) == place]
            specs = [spec for i in own for spec in groups[i][1]]
            if not specs:
                continue
            zeros = Function("zeros", _sums.zeros(specs), specs)
            values = iter(self._graph.call(zeros, place, []))
            for i in own:
                found[i] = [next(values) for _ in groups[i][1]]
        self._grads, self._sums = found[::2], found[1::2]

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
        return [*self._weights[stage], *x, *self._extra(task, cell)]

    def _call(self, function: Function, action: Action, reads: Values) -> Values:
        stage = action.stage
        place, name = self._pipe.place(stage), self._names[stage]
        return self._graph.call(function, place, reads, action, name)

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
        if task.sum_specs:
            end = len(given) - len(task.extra_specs)
            added = [*results[: task.num_results], *given[end:]]
            reads = [*self._sums[stage], *added]
            self._sums[stage] = self._call(functions.add_results, action, reads)
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
            sums = [*self._grads[stage], *grads]
            self._grads[stage] = self._call(functions.add_grads, action, sums)
            self._graph.fuse()
        if follows:
            self._graph.fuse()
        if op != WEIGHT:
            self._return(task, m, x_grads)

    def _received(self, task: Task, m: int) -> Values:
        """The cotangents of the outputs of a stage, skip connections first."""
        if task.has_loss:
            return []
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

    # ------------------------------------------------------------ what comes out

    def _totals(self) -> Sums:
        works, graph = self._works, self._graph
        stages = range(len(self._pipe.stages))
        last = stages[-1]
        losses = self._sums[last][: works.task(last).num_losses]
        (loss,) = self._finished(
            [losses[0]], [works.task(last).closed.out_avals[0].dtype], losses[1:], last
        )
        changed = {}
        for s in stages:
            task = works.task(s)
            if task.changed:
                old = [self._weights[s][i] for i in task.changed]
                sums = self._sums[s][task.num_losses :]
                function = works.derivatives(s, 0, works.mode(s, 0)).commit
                new = graph.call(function, self._pipe.place(s), [*old, *sums])
                at = [self._layout.order[s][i] for i in task.changed]
                changed |= dict(zip(at, new, strict=True))
        aux = [self._aux[m] for m in range(len(self._batch.sizes))]
        return Sums(loss, aux, self._gradients(losses[1:]), changed)

    def _gradients(self, divisor: Values) -> dict[int, Value]:
        """The gradient of each trained leaf; those of a tied one are added."""
        layout = self._layout
        terms: dict[int, list[Value]] = {}
        for s, order in enumerate(layout.order):
            weights = layout.weights[s]
            pairs = zip(order, layout.own[s], strict=True)
            trained = [
                pair for pair, yes in zip(pairs, weights.trainable, strict=True) if yes
            ]
            for (leaf, own), value in zip(trained, self._grads[s], strict=True):
                found = terms.setdefault(leaf, [])
                found.insert(0 if own else len(found), value)
        grads: dict[int, Value] = {}
        for s, order in enumerate(layout.order):
            pairs = zip(order, layout.own[s], strict=True)
            own = sorted(leaf for leaf, yes in pairs if yes and leaf in terms)
            tied = [leaf for leaf in own if len(terms[leaf]) > 1]
            if tied:
                counts = [len(terms[leaf]) for leaf in tied]
                add = Function(
                    "add_tied", _sums.adding(counts), self._specs(terms, tied)
                )
                reads = [value for leaf in tied for value in terms[leaf]]
                totals = self._graph.call(add, self._pipe.place(s), reads)
                terms |= {leaf: [v] for leaf, v in zip(tied, totals, strict=True)}
            dtypes = [layout.specs[leaf][0].dtype for leaf in own]
            sums = [terms[leaf][0] for leaf in own]
            done = self._finished(sums, dtypes, divisor, s)
            grads |= dict(zip(own, done, strict=True))
        return grads

    def _specs(self, terms: dict[int, list[Value]], leaves: Sequence[int]) -> list[Any]:
        return [self._graph.specs[terms[leaf][0]] for leaf in leaves]

    def _finished(
        self, sums: Values, dtypes: Sequence[Any], divisor: Values, stage: int
    ) -> Values:
        """Makes sums over micro-batches what they stand for.

        Sums in another precision than their leaves are cast; those of a weighted loss
        are divided by the sum of weights. Mostly there is nothing to do.
        """
        specs = [self._graph.specs[v] for v in sums]
        same = all(x.dtype == dtype for x, dtype in zip(specs, dtypes, strict=True))
        if not sums or (same and not divisor):
            return sums
        results = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x, dtype in zip(specs, dtypes, strict=True)
        ]
        finish = Function("finish", _sums.finishing(len(sums), dtypes), results)
        return self._graph.call(finish, self._pipe.place(stage), [*sums, *divisor])

"""What a mini-batch comes to: sums made a loss, gradients and new statistics."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._functions import _microbatch
from .._functions._batch import Batch
from .._instructions._graph import Graph, Value
from .._instructions._sharding import Sharding
from .._jaxprs._function import Function
from . import _sums
from ._layout import Layout
from ._pipe import Pipe
from ._work import Works

Values = list[Value]


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


def joined(
    graph: Graph,
    pipe: Pipe,
    batch: Batch,
    name: str,
    rows: Sequence[Values],
    axes: Sequence[int | None],
    without_axis: Callable[..., Any] = jnp.stack,
) -> Values:
    """Leaves of each micro-batch, and of each shard, as those of the mini-batch."""
    leaves = [value for row in rows for value in row]
    pairs = [(graph.specs[value], graph.shardings[value]) for value in leaves]
    specs = [
        spec.update(shape=(batch.num_shards, *spec.shape)) if how.stacked else spec
        for spec, how in pairs
    ]
    each = apart(graph, batch, rows)
    put_together = _microbatch.joiner(axes, without_axis)

    def join(*leaves: jax.Array) -> list[jax.Array]:
        return put_together(*[leaf for part in each(leaves) for leaf in part])

    last = len(pipe.stages) - 1
    return graph.call(Function.like(name, join, *specs), pipe.place(last), leaves)


def apart(
    graph: Graph, batch: Batch, rows: Sequence[Values]
) -> Callable[[Sequence[jax.Array]], list[list[jax.Array]]]:
    """``leaves of rows -> those of each shard of each``.

    A row that holds what a stage was given, such as one of its weights, may have
    leaves that do not lie stacked: they are the same for all shards.
    """
    stacked = [[graph.shardings[value].stacked for value in row] for row in rows]

    def taken(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
        rest = iter(leaves)
        each = [[(next(rest), yes) for yes in row] for row in stacked]
        return [
            [leaf[d] if yes else leaf for leaf, yes in row]
            for row in each
            for d in range(batch.num_shards)
        ]

    return taken


class Totals:
    """The ends of a mini-batch, written into a graph.

    Args:
      graph: where they are written.
      pipe: the stages.
      layout: which variables each uses.
      batch: the mini-batch.
      works: what each stage does on each micro-batch.
    """

    def __init__(
        self, graph: Graph, pipe: Pipe, layout: Layout, batch: Batch, works: Works
    ) -> None:
        self._graph = graph
        self._pipe = pipe
        self._layout = layout
        self._batch = batch
        self._works = works
        self._is_mapped = batch.num_shards > 1

    def sums(
        self,
        weights: Sequence[Values],
        sums: Sequence[Sequence[Values]],
        grads: Sequence[Sequence[Values]],
        aux: list[Values],
        multiplied: bool,
    ) -> Sums:
        """What the running sums of all stages come to.

        Args:
          weights: the variables of each stage.
          sums: of the loss, and of what training changes, of each stage and replica.
          grads: of the gradients, likewise.
          aux: of the loss function, of each micro-batch.
          multiplied: whether gradients are still to be divided by the sum of weights.
        """
        works, graph = self._works, self._graph
        stages = range(len(self._pipe.stages))
        last = stages[-1]
        totals = [self._merged(s, sums[s]) for s in stages]
        losses = totals[last][: works.task(last).num_losses]
        (loss,) = self._finished(
            [losses[0]], [works.task(last).closed.out_avals[0].dtype], losses[1:], last
        )
        changed = {}
        for s in stages:
            task = works.task(s)
            if task.changed:
                old = [weights[s][i] for i in task.changed]
                new = totals[s][task.num_losses :]
                function = works.derivatives(s, 0, works.mode(s, 0)).commit
                at = [self._layout.order[s][i] for i in task.changed]
                how = [self._layout.shardings[i] for i in at]
                place = self._pipe.place(s)
                new = graph.call(function, place, [*old, *new], how=how)
                changed |= dict(zip(at, new, strict=True))
        divisor = losses[1:] if multiplied else []
        return Sums(loss, aux, self._gradients(grads, divisor), changed)

    def _merged(self, stage: int, each: Sequence[Values]) -> Values:
        """The sums of a stage, those of its replicas and their shards made one."""
        count = len(each[0])
        if not count or not (self._is_mapped or len(each) > 1):
            return each[0]
        task = self._works.task(stage)
        parts = apart(self._graph, self._batch, each)

        def merge(*leaves: jax.Array) -> list[Any]:
            return functools.reduce(task.merge_sums, parts(leaves))

        return self._exchanged("merge_sums", merge, stage, each)

    def _reduced(self, stage: int, each: Sequence[Values]) -> Values:
        """The gradients of a stage: the one exchange of its shards and replicas."""
        count = len(each[0])
        if not count or not (self._is_mapped or len(each) > 1):
            return each[0]
        weights = self._layout.weights[stage]
        pairs = zip(self._layout.order[stage], weights.trainable, strict=True)
        how = [self._layout.shardings[leaf] for leaf, yes in pairs if yes]

        def reduce(*leaves: jax.Array) -> list[jax.Array]:
            totals = (sum(leaves[i + count :: count], leaves[i]) for i in range(count))
            return [x.sum(0) if self._is_mapped else x for x in totals]

        return self._exchanged("reduce_gradients", reduce, stage, each, how)

    def _exchanged(
        self,
        name: str,
        run: Callable[..., Sequence[Any]],
        stage: int,
        each: Sequence[Values],
        how: Sequence[Sharding] | None = None,
    ) -> Values:
        """What a function makes of the sums of all replicas, where the stage is."""
        specs = [self._graph.specs[value] for value in each[0]]
        reads = [value for part in each for value in part]
        place = self._pipe.place(stage)
        return self._graph.call(Function(name, run, specs), place, reads, how=how)

    def _gradients(
        self, sums: Sequence[Sequence[Values]], divisor: Values
    ) -> dict[int, Value]:
        """The gradient of each trained leaf; those of a tied one are added."""
        layout = self._layout
        terms: dict[int, list[Value]] = {}
        for s, order in enumerate(layout.order):
            weights = layout.weights[s]
            pairs = zip(order, layout.own[s], strict=True)
            trained = [
                pair for pair, yes in zip(pairs, weights.trainable, strict=True) if yes
            ]
            for (leaf, own), value in zip(
                trained, self._reduced(s, sums[s]), strict=True
            ):
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
                how = [layout.shardings[leaf] for leaf in tied]
                totals = self._graph.call(add, self._pipe.place(s), reads, how=how)
                terms |= {leaf: [v] for leaf, v in zip(tied, totals, strict=True)}
            dtypes = [layout.specs[leaf][0].dtype for leaf in own]
            totals = [terms[leaf][0] for leaf in own]
            how = [layout.shardings[leaf] for leaf in own]
            done = self._finished(totals, dtypes, divisor, s, how)
            grads |= dict(zip(own, done, strict=True))
        return grads

    def _specs(self, terms: dict[int, list[Value]], leaves: Sequence[int]) -> list[Any]:
        return [self._graph.specs[terms[leaf][0]] for leaf in leaves]

    def _finished(
        self,
        sums: Values,
        dtypes: Sequence[Any],
        divisor: Values,
        stage: int,
        how: Sequence[Sharding] | None = None,
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
        place = self._pipe.place(stage)
        return self._graph.call(finish, place, [*sums, *divisor], how=how)

"""What a mini-batch comes to: sums made a loss, gradients and new statistics."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._functions._batch import Batch
from .._functions._weights import accumulate
from .._instructions._graph import Place, Value
from .._jaxprs._function import Function
from .._run._sums import apart
from ._once import Once
from ._state import State

Values = list[Value]
# Of each stage, of each place that runs it, the sums of what ran there.
Sums = Sequence[Sequence[Values]]


class Totals:
    """The ends of a mini-batch, written into a graph.

    Args:
      once: the weights, and where they are.
      batch: the mini-batch.
      weights: the weights as actions read them.
    """

    def __init__(self, once: Once, batch: Batch, weights: Values) -> None:
        self._once, self._batch, self._weights = once, batch, weights
        self._graph, self._pipe, self._stages = once.graph, once.pipe, once.stages
        self._is_mapped = batch.num_shards > 1
        self._last = self._pipe.place(self._stages.num_stages - 1)

    def loss_and_grads(
        self, sums: Sums, losses: Values, weights: Sequence[Values], divisor: Values
    ) -> tuple[Value, dict[int, Value]]:
        """The loss of a mini-batch, and the gradient of each trained parameter.

        Args:
          sums: of gradients.
          losses: of each place that runs the last stage.
          weights: of a weighted loss, of each micro-batch.
          divisor: their sum, where backwards have divided by it.
        """
        stages, count = self._stages, len(self._once.params)
        terms: dict[int, Values] = {
            i: [] for i, yes in enumerate(stages.trained) if yes
        }
        for s, each in enumerate(sums):
            for row in self._reduced(s, each):
                for weight, value in zip(stages.trained_by(s), row, strict=True):
                    terms[weight].append(value)
        loss = self._summed("add_losses", [[value] for value in losses])
        cotangents = self._finished(
            {i: v for i, v in terms.items() if i >= count and v}
        )
        if stages.first.rest:
            weight = len(self._weights) - 1
            spec = self._graph.specs[loss]
            add = Function("add_loss", lambda a, b: accumulate([a], [b]), [spec])
            (loss,) = self._graph.call(add, self._last, [loss, self._weights[weight]])
            if stages.trained[weight]:
                cotangents[weight] = self._one(weight, divisor)
        for i, value in self._once.pull(cotangents).items():
            terms[i].append(value)
        total = divisor
        if stages.first.is_weighted:
            total = divisor or [self._summed("add_weights", weights)]
        grads = self._finished(
            {i: values for i, values in terms.items() if i < count},
            [] if divisor else total,
        )
        dtype = stages.first.closed.out_avals[0].dtype
        return self._divided(loss, total, dtype), grads

    def written(self, states: Sequence[State], sums: Sums) -> dict[int, Value]:
        """The new value of each parameter that micro-batches wrote."""
        found: dict[int, Value] = {}
        for s, (state, each) in enumerate(zip(states, sums, strict=True)):
            if not state.at:
                continue
            merge = functools.partial(functools.reduce, state.merge)
            totals = self._merged("merge_sums", s, each, merge)
            old = [self._weights[i] for i in state.at]
            count = len(old)

            def commit(
                *leaves: Any, count: int = count, state: State = state
            ) -> list[Any]:
                return state.commit(leaves[:count], leaves[count:])

            function = Function("commit", commit, state.specs)
            shardings = [self._once.sharding(i) for i in state.at]
            place = self._pipe.place(s)
            new = self._graph.call(
                function, place, [*old, *totals], shardings=shardings
            )
            # Where they are read first may be elsewhere than where they are made.
            pairs = zip(state.at, new, strict=True)
            found |= {i: self._graph.at(v, self._once.place(i)) for i, v in pairs}
        return found

    def _summed(self, name: str, rows: Sequence[Values]) -> Value:
        """The sum of numbers of micro-batches and shards, on the last stage."""
        if len(rows) == 1 and not self._is_mapped:
            return rows[0][0]
        parts = apart(self._graph, self._batch, rows)

        def add(*leaves: jax.Array) -> list[jax.Array]:
            first, *others = [part[0] for part in parts(leaves)]
            return [sum(others, first)]

        reads = [value for row in rows for value in row]
        function = Function(name, add, [self._graph.specs[reads[0]]])
        return self._graph.call(function, self._last, reads)[0]

    def _merged(
        self,
        name: str,
        stage: int,
        each: Sequence[Values],
        merge: Callable[[Sequence[Any]], Any],
    ) -> Values:
        """The sums of the shards of a stage, and of its places, made one."""
        if not each[0] or not (self._is_mapped or len(each) > 1):
            return each[0]
        parts = apart(self._graph, self._batch, each)
        specs = [self._graph.specs[value] for value in each[0]]
        function = Function(name, lambda *leaves: merge(parts(leaves)), specs)
        reads = [value for part in each for value in part]
        return self._graph.call(function, self._pipe.place(stage), reads)

    def _reduced(self, stage: int, each: Sequence[Values]) -> Sequence[Values]:
        """The sums of gradients of a stage; those of its shards and places as one."""
        count = len(each[0])
        if not count or not (self._is_mapped or len(each) > 1):
            return each

        def reduce(*leaves: jax.Array) -> list[jax.Array]:
            totals = (sum(leaves[i + count :: count], leaves[i]) for i in range(count))
            return [x.sum(0) if self._is_mapped else x for x in totals]

        specs = [self._graph.specs[value] for value in each[0]]
        shardings = [
            self._once.sharding(weight) for weight in self._stages.trained_by(stage)
        ]
        function = Function("reduce_gradients", reduce, specs)
        reads = [value for part in each for value in part]
        return [
            self._graph.call(
                function, self._pipe.place(stage), reads, shardings=shardings
            )
        ]

    def _one(self, weight: int, divisor: Values) -> Value:
        """The cotangent of the summands of the loss that depend on no example."""
        spec = self._graph.specs[self._weights[weight]]
        one = self._graph.constant(np.ones((), spec.dtype), self._last)
        return self._divided(one, divisor, spec.dtype)

    def _divided(self, value: Value, total: Values, dtype: Any) -> Value:
        """A number on the last stage, by another if there is one, in some dtype."""
        spec = self._graph.specs[value]
        if spec.dtype == dtype and not total:
            return value

        def divide(x: jax.Array, *total: jax.Array) -> list[jax.Array]:
            return [(x / total[0].astype(x.dtype) if total else x).astype(dtype)]

        function = Function("divide", divide, [jax.ShapeDtypeStruct((), dtype)])
        return self._graph.call(function, self._last, [value, *total])[0]

    def _finished(
        self, terms: Mapping[int, Values], total: Values | None = None
    ) -> dict[int, Value]:
        """Gradients: each the sum of its terms, where its weight is, in its dtype.

        Those of a weighted loss are divided by the sum of weights where backwards did
        not. All of a place come from one call; mostly there is nothing to do.
        """
        found, by_place = dict[int, Value](), dict[Place, list[int]]()
        for i, values in terms.items():
            spec = self._graph.specs[self._weights[i]]
            same = len(values) == 1 and self._graph.specs[values[0]].dtype == spec.dtype
            if same and not total:
                # What is pulled back once in a step may be made elsewhere.
                found[i] = self._graph.at(values[0], self._once.place(i))
            else:
                by_place.setdefault(self._once.place(i), []).append(i)
        for place, own in by_place.items():
            specs = [self._graph.specs[self._weights[i]] for i in own]
            finish = _finishing([len(terms[i]) for i in own], specs)
            reads = [*(total or []), *(v for i in own for v in terms[i])]
            shardings = [self._once.sharding(i) for i in own]
            function = Function("finish", finish, specs)
            found |= zip(
                own,
                self._graph.call(function, place, reads, shardings=shardings),
                strict=True,
            )
        return {i: found[i] for i in terms}


def _finishing(counts: Sequence[int], specs: Sequence[Any]) -> Callable[..., list[Any]]:
    """``(*total, *terms) -> gradients``: of each so many terms, or none."""

    def finish(*leaves: jax.Array) -> list[jax.Array]:
        first = len(leaves) - sum(counts)
        rest, found = iter(leaves[first:]), []
        for count, spec in zip(counts, specs, strict=True):
            terms = [next(rest) for _ in range(count)]
            value = sum(terms[1:], terms[0]) if terms else jnp.zeros(spec.shape)
            if first:
                value = value / leaves[0].astype(value.dtype)
            found.append(value.astype(spec.dtype))
        return found

    return finish

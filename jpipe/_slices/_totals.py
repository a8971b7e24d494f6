"""What a mini-batch comes to: sums made a loss and gradients."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._functions._batch import Batch
from .._functions._weights import accumulate
from .._instructions._graph import Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs._function import Function
from .._run import _sums
from .._run._totals import apart
from ._once import Once

Values = list[Value]


def adding_loss(spec: Any) -> Function:
    """``(sum, loss) -> sum``."""

    def add(old: jax.Array, new: jax.Array) -> list[jax.Array]:
        return accumulate([old], [new])

    return Function("add_loss", add, [spec])


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
        self._known: dict[Any, Function] = {}

    def _function(self, name: str, run: Any, specs: Sequence[Any]) -> Function:
        """A function of which there is one for each kind of results."""
        key = name, *((x.shape, x.dtype) for x in specs)
        return self._known.setdefault(key, Function(name, run, specs))

    def finished(
        self,
        sums: Sequence[Sequence[Values]],
        losses: Values,
        weights: Sequence[Values],
        divisor: Values,
    ) -> tuple[Value, dict[int, Value]]:
        """The loss of a mini-batch, and the gradient of each trained parameter.

        Args:
          sums: of gradients, of each stage and each place that runs it.
          losses: of each place that runs the last stage.
          weights: of a weighted loss, of each micro-batch.
          divisor: their sum, where backwards have divided by it.
        """
        terms: dict[int, Values] = {}
        for s, each in enumerate(sums):
            for row in self._reduced(s, each):
                for weight, value in zip(self._stages.trained_by(s), row, strict=True):
                    terms.setdefault(weight, []).append(value)
        stages, count = self._stages, len(self._once.params)
        totals = {i: self._total(i, values) for i, values in terms.items()}
        cotangents = {i: value for i, value in totals.items() if i >= count}
        loss = self._summed("add_losses", [[value] for value in losses])
        if stages.first.rest:
            weight = len(self._weights) - 1
            reads = [loss, self._weights[weight]]
            (loss,) = self._graph.call(
                adding_loss(self._graph.specs[loss]), self._last, reads
            )
            if stages.trained[weight]:
                cotangents[weight] = self._one(weight, divisor)
        once = self._once.pull(cotangents)
        grads = {
            i: self._total(i, [part[i] for part in (totals, once) if i in part])
            for i in range(count)
            if stages.trained[i]
        }
        if stages.first.is_weighted:
            total = divisor or [self._summed("add_weights", weights)]
            (loss,) = self._divided(total, [loss], self._last)
            grads = grads if divisor else self._all_divided(total, grads)
        dtype = stages.first.closed.out_avals[0].dtype
        (loss,) = self._cast([loss], dtype, self._last, WHOLE)
        return loss, grads

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

    def _reduced(self, stage: int, each: Sequence[Values]) -> Sequence[Values]:
        """The sums of a stage; those of its shards, and of its places, as one."""
        count = len(each[0])
        if not count or not self._is_mapped:
            return each

        def reduce(*leaves: jax.Array) -> list[jax.Array]:
            rows = (leaves[i::count] for i in range(count))
            return [sum(others, first).sum(0) for first, *others in rows]

        specs = [self._graph.specs[value] for value in each[0]]
        how = [self._once.lies(weight) for weight in self._stages.trained_by(stage)]
        function = Function("reduce_gradients", reduce, specs)
        reads = [value for part in each for value in part]
        return [self._graph.call(function, self._pipe.place(stage), reads, how=how)]

    def _one(self, weight: int, divisor: Values) -> Value:
        """The cotangent of the summands of the loss that depend on no example."""
        spec = self._graph.specs[self._weights[weight]]
        one = self._graph.constant(np.ones((), spec.dtype), self._last)
        return self._divided(divisor, [one], self._last)[0] if divisor else one

    def _all_divided(self, total: Values, grads: dict[int, Value]) -> dict[int, Value]:
        found, by_place = dict(grads), dict[Place, list[int]]()
        for i in grads:
            by_place.setdefault(self._once.place(i), []).append(i)
        for place, own in by_place.items():
            made = self._divided(total, [grads[i] for i in own], place)
            found |= zip(own, made, strict=True)
        return found

    def _divided(self, total: Values, values: Values, place: Place) -> Values:
        """Values by one number."""

        def divide(total: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            return [leaf / total.astype(leaf.dtype) for leaf in leaves]

        how = [self._graph.shardings[value] for value in values]
        function = Function("divide", divide, [self._graph.specs[v] for v in values])
        return self._graph.call(function, place, [*total, *values], how=how)

    def _total(self, weight: int, values: Values) -> Value:
        """The sum of gradients of a weight, of its dtype, where it is."""
        place, spec = self._once.place(weight), self._graph.specs[self._weights[weight]]
        how = self._once.lies(weight)
        if not values:
            zeros = self._function("zeros", _sums.zeros([spec]), [spec])
            return self._graph.call(zeros, place, [], how=[how])[0]
        if len(values) > 1:
            own = self._graph.specs[values[0]]
            add = self._function(
                f"add_{len(values)}", _sums.adding([len(values)]), [own]
            )
            values = self._graph.call(add, place, values, how=[how])
        return self._cast(values, spec.dtype, place, how)[0]

    def _cast(self, values: Values, dtype: Any, place: Place, how: Sharding) -> Values:
        spec = self._graph.specs[values[0]]
        if spec.dtype == dtype:
            return values
        result = jax.ShapeDtypeStruct(spec.shape, dtype)
        cast = self._function("cast", lambda x: [x.astype(dtype)], [result])
        return self._graph.call(cast, place, values, how=[how])

"""The begin of a step: what is computed once, before any micro-batch.

    prologue:      params -> values                    such as a product of two weights
    prologue_vjp:  params, value_grads -> param_grads
    loss_divisor:  batch_inputs -> sum of loss weights       where these alone tell it

The first two are functions of leaves on all places, which `PlacedFunction` cuts by
place. *Weights* are what stages read: the parameters, and after them the values of the
prologue.

On one device total / weight is differentiated, and cotangents are as small as that
makes them. So each backward of a weighted loss divides by the sum of all weights, where
targets alone tell it. Else the epilogue divides the gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs import _jaxpr
from .._jaxprs._computation import Computation
from .._partition._stage_placement import StagePlacement
from .._placed._placed_function import LeafPlacement, PlacedFunction
from .._stage._stages import Stages, pull_once
from ._shards import unstack

Values = list[Value]
# The loss weights of so many micro-batches are added by one call.
_AT_ONCE = 16


@dataclass(frozen=True)
class Prologue:
    """The begin of a step, written into a graph.

    Attributes:
      graph: where it is written.
      pipe: the schedule and the devices.
      stages: the stages, which say what they read.
      params: the parameters, as values.
    """

    graph: Graph
    pipe: StagePlacement
    stages: Stages
    params: Values

    def place(self, weight: int) -> Place:
        """The place of a weight, by its number."""
        return self.pipe.place(self.stages.owner_stages[weight])

    def sharding(self, weight: int) -> Sharding:
        """The sharding of the gradient of a weight: that between steps."""
        is_param = weight < len(self.params)
        return self.graph.shardings[self.params[weight]] if is_param else WHOLE

    def values(self) -> Values:
        """The values of the prologue, each where it is read first."""
        closed = self.stages.once
        num_params = len(self.params)
        num_values = len(closed.jaxpr.outvars)
        if not num_values:
            return []

        param_places = [self.place(i) for i in range(num_params)]
        value_places = [self.place(num_params + k) for k in range(num_values)]
        placement = LeafPlacement(
            arguments=param_places,
            results=lambda _: (value_places, [WHOLE] * num_values),
        )
        prologue = PlacedFunction(
            core.jaxpr_as_fun(closed),
            [self.graph.specs[value] for value in self.params],
            placement,
            "once",
        )
        return prologue.into(self.graph, self.params)

    def vjp(self, value_grads: Mapping[int, Value]) -> dict[int, Value]:
        """The gradients of parameters that come from those of the prologue's values.

        Args:
          value_grads: the cotangent of each value that has one, by its weight number.

        Returns:
          The gradient of each trained parameter that these follow from, by its number.
        """
        if not value_grads:
            return {}
        closed = self.stages.once
        num_params = len(self.params)
        pairs = zip(
            self.stages.trained[:num_params], _jaxpr.used_inputs(closed), strict=True
        )
        is_free = [is_trained and is_read for is_trained, is_read in pairs]
        has_grad = [
            num_params + k in value_grads for k in range(len(closed.jaxpr.outvars))
        ]
        free = [i for i, yes in enumerate(is_free) if yes]

        # Cotangents in the order of the values, as `pull_once` takes them.
        cotangents = [value_grads[weight] for weight in sorted(value_grads)]
        places = [self.place(i) for i in range(num_params)]
        places += [self.place(weight) for weight in sorted(value_grads)]
        grad_places = [self.place(i) for i in free]
        grad_shardings = [self.sharding(i) for i in free]
        specs = [
            [self.graph.specs[value] for value in values]
            for values in (self.params, cotangents)
        ]
        prologue_vjp = PlacedFunction(
            pull_once(closed, is_free, has_grad),
            specs,
            LeafPlacement(
                arguments=places, results=lambda _: (grad_places, grad_shardings)
            ),
            "once_backward",
        )
        grads = prologue_vjp.into(self.graph, [*self.params, *cotangents])
        return dict(zip(free, grads, strict=True))

    def loss_divisor(self, batch: Batch, batch_inputs: Sequence[Values]) -> Values:
        """The sum of all weights of a weighted loss; nothing if it is not known yet.

        Args:
          batch: the mini-batch.
          batch_inputs: what each micro-batch brings to the last stage.
        """
        if not self.stages.divides:
            return []
        place = self.pipe.place(self.stages.num_stages - 1)
        num_shards = batch.num_shards
        functions = dict[Any, Computation]()  # sizes of micro-batches -> their sum
        loss_weights = list[Computation]()
        for m in range(len(batch.sizes)):
            loss_weight = self.stages.weight(m)
            assert loss_weight is not None
            loss_weights.append(loss_weight)
        specs = loss_weights[0].results
        total = [self.graph.constant(np.zeros((), specs[0].dtype), place)]

        for begin in range(0, len(batch.sizes), _AT_ONCE):
            chunk = slice(begin, begin + _AT_ONCE)
            rows = [
                [inputs[i] for i in loss_weight.reads or ()]
                for inputs, loss_weight in zip(
                    batch_inputs[chunk], loss_weights[chunk], strict=True
                )
            ]
            sizes = batch.sizes[chunk]
            if sizes not in functions:
                add = self._adding(loss_weights[chunk], rows, num_shards)
                functions[sizes] = Computation("weights", add, specs)
            reads = [*total, *(value for row in rows for value in row)]
            total = self.graph.call(functions[sizes], place, reads)
        return total

    def _adding(
        self,
        loss_weights: Sequence[Computation],
        rows: Sequence[Values],
        num_shards: int,
    ) -> Any:
        """``(total, *inputs of micro-batches) -> total``, with the weight of each."""
        shardings = self.graph.shardings
        is_stacked = [[shardings[value].stacked for value in row] for row in rows]

        def add(total: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            rest = iter(leaves)
            for loss_weight, flags in zip(loss_weights, is_stacked, strict=True):
                columns = [
                    unstack(next(rest), num_shards, is_stacked=flag) for flag in flags
                ]
                for shard in range(num_shards):
                    inputs = [column[shard] for column in columns]
                    total = total + loss_weight.run(*inputs)[0]
            return [total]

        return add

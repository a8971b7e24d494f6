"""The start of a step: values that are computed once, before any micro-batch.

    prologue:      params, constants -> values         such as a product of two weights
    prologue_vjp:  params, constants, value_grads -> param_grads
    loss_divisor:  batch_inputs -> sum of loss weights       where these alone tell it

The first two are functions of leaves on all places, which `PlacedFunction` cuts by
place. *Weights* are the parameters, the arrays that the function closes over, and after
them the values of the prologue: a weight index counts them in this order.

On one device total / loss weight is differentiated, and cotangents are as small as that
makes them. So each backward of a weighted loss divides by the sum of all loss weights,
where targets alone tell it. Else the epilogue divides the gradients.
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
from .._stage._stages import Stages, WeightIndex, make_prologue_vjp
from ._shards import unstack

Values = list[Value]
# The largest number of micro-batches whose loss weights one call adds. The first call
# of a tiny function of 256 micro-batches took 1.7, 0.4 and 1.4 s with 1, 16 and 256 in
# a call (``python -m benchmarks.overhead.constants``, two shared cores, 2026-11-29).
_LOSS_WEIGHTS_PER_CALL = 16


@dataclass(frozen=True)
class Prologue:
    """The start of a step, written into a graph.

    Attributes:
      graph: the graph that is written.
      placement: the schedule and the devices.
      stages: the stages, which know which weights they read.
      params_and_constants: the parameters, and behind them the arrays that the function
        closes over, as values.
    """

    graph: Graph
    placement: StagePlacement
    stages: Stages
    params_and_constants: Values

    @property
    def num_inputs(self) -> int:
        """The number of parameters and constants: values of the prologue follow."""
        return len(self.params_and_constants)

    def place_of(self, weight_index: WeightIndex) -> Place:
        """The place of a weight between steps, and so of its gradient."""
        return self.placement.place_of(self.stages.owner_stages[weight_index])

    def sharding_of(self, weight_index: WeightIndex) -> Sharding:
        """The sharding of a weight there, and so of its gradient."""
        if weight_index >= self.num_inputs:
            return WHOLE
        return self.graph.shardings[self.params_and_constants[weight_index]]

    def write_values(self) -> Values:
        """Writes the values of the prologue, each where it is read first."""
        closed = self.stages.prologue
        num_inputs = self.num_inputs
        num_values = len(closed.jaxpr.outvars)
        if not num_values:
            return []

        param_places = [self.place_of(i) for i in range(num_inputs)]
        value_places = [self.place_of(num_inputs + k) for k in range(num_values)]
        placement = LeafPlacement(
            arguments=param_places,
            results=lambda _: (value_places, [WHOLE] * num_values),
        )
        prologue = PlacedFunction(
            core.jaxpr_as_fun(closed),
            [self.graph.specs[value] for value in self.params_and_constants],
            placement,
            "prologue",
        )
        return prologue.into(self.graph, self.params_and_constants)

    def write_vjp(self, value_grads: Mapping[int, Value]) -> dict[int, Value]:
        """Writes the gradients of parameters that come from the prologue's values.

        Args:
          value_grads: weight index of a prologue value -> its cotangent.

        Returns:
          Parameter index -> the gradient, for trained parameters that the prologue
          reads.
        """
        if not value_grads:
            return {}
        closed = self.stages.prologue
        num_inputs = self.num_inputs
        pairs = zip(
            self.stages.trained[:num_inputs], _jaxpr.used_inputs(closed), strict=True
        )
        is_differentiated = [is_trained and is_read for is_trained, is_read in pairs]
        has_grad = [
            num_inputs + k in value_grads for k in range(len(closed.jaxpr.outvars))
        ]
        indices = [i for i, has_result in enumerate(is_differentiated) if has_result]

        # Cotangents in the order of the values, as `make_prologue_vjp` takes them.
        cotangents = [value_grads[i] for i in sorted(value_grads)]
        places = [self.place_of(i) for i in [*range(num_inputs), *sorted(value_grads)]]
        grad_places = [self.place_of(i) for i in indices]
        grad_shardings = [self.sharding_of(i) for i in indices]
        param_specs = [self.graph.specs[value] for value in self.params_and_constants]
        cotangent_specs = [self.graph.specs[value] for value in cotangents]
        prologue_vjp = PlacedFunction(
            make_prologue_vjp(closed, is_differentiated, has_grad),
            [param_specs, cotangent_specs],
            LeafPlacement(
                arguments=places, results=lambda _: (grad_places, grad_shardings)
            ),
            "prologue_vjp",
        )
        grads = prologue_vjp.into(self.graph, [*self.params_and_constants, *cotangents])
        return dict(zip(indices, grads, strict=True))

    def write_loss_divisor(
        self, batch: Batch, batch_inputs: Sequence[Values]
    ) -> Value | None:
        """Writes the sum of all loss weights of a weighted loss.

        Args:
          batch: the mini-batch.
          batch_inputs: the batch inputs of the last stage, for each micro-batch.

        Returns:
          The sum; ``None`` if it follows from more than batch inputs.
        """
        if not self.stages.has_loss_divisor:
            return None
        place = self.placement.place_of(self.stages.num_stages - 1)
        num_shards = batch.num_shards
        # sizes of the micro-batches of a call -> what adds their loss weights
        functions = dict[Any, Computation]()
        weigh_functions = list[Computation]()
        for m in range(len(batch.sizes)):
            weigh = self.stages.weigh_loss(m)
            assert weigh is not None
            weigh_functions.append(weigh)
        specs = weigh_functions[0].results
        total = self.graph.constant(np.zeros((), specs[0].dtype), place)

        for begin in range(0, len(batch.sizes), _LOSS_WEIGHTS_PER_CALL):
            chunk = slice(begin, begin + _LOSS_WEIGHTS_PER_CALL)
            operands = [total]
            rows = list[
                Values
            ]()  # for each micro-batch, the operands of its loss weight
            for inputs, weigh in zip(
                batch_inputs[chunk], weigh_functions[chunk], strict=True
            ):
                row = [inputs[i] for i in weigh.used_args or ()]
                operands += row
                rows.append(row)
            sizes = batch.sizes[chunk]
            if sizes not in functions:
                add = self._make_adder(weigh_functions[chunk], rows, num_shards)
                functions[sizes] = Computation("loss_divisor", add, specs)
            (total,) = self.graph.call(functions[sizes], place, operands)
        return total

    def _make_adder(
        self,
        weigh_functions: Sequence[Computation],
        rows: Sequence[Values],
        num_shards: int,
    ) -> Any:
        """Makes ``(total, *inputs of micro-batches) -> total + their loss weights``."""
        shardings = self.graph.shardings
        # for each micro-batch: True for each operand that has an axis of shards
        is_stacked = list[list[bool]]()
        for row in rows:
            is_stacked.append([shardings[value].stacked for value in row])

        def add(total: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
            remaining = iter(leaves)
            for weigh, flags in zip(weigh_functions, is_stacked, strict=True):
                # for each operand, its array for each shard
                columns = list[list[jax.Array]]()
                for flag in flags:
                    leaf = next(remaining)
                    columns.append(unstack(leaf, num_shards, is_stacked=flag))
                for shard in range(num_shards):
                    inputs = [column[shard] for column in columns]
                    total = total + weigh.run(*inputs)[0]
            return [total]

        return add

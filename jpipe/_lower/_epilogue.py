"""The end of a step: sums over micro-batches become the results of the step.

    reduce_sums:   sums of a stage, of each replica and shard -> sums of the stage
    value_grads:   terms of cotangents, loss_divisor -> cotangents of prologue values
    prologue_vjp:  params, cotangents of prologue values -> terms of gradients
    epilogue:      loss, loss weights, terms of gradients, state, aux
                   -> loss, gradients, new state, aux

All but the first are functions of leaves on all places, which `PlacedFunction` cuts by
place: a result that is an argument, as most gradients are, costs no call. For the third
see `_prologue`.

The first is a call for each stage that has replicas or shards. So it runs as soon as
the stage is done, its stacked sums are freed before those of the next stage are
reduced, and its results are sharded as parameters are. The vjp is a program of its own,
in which XLA cannot contract a product with a sum that comes after it: bits do not
depend on which stages share a device.

Terms of a gradient are added in the order of stages, that of the prologue last;
replicas in the order of their last micro-batches, and of each its shards.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments._batch import Batch
from .._instructions._graph import Place, Value
from .._instructions._sharding import WHOLE, Sharding
from .._jaxprs._computation import Computation
from .._placed._placed_function import LeafPlacement, PlacedFunction
from .._stage._stages import WeightIndex
from .._trace._accumulation import accumulate
from .._trace._state_updates import StateUpdate
from ._join import Join
from ._microbatch_sums import StageSums
from ._prologue import Prologue
from ._shards import spec_of, unstack

Values = list[Value]
# The place where a value belongs, and its sharding there.
Location = tuple[Place, Sharding]


class EpilogueInputs(NamedTuple):
    """The inputs of the epilogue. Leaves are values of a graph, or arrays.

    Attributes:
      loss: the sum of the losses of micro-batches; ``None`` if there is no loss.
      penalty: the summand of the loss that depends on no example, if there is one.
      loss_divisor: the sum of the loss weights, if backwards have divided by it.
      loss_weights: otherwise the loss weight of each micro-batch and shard.
      grads: parameter index -> the terms of its gradient.
      old_state: for each stage, the state leaves before the step.
      state: for each stage, the running sums of its state leaves.
      aux: for each leaf of aux, the arrays of all micro-batches and shards.
    """

    loss: Any
    penalty: Any
    loss_divisor: Any
    loss_weights: list[Any]
    grads: dict[int, list[Any]]
    old_state: list[list[Any]]
    state: list[list[Any]]
    aux: list[list[Any]]


class StepOutputs(NamedTuple):
    """The results of a step. Leaves are values of a graph, or arrays.

    Attributes:
      loss: the loss of the whole mini-batch, if there is one.
      aux: the leaves of aux.
      grads: parameter index -> its gradient, if it is trained.
      new_state: parameter index -> its new value, if micro-batches write it.
    """

    loss: list[Any]
    aux: list[Any]
    grads: dict[int, Any]
    new_state: dict[int, Any]


# ------------------------------------------------------------------ functions of arrays


def epilogue(
    inputs: EpilogueInputs,
    *,
    loss_dtype: Any,
    weight_specs: Sequence[Any],
    states: Sequence[StateUpdate],
    joins: Sequence[Join],
) -> StepOutputs:
    """The results of a step, from the sums over its micro-batches.

    Args:
      inputs: these sums.
      loss_dtype: the dtype of the loss.
      weight_specs: the shape and dtype of each weight, parameters first: a gradient
        has those of its parameter.
      states: the state that each stage writes.
      joins: the join of each leaf of aux.
    """
    # Where the sum of loss weights is known only now, gradients are divided here.
    grad_divisor = _sum(inputs.loss_weights) if inputs.loss_weights else None
    grads = {
        i: sum_terms(terms, weight_specs[i], grad_divisor)
        for i, terms in inputs.grads.items()
    }

    loss = list[jax.Array]()
    if inputs.loss is not None:
        total = inputs.loss
        if inputs.penalty is not None:
            (total,) = accumulate([total], [inputs.penalty])
        loss_divisor = inputs.loss_divisor if grad_divisor is None else grad_divisor
        loss = [_divide(total, loss_divisor).astype(loss_dtype)]

    new_state = dict[int, jax.Array]()
    for state, old, sums in zip(states, inputs.old_state, inputs.state, strict=True):
        new_state |= zip(state.param_indices, state.commit(old, sums), strict=True)

    aux = [join.run(x) for join, x in zip(joins, inputs.aux, strict=True)]
    return StepOutputs(loss=loss, aux=aux, grads=grads, new_state=new_state)


def sum_terms(terms: Sequence[jax.Array], spec: Any, divisor: Any = None) -> jax.Array:
    """The sum of the terms of a gradient, divided, in the dtype of its parameter."""
    total = _sum(terms) if terms else jnp.zeros(spec.shape)
    return _divide(total, divisor).astype(spec.dtype)


def reduce_sums(
    replicas: Sequence[StageSums],
    shards: Sequence[StageSums],
    state: StateUpdate,
    *,
    is_stacked: bool,
) -> StageSums:
    """The sums of a stage.

    Args:
      replicas: the sums of each place that runs it; their gradients are read.
      shards: the sums of each shard of these places; all but gradients is read.
      state: the state that the stage writes.
      is_stacked: True if gradients have a leading axis of shards.
    """
    grads = list[jax.Array]()
    for terms in zip(*[sums.grads for sums in replicas], strict=True):
        total = _sum(terms)
        grads.append(total.sum(0) if is_stacked else total)

    losses = zip(*[sums.loss for sums in shards], strict=True)
    return StageSums(
        grads=grads,
        loss=[_sum(terms) for terms in losses],
        state=functools.reduce(state.merge, [sums.state for sums in shards]),
    )


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    """The sum of at least one term, in order."""
    return sum(terms[1:], terms[0])


def _divide(total: jax.Array, divisor: Any) -> jax.Array:
    return total if divisor is None else total / divisor.astype(total.dtype)


# ---------------------------------------------------------------- written into a graph


@dataclass(frozen=True)
class Epilogue:
    """The end of a step, written into a graph.

    Attributes:
      prologue: the prologue of the step; it knows where each weight is.
      batch: the mini-batch.
      weights: the weights, as stages read them.
      joins: the join of each leaf of aux.
    """

    prologue: Prologue
    batch: Batch
    weights: Values
    joins: Sequence[Join]

    @property
    def num_aux(self) -> int:
        """The number of leaves that the loss function or the model returns as aux."""
        return len(self.joins)

    def write_outputs(self, aux: Sequence[Values]) -> StepOutputs:
        """Writes the end of a forward pass.

        Args:
          aux: the leaves of aux, which are its outputs, for each micro-batch.

        Returns:
          The results, as values, each where it belongs.
        """
        return self._write_epilogue(
            EpilogueInputs(
                loss=None,
                penalty=None,
                loss_divisor=None,
                loss_weights=[],
                grads={},
                old_state=[],
                state=[],
                aux=self._columns(aux),
            )
        )

    def write(
        self,
        *,
        sums: Sequence[Sequence[StageSums]],
        loss_weights: Values,
        loss_divisor: Value | None,
        aux: Sequence[Values],
    ) -> StepOutputs:
        """Writes the end of a training step.

        Args:
          sums: for each stage, the sums of each place that runs it.
          loss_weights: the loss weight of each micro-batch, for a weighted loss.
          loss_divisor: their sum, where backwards have divided by it.
          aux: the leaves of aux, for each micro-batch.

        Returns:
          The results, as values, each where it belongs.
        """
        reduced = [self._reduce(s, replicas) for s, replicas in enumerate(sums)]
        terms = self._terms(reduced)
        num_inputs = self.prologue.num_inputs
        grads = {i: of_param for i, of_param in terms.items() if i < num_inputs}
        for i, grad in self._terms_of_prologue(terms, loss_divisor).items():
            grads[i].append(grad)

        graph = self.prologue.graph
        stages = self.prologue.stages
        old_state = list[Values]()
        for state in stages.states:
            old_state.append([self.weights[i] for i in state.param_indices])
        if loss_divisor is not None:
            loss_weights = []
        return self._write_epilogue(
            EpilogueInputs(
                loss=reduced[-1].loss[0],
                penalty=self.weights[-1] if stages.traced().penalty else None,
                loss_divisor=loss_divisor,
                loss_weights=[
                    graph.bring(value, self._last_place) for value in loss_weights
                ],
                grads=grads,
                old_state=old_state,
                state=[stage_sums.state for stage_sums in reduced],
                aux=self._columns(aux),
            )
        )

    @property
    def _last_place(self) -> Place:
        """The place of the last stage."""
        return self.prologue.placement.place_of(self.prologue.stages.num_stages - 1)

    def _columns(self, aux: Sequence[Values]) -> list[Values]:
        """The values of all micro-batches, for each leaf of aux.

        They are brought to the place where the first micro-batch has the leaf.
        """
        graph = self.prologue.graph
        columns = list[Values]()
        for join in self.joins:
            i = join.leaf_index
            place = graph.places[aux[0][i]]
            columns.append([graph.bring(row[i], place) for row in aux])
        return columns

    def _reduce(self, stage: int, replicas: Sequence[StageSums]) -> StageSums:
        """The sums of the replicas and shards of a stage as one."""
        prologue = self.prologue
        graph = prologue.graph
        num_shards = self.batch.num_shards
        leaves, tree = jax.tree.flatten(list(replicas))
        if not leaves or (len(replicas) == 1 and num_shards == 1):
            return replicas[0]

        state = prologue.stages.states[stage]
        first, result_tree = jax.tree.flatten(replicas[0])
        shardings = [
            prologue.sharding_of(i) for i in prologue.stages.trained_weights(stage)
        ]
        shardings += [WHOLE] * (len(first) - len(shardings))

        # Sums are results of mapped calls, so they are stacked. But a result that is an
        # argument unchanged is that argument, see `Graph.call`: new state that is a
        # parameter or a constant is not stacked.
        is_stacked = [
            jax.tree.map(lambda value: graph.shardings[value].stacked, values)
            for values in replicas
        ]

        def run(*arrays: jax.Array) -> list[jax.Array]:
            replica_sums = jax.tree.unflatten(tree, arrays)
            shards = list[StageSums]()
            for sums, flags in zip(replica_sums, is_stacked, strict=True):
                losses = self._unstack(sums.loss, flags.loss)
                states = self._unstack(sums.state, flags.state)
                for d in range(num_shards):
                    shards.append(
                        StageSums(
                            grads=[],
                            loss=losses[d::num_shards],
                            state=states[d::num_shards],
                        )
                    )
            total = reduce_sums(replica_sums, shards, state, is_stacked=num_shards > 1)
            return jax.tree.leaves(total)

        values = graph.call(
            Computation("reduce_sums", run, [graph.specs[value] for value in first]),
            prologue.placement.place_of(stage),
            leaves,
            shardings=shardings,
        )
        return jax.tree.unflatten(result_tree, values)

    def _terms(self, sums: Sequence[StageSums]) -> dict[int, Values]:
        """Weight index -> the terms of its gradient, one per stage that trains it."""
        stages = self.prologue.stages
        terms: dict[int, Values] = {
            i: [] for i, is_trained in enumerate(stages.trained) if is_trained
        }
        for stage, stage_sums in enumerate(sums):
            trained = stages.trained_weights(stage)
            for weight_index, value in zip(trained, stage_sums.grads, strict=True):
                terms[weight_index].append(value)
        return terms

    def _terms_of_prologue(
        self, terms: Mapping[int, Values], loss_divisor: Value | None
    ) -> dict[int, Value]:
        """Parameter index -> the term of its gradient that comes from prologue values.

        Args:
          terms: weight index -> the terms of its gradient from stages.
          loss_divisor: the sum of loss weights, if backwards have divided by it.
        """
        prologue = self.prologue
        graph = prologue.graph
        num_inputs = prologue.num_inputs
        # weight index of a prologue value -> the terms of its cotangent
        value_terms = {i: x for i, x in terms.items() if i >= num_inputs and x}
        has_penalty = bool(prologue.stages.traced().penalty)
        penalty = len(self.weights) - 1 if has_penalty else None
        # A penalty is added to the loss as it is: its cotangent is that of the loss,
        # and no backward has divided it.
        if penalty is not None and penalty in terms:
            loss_grad = np.ones((), graph.specs[self.weights[penalty]].dtype)
            value_terms[penalty] = [graph.constant(loss_grad, self._last_place)]
        specs = [graph.specs[value] for value in self.weights]

        def value_grads(
            terms: Mapping[int, Sequence[jax.Array]], loss_divisor: Any
        ) -> dict[int, jax.Array]:
            return {
                i: sum_terms(x, specs[i], loss_divisor if i == penalty else None)
                for i, x in terms.items()
            }

        cotangents = self._call(
            "value_grads",
            value_grads,
            args=(value_terms, loss_divisor),
            locations=lambda grads: [self._location(i) for i in grads],
        )
        return prologue.write_vjp(cotangents)

    def _write_epilogue(self, inputs: EpilogueInputs) -> StepOutputs:
        graph = self.prologue.graph
        stages = self.prologue.stages
        is_stacked = jax.tree.map(lambda value: graph.shardings[value].stacked, inputs)
        first = stages.traced()
        loss_dtype = first.closed.out_avals[0].dtype if first.has_loss else None
        aux_locations = [(graph.places[column[0]], WHOLE) for column in inputs.aux]

        def run(inputs: EpilogueInputs) -> StepOutputs:
            loss_weights = self._unstack(inputs.loss_weights, is_stacked.loss_weights)
            aux = list[list[jax.Array]]()
            for column, flags in zip(inputs.aux, is_stacked.aux, strict=True):
                aux.append(self._unstack(column, flags))
            return epilogue(
                inputs._replace(loss_weights=loss_weights, aux=aux),
                loss_dtype=loss_dtype,
                weight_specs=[graph.specs[value] for value in self.weights],
                states=stages.states[: len(inputs.state)],
                joins=self.joins,
            )

        def locations(outputs: StepOutputs) -> list[Location]:
            loss_locations = [(self._last_place, WHOLE) for _ in outputs.loss]
            param_indices = [*outputs.grads, *outputs.new_state]
            param_locations = [self._location(i) for i in param_indices]
            return [*loss_locations, *aux_locations, *param_locations]

        return self._call("epilogue", run, args=(inputs,), locations=locations)

    def _location(self, weight_index: WeightIndex) -> Location:
        """The location of a weight between steps, and so of its gradient."""
        prologue = self.prologue
        return prologue.place_of(weight_index), prologue.sharding_of(weight_index)

    def _unstack(
        self, column: Sequence[jax.Array], is_stacked: Sequence[bool]
    ) -> list[jax.Array]:
        """The arrays of micro-batches, shard by shard."""
        parts = list[jax.Array]()
        for array, flag in zip(column, is_stacked, strict=True):
            parts += unstack(array, self.batch.num_shards, is_stacked=flag)
        return parts

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        args: tuple[Any, ...],
        locations: Callable[[Any], list[Location]],
    ) -> Any:
        """Writes a function of leaves on all places.

        Args:
          name: the name of its programs in profiles.
          function: the function, ``(*pytrees) -> pytree``.
          args: its arguments, with values as leaves.
          locations: ``specs of the result -> location of each leaf``.

        Returns:
          The result, with values as leaves.
        """
        graph = self.prologue.graph
        values, tree = jax.tree.flatten(args)
        specs = [spec_of(graph, value, self.batch.num_shards) for value in values]

        def results(result: Any) -> tuple[list[Place], list[Sharding]]:
            places = list[Place]()
            shardings = list[Sharding]()
            for place, sharding in locations(result):
                places.append(place)
                shardings.append(sharding)
            return places, shardings

        placed = PlacedFunction(
            function,
            jax.tree.unflatten(tree, specs),
            LeafPlacement([graph.places[value] for value in values], results),
            name,
            copy=False,
        )
        result_tree = jax.tree.structure(placed.result)
        return jax.tree.unflatten(result_tree, placed.into(graph, values))

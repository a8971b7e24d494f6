"""Sums over the micro-batches of each stage: of gradients, the loss and state.

    zeros:  -> sums                                      one call for each place
    F:      sums, (loss, new state), share -> sums       *forward sums*
    B, W:   sums, gradients of weights     -> sums       *gradient sums*

The share is that of a shard of the micro-batch among all examples, of which means are
made. Replicas of a stage have sums of their own, and so have its shards: the epilogue
adds them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments._batch import Batch
from .._instructions._graph import Graph, Place, Value
from .._instructions._sharding import Sharding
from .._jaxprs import _inlining, _jaxpr
from .._jaxprs._computation import Argument, ArgumentOrResult, Computation, Result
from .._partition._stage_placement import StagePlacement
from .._stage._stage_functions import Accumulation
from .._stage._stages import Stages
from .._trace._accumulation import accumulate, sum_spec

Values = list[Value]


class StageSums(NamedTuple):
    """Sums over the micro-batches of a stage, or over those that one place runs.

    Leaves are values of a graph, arrays, or specs.

    Attributes:
      grads: the gradient of each weight that the stage trains.
      loss: the loss, in the last stage; else empty.
      state: the running sums of state leaves: see `StateUpdate.sum_specs`.
    """

    grads: list[Any]
    loss: list[Any]
    state: list[Any]

    @property
    def forward(self) -> list[Any]:
        """The sums to which forwards add: the loss, then the state."""
        return [*self.loss, *self.state]


class MicrobatchSums:
    """The sums of all stages, as values of a graph; they start at zero.

    Args:
      graph: the graph that is written.
      placement: the stages, and where they run.
      stages: the stages.
      batch: the mini-batch.
      weights: the weights, as values.

    Attributes:
      grad_shardings: for each stage, the shardings of its gradient sums.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        placement: StagePlacement,
        stages: Stages,
        batch: Batch,
        weights: Values,
    ) -> None:
        self._graph = graph
        self._placement = placement
        self._stages = stages
        self._batch = batch
        self._is_mapped = batch.num_shards > 1
        stage_indices = range(stages.num_stages)
        self.grad_shardings = [
            self._shardings_of_grads(s, weights) for s in stage_indices
        ]
        # for each stage, the specs of its sums
        self._specs = [self._specs_of_stage(s, weights) for s in stage_indices]
        # (stage, place) -> the sums over the micro-batches of the stage that run there
        self._sums: dict[tuple[int, Place], StageSums] = {}
        # (stage, size of the micro-batch) -> the addition to its forward sums
        self._accumulations: dict[tuple[int, int], Accumulation] = {}
        # (stage, size of the micro-batch) -> see `_find_outer_terms`
        self._outer_terms: dict[tuple[int, int], list[Any]] = {}
        self._write_zeros()

    def of_places(self, stage: int) -> list[StageSums]:
        """The sums of each place that runs a stage."""
        return [self._sums[stage, x] for x in self._placement.places_of(stage)]

    # ------------------------------------------------------------------- gradient sums

    def grad_sums(self, stage: int, m: int) -> Values:
        """The sums to which a backward adds the gradients of weights."""
        return self._sums[stage, self._placement.place_of(stage, m)].grads

    def keep_grad_sums(self, stage: int, m: int, sums: Values) -> None:
        """Keeps the sums that a backward returns."""
        key = stage, self._placement.place_of(stage, m)
        self._sums[key] = self._sums[key]._replace(grads=sums)

    # -------------------------------------------------------------------- forward sums

    def num_forward_sums(self, stage: int) -> int:
        """The number of sums to which forwards add."""
        return len(self._specs[stage].forward)

    def accumulation(self, stage: int, m: int) -> Accumulation | None:
        """The addition that runs behind a forward; ``None`` if it adds to no sum."""
        if not self.num_forward_sums(stage):
            return None
        key = stage, self._batch.sizes[m]
        if key not in self._accumulations:
            self._accumulations[key] = self._trace_accumulation(stage, m)
        return self._accumulations[key]

    def _find_outer_terms(self, stage: int, m: int) -> list[Any]:
        """The terms of forward sums that the forward neither reads nor computes.

        They are constants, weights of other stages, and the like.
        """
        key = stage, self._batch.sizes[m]
        if key not in self._outer_terms:
            terms = self._terms(stage, m)
            args = self._args_of_terms(stage, m)
            pairs = zip(terms, args, strict=True)
            self._outer_terms[key] = [term for term, arg in pairs if arg is None]
        return self._outer_terms[key]

    def accumulation_operands(
        self, stage: int, m: int, result_value: Callable[[Any, int], Value]
    ) -> Values:
        """The operands of `StageFunctions.forward_adding` behind the inputs.

        Args:
          stage: the stage.
          m: the micro-batch.
          result_value: ``(result of the function, micro-batch) -> its value``.
        """
        place = self._placement.place_of(stage, m)
        operands = [*self._sums[stage, place].forward]
        for term in self._find_outer_terms(stage, m):
            operands.append(result_value(term, m))
        if self._stages.states[stage].has_means:
            operands.append(self._share(m, place))
        return operands

    def keep_forward_sums(self, stage: int, m: int, sums: Values) -> None:
        """Keeps the sums that a forward returns."""
        key = stage, self._placement.place_of(stage, m)
        num_losses = len(self._specs[stage].loss)
        self._sums[key] = self._sums[key]._replace(
            loss=sums[:num_losses], state=sums[num_losses:]
        )

    def _terms(self, stage: int, m: int) -> list[Any]:
        """The results of the function that a forward adds: the loss, then the state."""
        traced = self._stages.traced(m)
        losses = traced.loss if self._specs[stage].loss else []
        state = [traced.aux_vars[i] for i in self._stages.states[stage].aux_indices]
        return [*losses, *state]

    def _args_of_terms(self, stage: int, m: int) -> list[ArgumentOrResult | None]:
        """For each term the operand or the result of the forward that it is, if any."""
        # variable of the stage -> the operand or the result of the forward that it is
        forward_values = dict[core.Var, ArgumentOrResult]()
        stage_slice = self._stages.slice_of(stage, m)
        for i, var in enumerate(stage_slice.closed.jaxpr.invars):
            forward_values[var] = Argument(i)
        for i, var in enumerate(stage_slice.outputs):
            forward_values[var] = Result(i)

        args = list[ArgumentOrResult | None]()
        for term in self._terms(stage, m):
            is_literal = isinstance(term, core.Literal)
            args.append(None if is_literal else forward_values.get(term))
        return args

    def _trace_accumulation(self, stage: int, m: int) -> Accumulation:
        """Traces ``(sums, terms, share of the examples) -> sums``."""
        state = self._stages.states[stage]
        sum_specs = self._specs[stage].forward
        num_losses = len(self._specs[stage].loss)
        terms = self._terms(stage, m)

        def add(sums: list[Any], terms: list[Any], share: list[Any]) -> list[Any]:
            losses = accumulate(sums[:num_losses], terms[:num_losses])
            return [
                *losses,
                *state.add(sums[num_losses:], terms[num_losses:], *share),
            ]

        share_spec = jax.ShapeDtypeStruct((), jnp.result_type(float))
        share_specs = [share_spec] if state.has_means else []
        closed, _ = _inlining.trace(
            add, sum_specs, [_spec_of_term(term) for term in terms], share_specs
        )

        args: list[ArgumentOrResult | None] = [None] * len(sum_specs)
        args += self._args_of_terms(stage, m)
        args += [None] * len(share_specs)
        return Accumulation(closed, args)

    def _share(self, m: int, place: Place) -> Value:
        """The share of the examples that one shard of a micro-batch has."""
        sizes = self._batch.sizes
        share = sizes[m] / sum(sizes) / self._batch.num_shards
        return self._graph.constant(np.asarray(share, jnp.result_type(float)), place)

    # --------------------------------------------------------------------------- zeros

    def _specs_of_stage(self, stage: int, weights: Values) -> StageSums:
        """Specs of the sums of a stage."""
        trained = self._stages.trained_weights(stage)
        is_last = stage == self._stages.num_stages - 1
        losses = self._stages.traced().loss if is_last else []
        return StageSums(
            grads=[sum_spec(self._graph.specs[weights[i]]) for i in trained],
            loss=[sum_spec(loss.aval) for loss in losses],
            state=self._stages.states[stage].sum_specs,
        )

    def _shardings_of_grads(self, stage: int, weights: Values) -> list[Sharding]:
        """The shardings of the gradient sums of a stage: those of their weights."""
        shardings = list[Sharding]()
        for i in self._stages.trained_weights(stage):
            weight_sharding = self._graph.shardings[weights[i]].gathered()
            shardings.append(weight_sharding._replace(stacked=self._is_mapped))
        return shardings

    def _write_zeros(self) -> None:
        """Starts all sums at zero, those of a place with one call."""
        stages_of_place = dict[Place, list[int]]()
        for s in range(self._stages.num_stages):
            for place in self._placement.places_of(s):
                stages_of_place.setdefault(place, []).append(s)

        for place, stages in stages_of_place.items():
            shardings = list[Sharding]()
            for s in stages:
                shardings += self.grad_shardings[s]
                forward_sharding = Sharding(stacked=self._is_mapped)
                shardings += [forward_sharding] * self.num_forward_sums(s)
            specs, tree = jax.tree.flatten([self._specs[s] for s in stages])
            zeros = tree.unflatten(self._zeros(place, specs, shardings))
            for s, sums in zip(stages, zeros, strict=True):
                self._sums[s, place] = sums

    def _zeros(
        self, place: Place, specs: Sequence[Any], shardings: Sequence[Sharding]
    ) -> Values:
        """Arrays of zeros in a place, of each of its shards if these run apart."""
        if not specs:
            return []

        def zeros() -> list[Any]:
            return [jnp.zeros(spec.shape, spec.dtype) for spec in specs]

        return self._graph.call(
            Computation("zeros", zeros, specs),
            place,
            [],
            mapped=self._is_mapped,
            shardings=shardings,
        )


def _spec_of_term(atom: Any) -> Any:
    """The spec of a result of the function, as a value of the graph."""
    is_literal = isinstance(atom, core.Literal)
    return _jaxpr.spec(np.asarray(atom.val) if is_literal else atom.aval)

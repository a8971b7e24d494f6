"""All stages of a function on micro-batches of all sizes, and what they share.

Micro-batches of a mini-batch have two sizes at most; the function is traced and sliced
for each. The *weights* of stages have the same indices in all traces: the parameters
come first, and after them the values of the prologue.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend import core

from .._jaxprs import _jaxpr, _structural_key
from .._jaxprs._computation import Computation
from .._jaxprs._jaxpr import specs
from .._partition import _remat
from .._trace._state_updates import StateUpdate
from .._trace._traced_function import OTHER_READS, TracedFunction
from ._residuals import Residuals
from ._slicing import differentiated_vars, prologue_jaxpr, slice_stages
from ._stage import Stage

# The index of a parameter; or of a value of the prologue, counted after these.
WeightIndex = int


class Stages:
    """The stages of a traced function.

    Args:
      programs: size of a micro-batch -> the function traced on it; that of the first
        micro-batch comes first.
      cuts: size of a micro-batch -> the index of the first equation of each stage but
        the first.
      sizes: the size of each micro-batch.
      remat: the remat setting of each stage.
      trained: one bool per parameter; True if it has a gradient. Arrays that the
        function closes over come after these and have none.
      owner_stages: the owner stages of the first parameters, if these are decided.
      state: the leaves that the function writes.

    Attributes:
      first: the function traced on the first micro-batch.
      trained: one bool per weight, parameters first; True if it has a gradient.
      states: the leaves that each stage writes.
      prologue: the jaxpr of the prologue, ``params -> values``.
      owner_stages: the first stage that reads each weight.
      divides: True if backwards of a weighted loss divide by the sum of all weights.
    """

    def __init__(
        self,
        *,
        programs: Mapping[int, TracedFunction],
        cuts: Mapping[int, Sequence[int]],
        sizes: Sequence[int],
        remat: Sequence[Any],
        trained: Sequence[bool],
        owner_stages: Sequence[int] = (),
        state: StateUpdate | None = None,
    ) -> None:
        self._traced = programs
        self._sizes = sizes
        self._remat = remat
        self.first = next(iter(programs.values()))
        num_constants = self.first.num_params - len(trained)
        self.trained = [*trained, *[False] * num_constants]

        # size of a micro-batch -> differentiated variables, stages and prologue
        self._differentiated: dict[int, set[core.Var]] = {}
        self._stages: dict[int, list[Stage]] = {}
        prologues: dict[int, core.ClosedJaxpr] = {}
        for size, traced in programs.items():
            differentiated = differentiated_vars(traced, self.trained)
            self._differentiated[size] = differentiated
            self._stages[size] = slice_stages(
                traced,
                cuts[size],
                differentiated=differentiated,
                trained_params=self._trained_params(traced),
            )
            prologues[size] = prologue_jaxpr(traced, self._stages[size])
        self.prologue = prologues[sizes[0]]
        # size of a micro-batch -> the weights that each stage reads
        self._weights: dict[int, list[list[WeightIndex]]] = {
            size: self._weights_of_stages(size, prologue)
            for size, prologue in prologues.items()
        }
        self._check_equal_reads(prologues)

        self.trained += [
            not isinstance(value, core.Literal)
            and value in self._differentiated[sizes[0]]
            for value in self.prologue.jaxpr.outvars
        ]
        first_readers = self._first_readers()
        self.owner_stages = [*owner_stages, *first_readers[len(owner_stages) :]]
        self.states = self._state_of_stages(state or StateUpdate())
        # (stage, size of the micro-batch) -> key of its jaxpr
        self._jaxpr_keys: dict[tuple[int, int], Hashable] = {}
        # (stage, size, remat mode) -> the stage
        self._in_mode: dict[tuple[int, int, Any], Stage] = {}
        # (key of the operations, remat mode) -> the first of equal stages
        self._distinct: dict[Hashable, Stage] = {}
        # key of the jaxpr of a stage -> its forward, without residuals
        self._forwards: dict[Hashable, Computation] = {}
        # size of a micro-batch -> ``batch_inputs -> loss weight``
        self._loss_weights: dict[int, Computation | None] = {}
        if self.first.is_weighted:
            self._loss_weights = {n: self._loss_weight_of(n) for n in programs}
        self.has_loss_divisor = (
            self.first.is_weighted and None not in self._loss_weights.values()
        )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._remat)

    @property
    def _last(self) -> int:
        return self.num_stages - 1

    def part(self, stage_index: int, microbatch: int = 0) -> Stage:
        """The slice that a stage computes on a micro-batch, in no remat mode yet."""
        return self._stages[self._sizes[microbatch]][stage_index]

    def traced(self, microbatch: int) -> TracedFunction:
        """The function, traced on a micro-batch."""
        return self._traced[self._sizes[microbatch]]

    def weights(self, stage_index: int, microbatch: int = 0) -> list[WeightIndex]:
        """The weights that a stage reads, in the order of `Stage.weights`."""
        return self._weights[self._sizes[microbatch]][stage_index]

    def weights_on(self, stage_index: int) -> list[WeightIndex]:
        """The weights that a stage reads, and those that it owns though nobody does."""
        owned = [i for i, owner in enumerate(self.owner_stages) if owner == stage_index]
        return [*dict.fromkeys([*self.weights(stage_index), *owned])]

    def params_of(self, stage_index: int) -> set[int]:
        """The parameters that a stage reads, itself or by values of the prologue."""
        num_params = self.first.num_params
        params = set[int]()
        for weight in self.weights(stage_index):
            if weight < num_params:
                params.add(weight)
            else:
                params.update(_read_params(self.prologue, weight - num_params))
        return params

    def spec_of(self, weight: WeightIndex) -> Any:
        """The spec of a weight."""
        weight_vars = [*self.first.params, *self.prologue.jaxpr.outvars]
        return _jaxpr.spec(weight_vars[weight].aval)

    def trained_weights(self, stage_index: int) -> list[WeightIndex]:
        """The weights that a stage reads and that have a gradient."""
        return [i for i in self.weights(stage_index) if self.trained[i]]

    def structural_key(self, stage_index: int, microbatch: int = 0) -> Hashable:
        """A key that is equal for stages whose forwards and backwards are the same."""
        stage = self.part(stage_index, microbatch)
        jaxpr_key = self._jaxpr_key(stage_index, self._sizes[microbatch])
        is_last = stage_index == self._last
        return jaxpr_key, is_last, stage.num_trained, stage.num_differentiated

    def has_gradient(self, var: core.Var, microbatch: int) -> bool:
        """True if an activation has a cotangent."""
        return var in self._differentiated[self._sizes[microbatch]]

    def mode(self, stage_index: int, microbatch: int) -> Any:
        """The remat mode of a stage on a micro-batch."""
        return _remat.mode(self._remat[stage_index], microbatch, len(self._sizes))

    def functions(self, stage_index: int, microbatch: int, mode: Any) -> Stage:
        """The stage in a remat mode; of equal stages the first."""
        key = stage_index, self._sizes[microbatch], mode
        if key not in self._in_mode:
            self._in_mode[key] = self._distinct_stage(stage_index, microbatch, mode)
        return self._in_mode[key]

    def forward(self, stage_index: int, microbatch: int) -> Computation:
        """The forward of a stage alone, without residuals."""
        key = self._jaxpr_key(stage_index, self._sizes[microbatch])
        if key not in self._forwards:
            closed = self.part(stage_index, microbatch).closed
            self._forwards[key] = Computation.of("forward", closed)
        return self._forwards[key]

    def residuals(self, stage_index: int) -> Residuals:
        """The residuals of the first micro-batch in a stage."""
        return self.functions(stage_index, 0, self.mode(stage_index, 0)).stored

    def does(self, stage_index: int, microbatch: int, weights_only: bool) -> bool:
        """True if a backward has anything to compute.

        Args:
          stage_index: the index of the stage.
          microbatch: the index of the micro-batch.
          weights_only: True for the half that computes gradients of weights.
        """
        stage = self.part(stage_index, microbatch)
        return stage.num_trained > 0 if weights_only else stage.has_backward

    def loss_weight(self, microbatch: int) -> Computation | None:
        """``batch_inputs of the last stage -> loss weight`` of a weighted loss.

        ``None`` if the weight follows from more than these.
        """
        return self._loss_weights[self._sizes[microbatch]]

    # ----------------------------------------------------------- what the traces share

    def _trained_params(self, traced: TracedFunction) -> set[core.Var]:
        params = zip(traced.params, self.trained, strict=True)
        return {param for param, is_trained in params if is_trained}

    def _weights_of_stages(
        self, size: int, prologue: core.ClosedJaxpr
    ) -> list[list[WeightIndex]]:
        """The weights that each stage reads, in the trace of one size."""
        weight_vars = [*self._traced[size].params, *prologue.jaxpr.outvars]
        weight_index = {
            var: index
            for index, var in enumerate(weight_vars)
            if not isinstance(var, core.Literal)
        }
        indices = list[list[WeightIndex]]()
        for stage in self._stages[size]:
            indices.append([weight_index[var] for var in stage.weights])
        return indices

    def _check_equal_reads(self, prologues: Mapping[int, core.ClosedJaxpr]) -> None:
        """Checks that stages read the same weights and leaves in all traces."""
        first_size = self._sizes[0]
        for size, prologue in prologues.items():
            has_equal_values = _values(prologue) == _values(prologues[first_size])
            has_equal_weights = self._weights[size] == self._weights[first_size]
            has_equal_leaves = self._read_leaves(size) == self._read_leaves(first_size)
            if not (has_equal_values and has_equal_weights and has_equal_leaves):
                raise ValueError(OTHER_READS)

    def _read_leaves(self, size: int) -> list[list[int]]:
        """The indices of the leaves of a micro-batch that each stage reads."""
        leaves = self._traced[size].batch_inputs
        indices = list[list[int]]()
        for stage in self._stages[size]:
            indices.append([leaves.index(var) for var in stage.batch_inputs])
        return indices

    def _state_of_stages(self, state: StateUpdate) -> list[StateUpdate]:
        """The leaves that each stage writes; the last has those that none computes."""
        # variable -> the stage that computes it
        writer: dict[core.Var, int] = {}
        for index, stage in enumerate(self._stages[self._sizes[0]]):
            writer |= dict.fromkeys([*stage.leaves, *stage.aux], index)
        writers = list[int]()
        for leaf in state.aux_indices:
            var = self.first.aux_vars[leaf]
            is_literal = isinstance(var, core.Literal)
            writers.append(self._last if is_literal else writer.get(var, self._last))
        return state.of_stages(writers, self.num_stages)

    def _first_readers(self) -> list[int]:
        """The first stage that reads each weight, directly or by the prologue."""
        num_params = self.first.num_params
        num_weights = num_params + len(self.prologue.jaxpr.outvars)
        readers: dict[WeightIndex, int] = {}
        for stage_index in range(self.num_stages):
            for weight in self.weights(stage_index):
                readers.setdefault(weight, stage_index)
        for index in range(len(self.prologue.jaxpr.outvars)):
            reader = readers.get(num_params + index, self._last)
            for param in _read_params(self.prologue, index):
                readers.setdefault(param, reader)
        if self.first.penalty:  # the penalty, which is added to the loss
            readers[num_weights - 1] = self._last
        return [readers.get(weight, 0) for weight in range(num_weights)]

    # -------------------------------------------------------------------- equal stages

    def _jaxpr_key(self, stage_index: int, size: int) -> Hashable:
        """A key that is equal for stages whose jaxprs compute the same."""
        if (stage_index, size) not in self._jaxpr_keys:
            stage = self._stages[size][stage_index]
            self._jaxpr_keys[stage_index, size] = (
                len(stage.weights),
                len(stage.input_activations),
                len(stage.inputs),
                len(stage.side_inputs),
                len(stage.leaves),
                *_structural_key.structural_key(stage.closed),
            )
        return self._jaxpr_keys[stage_index, size]

    def _distinct_stage(self, stage_index: int, microbatch: int, mode: Any) -> Stage:
        key = self.structural_key(stage_index, microbatch), mode
        if key not in self._distinct:
            divisors = None
            if self.first.has_loss and stage_index == self._last:
                divisors = specs(self.first.weight if self.has_loss_divisor else [])
            stage = self.part(stage_index, microbatch)
            self._distinct[key] = replace(stage, mode=mode, divisors=divisors)
        return self._distinct[key]

    def _loss_weight_of(self, size: int) -> Computation | None:
        traced = self._traced[size]
        batch_inputs = self._stages[size][-1].batch_inputs
        closed = _jaxpr.dce_jaxpr(traced.closed, traced.weight)
        inputs = zip(closed.jaxpr.invars, _jaxpr.used_inputs(closed), strict=True)
        used_inputs = {var for var, is_used in inputs if is_used}
        if not used_inputs <= set(batch_inputs):
            return None
        jaxpr = closed.jaxpr.replace(invars=batch_inputs)
        return Computation.of("weight", core.ClosedJaxpr(jaxpr, closed.consts))


def _read_params(prologue: core.ClosedJaxpr, value_index: int) -> list[int]:
    """The parameters from which a value of the prologue follows."""
    value = prologue.jaxpr.outvars[value_index]
    return [i for i, is_read in enumerate(_is_param_read(prologue, value)) if is_read]


def _is_param_read(prologue: core.ClosedJaxpr, value: Any) -> list[bool]:
    return _jaxpr.used_inputs(_jaxpr.dce_jaxpr(prologue, [value]))


def _values(prologue: core.ClosedJaxpr) -> list[tuple[Any, list[bool]]]:
    """The aval of each value of the prologue, and if it follows from each parameter."""
    values = prologue.jaxpr.outvars
    return [(value.aval, _is_param_read(prologue, value)) for value in values]


def make_prologue_vjp(
    prologue: core.ClosedJaxpr, trained: Sequence[bool], has_cotangent: Sequence[bool]
) -> Any:
    """``(params, cotangents) -> gradients``, the backward of the prologue.

    Args:
      prologue: ``params -> values``.
      trained: one bool per parameter; True if it has a gradient.
      has_cotangent: one bool per value; True if it has a cotangent.
    """

    def pull(params: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def differentiated_values(trained_params: Sequence[Any]) -> list[Any]:
            all_params = _jaxpr.replace_leaves(params, trained_params, trained)
            values = core.jaxpr_as_fun(prologue)(*all_params)
            return list(itertools.compress(values, has_cotangent))

        trained_params = list(itertools.compress(params, trained))
        _, pullback = jax.vjp(differentiated_values, trained_params)
        return pullback(list(cotangents))[0]

    return pull

"""All stages of a function on micro-batches of all sizes, and what they share.

Micro-batches of a mini-batch have two sizes at most; the function is traced and sliced
for each. The *weights* of stages have the same indices in all traces: the parameters
come first, and after them the values of the prologue.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core

from .._jaxprs import _jaxpr, _structural_key
from .._jaxprs._computation import Computation
from .._jaxprs._jaxpr import specs
from .._partition._remat import RematSetting
from .._partition._remat_mode import RematMode
from .._trace._state_updates import StateUpdate
from .._trace._traced_function import READS_DEPEND_ON_SIZE, TracedFunction
from ._residuals import Residuals
from ._slicing import differentiated_vars, prologue_jaxpr, slice_stages
from ._stage_functions import StageFunctions
from ._stage_slice import StageSlice

# The index of a parameter; or of a value of the prologue, counted after these.
WeightIndex = int


@dataclass(frozen=True, eq=False)
class _SlicedFunction:
    """The function traced on micro-batches of one size, in slices.

    Attributes:
      traced: the function.
      differentiated: the variables that have a gradient: see `differentiated_vars`.
      slices: the slice of each stage.
      prologue: the jaxpr of the prologue, ``params -> values``.
    """

    traced: TracedFunction
    differentiated: set[core.Var]
    slices: list[StageSlice]
    prologue: core.ClosedJaxpr

    @cached_property
    def weights(self) -> list[list[WeightIndex]]:
        """The weights that each stage reads."""
        weight_vars = [*self.traced.params, *self.prologue.jaxpr.outvars]
        weight_index = {
            var: index
            for index, var in enumerate(weight_vars)
            if not isinstance(var, core.Literal)
        }
        indices = list[list[WeightIndex]]()
        for stage_slice in self.slices:
            indices.append([weight_index[var] for var in stage_slice.weights])
        return indices

    @cached_property
    def batch_indices(self) -> list[list[int]]:
        """The indices of the batch inputs that each stage reads."""
        batch_inputs = self.traced.batch_inputs
        indices = list[list[int]]()
        for stage_slice in self.slices:
            indices.append(
                [batch_inputs.index(var) for var in stage_slice.batch_inputs]
            )
        return indices

    @cached_property
    def weigh_loss(self) -> Computation | None:
        """``batch_inputs of the last stage -> loss weight`` of a weighted loss.

        ``None`` if the loss weight follows from more than these.
        """
        batch_inputs = self.slices[-1].batch_inputs
        closed = _jaxpr.dce_jaxpr(self.traced.closed, self.traced.loss_weight)
        inputs = zip(closed.jaxpr.invars, _jaxpr.used_inputs(closed), strict=True)
        used_inputs = {var for var, is_used in inputs if is_used}
        if not used_inputs <= set(batch_inputs):
            return None
        jaxpr = closed.jaxpr.replace(invars=batch_inputs)
        return Computation.from_jaxpr(
            "loss_weight", core.ClosedJaxpr(jaxpr, closed.consts)
        )


class Stages:
    """The stages of a traced function.

    Args:
      traced_functions: size of a micro-batch -> the function traced on it.
      stage_starts: size of a micro-batch -> the index of the first equation of each
        stage but the first.
      sizes: the size of each micro-batch.
      remat: the remat setting of each stage.
      trained: one bool per parameter; True if it has a gradient. Arrays that the
        function closes over come after these and have none.
      owner_stages: the owner stages of the first parameters, if these are decided.
      state: the leaves that the function writes.

    Attributes:
      trained: one bool per weight, parameters first; True if it has a gradient.
      states: the leaves that each stage writes.
      prologue: the jaxpr of the prologue, ``params -> values``.
      owner_stages: the first stage that reads each weight.
      has_loss_divisor: True if backwards of a weighted loss divide by the sum of all
        loss weights.
    """

    def __init__(
        self,
        *,
        traced_functions: Mapping[int, TracedFunction],
        stage_starts: Mapping[int, Sequence[int]],
        sizes: Sequence[int],
        remat: Sequence[RematSetting],
        trained: Sequence[bool],
        owner_stages: Sequence[int] = (),
        state: StateUpdate | None = None,
    ) -> None:
        self._sizes = sizes
        self._remat = remat
        num_constants = traced_functions[sizes[0]].num_params - len(trained)
        self.trained = [*trained, *[False] * num_constants]

        # size of a micro-batch -> the function in slices
        self._sliced: dict[int, _SlicedFunction] = {}
        for size, traced in traced_functions.items():
            self._sliced[size] = self._slice(traced, stage_starts[size])
        first = self._sliced[sizes[0]]
        self.prologue = first.prologue
        self._check_equal_reads()

        self.trained += [
            not isinstance(value, core.Literal) and value in first.differentiated
            for value in self.prologue.jaxpr.outvars
        ]
        first_readers = self._first_readers()
        self.owner_stages = [*owner_stages, *first_readers[len(owner_stages) :]]
        self.states = self._state_of_stages(state or StateUpdate())
        self.has_loss_divisor = first.traced.is_weighted and all(
            sliced.weigh_loss is not None for sliced in self._sliced.values()
        )
        # (stage, size of the micro-batch, remat mode) -> its functions
        self._functions: dict[tuple[int, int, RematMode], StageFunctions] = {}
        # (key of equal stages, remat mode) -> the functions of the first of them
        self._distinct_functions: dict[Hashable, StageFunctions] = {}
        # (stage, size of the micro-batch) -> key of its jaxpr
        self._jaxpr_keys: dict[tuple[int, int], Hashable] = {}
        # key of the jaxpr of a stage -> its forward, without residuals
        self._forwards: dict[Hashable, Computation] = {}

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._remat)

    @property
    def _last(self) -> int:
        return self.num_stages - 1

    def traced(self, microbatch: int = 0) -> TracedFunction:
        """The function, traced on a micro-batch."""
        return self._sliced[self._sizes[microbatch]].traced

    def slice_of(self, stage_index: int, microbatch: int = 0) -> StageSlice:
        """The slice that a stage computes on a micro-batch."""
        return self._sliced[self._sizes[microbatch]].slices[stage_index]

    def weights(self, stage_index: int, microbatch: int = 0) -> list[WeightIndex]:
        """The weights that a stage reads, in the order of `StageSlice.weights`."""
        return self._sliced[self._sizes[microbatch]].weights[stage_index]

    def weights_on(self, stage_index: int) -> list[WeightIndex]:
        """The weights that a stage reads, and those that it owns though nobody does."""
        owned = [i for i, owner in enumerate(self.owner_stages) if owner == stage_index]
        return [*dict.fromkeys([*self.weights(stage_index), *owned])]

    def params_of(self, stage_index: int) -> set[int]:
        """The parameters that a stage reads, itself or by values of the prologue."""
        num_params = self.traced().num_params
        params = set[int]()
        for weight in self.weights(stage_index):
            if weight < num_params:
                params.add(weight)
            else:
                params.update(_read_params(self.prologue, weight - num_params))
        return params

    def spec_of(self, weight: WeightIndex) -> Any:
        """The spec of a weight."""
        weight_vars = [*self.traced().params, *self.prologue.jaxpr.outvars]
        return _jaxpr.spec(weight_vars[weight].aval)

    def trained_weights(self, stage_index: int) -> list[WeightIndex]:
        """The weights that a stage reads and that have a gradient."""
        return [i for i in self.weights(stage_index) if self.trained[i]]

    def structural_key(self, stage_index: int, microbatch: int = 0) -> Hashable:
        """A key that is equal for stages whose forwards and backwards are the same."""
        stage_slice = self.slice_of(stage_index, microbatch)
        return (
            self._jaxpr_key(stage_index, microbatch),
            stage_index == self._last,
            stage_slice.num_trained,
            stage_slice.num_input_grads,
        )

    def has_gradient(self, var: core.Var, microbatch: int) -> bool:
        """True if an activation has a cotangent."""
        return var in self._sliced[self._sizes[microbatch]].differentiated

    def mode(self, stage_index: int, microbatch: int) -> RematMode:
        """The remat mode of a stage on a micro-batch."""
        return self._remat[stage_index].mode_of(microbatch, len(self._sizes))

    def functions(self, stage_index: int, microbatch: int, mode: Any) -> StageFunctions:
        """The functions of a stage in a remat mode; of equal stages the first's."""
        key = stage_index, self._sizes[microbatch], mode
        if key not in self._functions:
            self._functions[key] = self._find_functions(stage_index, microbatch, mode)
        return self._functions[key]

    def forward(self, stage_index: int, microbatch: int) -> Computation:
        """The forward of a stage alone, without residuals."""
        key = self._jaxpr_key(stage_index, microbatch)
        if key not in self._forwards:
            closed = self.slice_of(stage_index, microbatch).closed
            self._forwards[key] = Computation.from_jaxpr("forward", closed)
        return self._forwards[key]

    def residuals(self, stage_index: int) -> Residuals:
        """The residuals of the first micro-batch in a stage."""
        return self.functions(stage_index, 0, self.mode(stage_index, 0)).residuals

    def weigh_loss(self, microbatch: int) -> Computation | None:
        """``batch_inputs of the last stage -> loss weight`` of a weighted loss.

        ``None`` if the loss weight follows from more than these.
        """
        return self._sliced[self._sizes[microbatch]].weigh_loss

    # ----------------------------------------------------------- what the traces share

    def _slice(
        self, traced: TracedFunction, stage_starts: Sequence[int]
    ) -> _SlicedFunction:
        """Slices the function that was traced on one size."""
        params = zip(traced.params, self.trained, strict=True)
        differentiated = differentiated_vars(traced, self.trained)
        slices = slice_stages(
            traced,
            stage_starts,
            differentiated=differentiated,
            trained_params={param for param, is_trained in params if is_trained},
        )
        prologue = prologue_jaxpr(traced, slices)
        return _SlicedFunction(traced, differentiated, slices, prologue)

    def _check_equal_reads(self) -> None:
        """Checks that stages read the same weights and leaves in all traces."""
        first = self._sliced[self._sizes[0]]
        for sliced in self._sliced.values():
            has_equal_values = _values(sliced.prologue) == _values(first.prologue)
            has_equal_weights = sliced.weights == first.weights
            has_equal_leaves = sliced.batch_indices == first.batch_indices
            if not (has_equal_values and has_equal_weights and has_equal_leaves):
                raise ValueError(READS_DEPEND_ON_SIZE)

    def _state_of_stages(self, state: StateUpdate) -> list[StateUpdate]:
        """The leaves that each stage writes; the last has those that none computes."""
        # variable -> the stage that computes it
        writer: dict[core.Var, int] = {}
        for index in range(self.num_stages):
            writer |= dict.fromkeys(self.slice_of(index).outputs, index)
        writers = list[int]()
        for leaf in state.aux_indices:
            var = self.traced().aux_vars[leaf]
            is_literal = isinstance(var, core.Literal)
            writers.append(self._last if is_literal else writer.get(var, self._last))
        return state.of_stages(writers, self.num_stages)

    def _first_readers(self) -> list[int]:
        """The first stage that reads each weight, directly or by the prologue."""
        num_params = self.traced().num_params
        num_weights = num_params + len(self.prologue.jaxpr.outvars)
        readers: dict[WeightIndex, int] = {}
        for stage_index in range(self.num_stages):
            for weight in self.weights(stage_index):
                readers.setdefault(weight, stage_index)
        for index in range(len(self.prologue.jaxpr.outvars)):
            reader = readers.get(num_params + index, self._last)
            for param in _read_params(self.prologue, index):
                readers.setdefault(param, reader)
        if self.traced().penalty:  # the penalty, which is added to the loss
            readers[num_weights - 1] = self._last
        return [readers.get(weight, 0) for weight in range(num_weights)]

    # -------------------------------------------------------------------- equal stages

    def _jaxpr_key(self, stage_index: int, microbatch: int) -> Hashable:
        """A key that is equal for stages whose jaxprs compute the same."""
        key = stage_index, self._sizes[microbatch]
        if key not in self._jaxpr_keys:
            stage_slice = self.slice_of(stage_index, microbatch)
            self._jaxpr_keys[key] = (
                len(stage_slice.weights),
                len(stage_slice.input_activations),
                len(stage_slice.model_inputs),
                len(stage_slice.side_inputs),
                len(stage_slice.differentiated_outputs),
                *_structural_key.structural_key(stage_slice.closed),
            )
        return self._jaxpr_keys[key]

    def _find_functions(
        self, stage_index: int, microbatch: int, mode: RematMode
    ) -> StageFunctions:
        """Finds the functions of an equal stage, or makes them."""
        key = self.structural_key(stage_index, microbatch), mode
        if key not in self._distinct_functions:
            loss_weight = self.traced().loss_weight if self.has_loss_divisor else []
            self._distinct_functions[key] = StageFunctions(
                self.slice_of(stage_index, microbatch),
                mode=mode,
                is_loss=self.traced().has_loss and stage_index == self._last,
                divisors=specs(loss_weight),
            )
        return self._distinct_functions[key]


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

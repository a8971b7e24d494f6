"""Slices a traced function into stages, by who reads which variable.

    equations:  e0 e1 | c0 e2 e3 | e4 e5 o0       stage_starts = [2, 5]
    stages:     e0 e1 | c0 e2 e3 | c0 e4 e5       c0 is cheap: each reader has a copy
    prologue:   o0                                from parameters, once per step

The index of an equation tells its stage. A cheap equation is copied into each stage
that reads it. An equation that runs once per step is in no stage: its results are
weights, as parameters are. The variables that the equations of a stage read and do not
compute become its inputs: weights, activations of earlier stages, and batch inputs.
Equations that no result needs are in no stage.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._jaxprs import _dataflow, _jaxpr
from .._trace._boundaries import is_mark
from .._trace._traced_function import EqnKind, TracedFunction
from ._stage_slice import StageSlice


def slice_stages(
    traced: TracedFunction,
    stage_starts: Sequence[int],
    *,
    differentiated: set[core.Var],
    trained_params: set[core.Var],
) -> list[StageSlice]:
    """The stages, in order; the last one computes the loss.

    Args:
      traced: the traced function.
      stage_starts: the index of the first equation of each stage but the first.
      differentiated: the variables that have a gradient: see `differentiated_vars`.
      trained_params: the parameters that have one, zero though it may be.
    """
    slicer = _Slicer(
        traced,
        stage_starts,
        differentiated=differentiated,
        trained_params=trained_params,
    )
    return slicer.stages()


class _EqnSlice(NamedTuple):
    """The equations of one stage.

    Attributes:
      eqns: the equations, copies included, in order.
      invars: the variables that they read and do not compute; keys of a dict, in
        order.
    """

    eqns: list[core.JaxprEqn]
    invars: dict[core.Var, None]


class _Slicer:
    """The slicing of one traced function: see `slice_stages`."""

    def __init__(
        self,
        traced: TracedFunction,
        stage_starts: Sequence[int],
        *,
        differentiated: set[core.Var],
        trained_params: set[core.Var],
    ) -> None:
        jaxpr = traced.closed.jaxpr
        self._traced = traced
        self._differentiated = differentiated
        self._trained = trained_params | differentiated.difference(traced.params)
        self._num_stages = len(stage_starts) + 1
        self._consts = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))

        # equation index -> its stage; ``None`` if it is copied, or in no stage
        self._eqn_stages = _assign_equations(traced, stage_starts)
        # variable -> the one stage that computes it
        self._stage_of: dict[core.Var, int] = {}
        for var, eqn_index in traced.producer.items():
            stage_index = self._eqn_stages[eqn_index]
            if stage_index is not None:
                self._stage_of[var] = stage_index

        params = set(traced.params)
        results = [var for var in _variables(traced.outputs) if var not in params]
        self._results = list(dict.fromkeys(results))
        # result -> the one stage that returns it, where that is not the last
        self._stage_of_result = self._find_homes() | self._stage_of

    def _find_homes(self) -> dict[core.Var, int]:
        """New state that no single stage computes is made where the old is read.

        An example is the counter of a cache.
        """
        traced = self._traced
        homes: dict[core.Var, int] = {}
        for state_input in traced.state_inputs:
            new_value = traced.aux_vars[state_input.aux_index]
            old_value = traced.batch_inputs[state_input.batch_index]
            readers = [
                self._stage_of[var]
                for var in traced.descendants([old_value])
                if var in self._stage_of
            ]
            if readers and not isinstance(new_value, core.Literal):
                homes[new_value] = min(readers)
        return homes

    def stages(self) -> list[StageSlice]:
        """The stages, in order."""
        slices = [self._slice_equations(index) for index in range(self._num_stages)]
        return [self._make_slice(slices, index) for index in range(self._num_stages)]

    def _of_stage(
        self, variables: Iterable[core.Var], stage_index: int
    ) -> list[core.Var]:
        """The variables of a stage; those of no single stage are in the last.

        New state is at home.
        """
        last = self._num_stages - 1
        stage_of = self._stage_of_result
        return [v for v in variables if stage_of.get(v, last) == stage_index]

    def _slice_equations(self, stage_index: int) -> _EqnSlice:
        jaxpr = self._traced.closed.jaxpr
        needed = dict.fromkeys(self._of_stage(self._results, stage_index))
        eqns = list[core.JaxprEqn]()
        for eqn_index in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[eqn_index]
            is_in_stage = self._eqn_stages[eqn_index] == stage_index
            is_copy = self._traced.eqn_kinds[eqn_index] == EqnKind.COPY
            if is_in_stage or (is_copy and any(v in needed for v in eqn.outvars)):
                eqns.append(eqn)
                needed |= dict.fromkeys(_variables(eqn.invars))
        eqns.reverse()
        computed = set(_jaxpr.outvars_of(eqns))
        return _EqnSlice(eqns, {var: None for var in needed if var not in computed})

    def _make_slice(self, slices: Sequence[_EqnSlice], stage_index: int) -> StageSlice:
        traced = self._traced
        eqn_slice = slices[stage_index]
        invars = eqn_slice.invars

        activations = [var for var in invars if var in self._stage_of]
        batch_inputs = [var for var in traced.batch_inputs if var in invars]
        not_weights = {*self._stage_of, *traced.batch_inputs, *self._consts}
        weights = [var for var in invars if var not in not_weights]
        trained_weights, fixed_weights = _split_by(weights, self._trained)
        with_grad, without_grad = _split_by(activations, self._differentiated)
        model_inputs, side_inputs = _split_by(batch_inputs, traced.model_inputs)

        outputs, other_outputs = self._find_outputs(slices, stage_index)
        closed = self._make_jaxpr(
            eqn_slice,
            invars=[
                *trained_weights,
                *with_grad,
                *fixed_weights,
                *without_grad,
                *model_inputs,
                *side_inputs,
            ],
            outvars=[*outputs, *other_outputs],
        )
        return StageSlice(
            weight_vars=[*trained_weights, *fixed_weights],
            num_trained=len(trained_weights),
            input_activations=[*with_grad, *without_grad],
            num_input_grads=len(with_grad),
            model_inputs=model_inputs,
            side_inputs=side_inputs,
            differentiated_outputs=outputs,
            other_outputs=other_outputs,
            closed=closed,
        )

    def _find_outputs(
        self, slices: Sequence[_EqnSlice], stage_index: int
    ) -> tuple[list[core.Var], list[core.Var]]:
        """The variables that a stage returns: with a cotangent, and without."""
        read_elsewhere = set[core.Var]()
        for index, eqn_slice in enumerate(slices):
            if index != stage_index:
                read_elsewhere |= eqn_slice.invars.keys()
        activations = [
            var
            for var in _jaxpr.outvars_of(slices[stage_index].eqns)
            if self._stage_of.get(var) == stage_index and var in read_elsewhere
        ]

        ends = _variables(self._traced.ends)
        if not self._traced.loss:
            differentiated_ends = self._differentiated.intersection(ends)
            ends = [var for var in self._results if var in differentiated_ends]
        with_grad, without_grad = _split_by(activations, self._differentiated)
        outputs = dict.fromkeys([*self._of_stage(ends, stage_index), *with_grad])
        results = self._of_stage(self._results, stage_index)
        other_results = [var for var in results if var not in outputs]
        return [*outputs], [*dict.fromkeys([*without_grad, *other_results])]

    def _make_jaxpr(
        self, eqn_slice: _EqnSlice, invars: list[core.Var], outvars: list[core.Var]
    ) -> core.ClosedJaxpr:
        """The equations as a jaxpr, without boundary marks."""
        # marked value -> the same value before the mark
        unmarked: dict[core.Var, Any] = {}

        def unmark(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else unmarked.get(atom, atom)

        eqns = list[core.JaxprEqn]()
        for eqn in eqn_slice.eqns:
            if is_mark(eqn):
                unmarked[eqn.outvars[0]] = unmark(eqn.invars[0])
            elif unmarked.keys() & _jaxpr.variables(eqn.invars):
                eqns.append(eqn.replace(invars=[*map(unmark, eqn.invars)]))
            else:
                eqns.append(eqn)

        consts = {v: x for v, x in self._consts.items() if v in eqn_slice.invars}
        jaxpr = self._traced.closed.jaxpr.replace(
            constvars=[*consts],
            invars=invars,
            outvars=[*map(unmark, outvars)],
            eqns=eqns,
            effects=_jaxpr.effects_of(eqns),
        )
        return core.ClosedJaxpr(jaxpr, [*consts.values()])


def _assign_equations(
    traced: TracedFunction, stage_starts: Sequence[int]
) -> list[int | None]:
    """The stage of each equation; ``None`` for copies, and equations of no stage."""
    jaxpr = traced.closed.jaxpr
    needed_eqns = _jaxpr.dce_jaxpr(traced.closed, jaxpr.outvars).jaxpr.eqns
    needed = set(map(id, needed_eqns))
    stages = list[int | None]()
    for index, eqn in enumerate(jaxpr.eqns):
        is_in_stage = traced.eqn_kinds[index] == EqnKind.STAGE and id(eqn) in needed
        stages.append(bisect_right(stage_starts, index) if is_in_stage else None)
    return stages


def _variables(atoms: Iterable[Any]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _split_by(
    variables: Iterable[core.Var], chosen: Container[core.Var]
) -> tuple[list[core.Var], list[core.Var]]:
    """The variables that are chosen, and the variables that are not."""
    members = list[core.Var]()
    non_members = list[core.Var]()
    for var in variables:
        (members if var in chosen else non_members).append(var)
    return members, non_members


def differentiated_vars(
    traced: TracedFunction, trained: Sequence[bool]
) -> set[core.Var]:
    """The variables that follow from trained parameters and reach the loss.

    Without a loss, the variables that reach a result; with a tail, what it reads.

    Args:
      traced: the traced function.
      trained: one bool per parameter; True if it is trained.

    Raises:
      TypeError: if the weight of a weighted loss has a gradient.
    """
    jaxpr = traced.closed.jaxpr
    params = zip(traced.params, trained, strict=True)
    tangent = _dataflow.dependents(
        jaxpr,
        [param for param, is_trained in params if is_trained],
        differentiably=True,
    )
    if not tangent.isdisjoint(_jaxpr.variables(traced.loss_weight)):
        raise TypeError(
            "reduction='weighted': the weight follows from parameters, so that it has "
            "a gradient, which a pipeline would leave out: the gradient of a quotient "
            "needs both sums. Compute the weight of targets alone; to take it for a "
            "constant return (total, jax.lax.stop_gradient(weight))"
        )
    ends = [*traced.ends, *traced.once_results]
    return tangent & _jaxpr.ancestors(jaxpr, ends)


def prologue_jaxpr(
    traced: TracedFunction, stages: Sequence[StageSlice]
) -> core.ClosedJaxpr:
    """``params -> values`` that are computed once per step, for stages and the loss."""
    params = set(traced.params)
    values = dict[core.Var, None]()
    for stage in stages:
        values |= dict.fromkeys(var for var in stage.weight_vars if var not in params)
    outvars = [*values, *traced.once_results]
    jaxpr = traced.closed.jaxpr
    jaxpr = jaxpr.replace(
        invars=traced.params,
        outvars=outvars,
        eqns=_jaxpr.needed_eqns(jaxpr, outvars, stored=[]),
        effects=set(),
    )
    return core.ClosedJaxpr(jaxpr, traced.closed.consts)

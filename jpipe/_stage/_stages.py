"""All stages of a program on micro-batches of all sizes, and what they share."""

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
from ._slicing import once, slices, with_gradient
from ._stage import Stage

# A parameter by its number, or what follows from parameters once in a step, after them.
Weight = int


class Stages:
    """The slices of a program.

    Args:
      programs: by the sizes of micro-batches, the first first.
      cuts: where each is divided.
      sizes: of the micro-batches.
      remat: what each stage stores.
      trained: whether each parameter has a gradient.
      owner_stages: of the first parameters, where these are known.
      state: what the program writes.

    Attributes:
      first: the program of the first micro-batch.
      trained: one bool per weight, parameters first; True if it has a gradient.
      states: what each stage writes.
      once: ``params -> values`` that stages read and that are computed once in a step.
      owner_stages: of each weight the first stage that reads it.
      divides: whether backwards of a weighted loss divide by the sum of all weights.
    """

    def __init__(
        self,
        programs: Mapping[int, TracedFunction],
        cuts: Mapping[int, Sequence[int]],
        sizes: Sequence[int],
        remat: Sequence[Any],
        trained: Sequence[bool],
        owner_stages: Sequence[int] = (),
        state: StateUpdate | None = None,
    ) -> None:
        self._programs, self._sizes, self._remat = programs, sizes, remat
        self.first = next(iter(programs.values()))
        fixed = self.first.num_params - len(trained)
        self.trained = [*trained, *[False] * fixed]
        self._gradient = {
            n: with_gradient(one, self.trained) for n, one in programs.items()
        }
        self._slices = {
            n: slices(one, cuts[n], self._gradient[n], self._trained_params(one))
            for n, one in programs.items()
        }
        all_of_them = {n: once(one, self._slices[n]) for n, one in programs.items()}
        self.once = all_of_them[sizes[0]]
        self._number: dict[int, dict[core.Var, Weight]] = {}
        # By size and stage, what each reads that is the same for all micro-batches.
        self._weights: dict[int, list[list[Weight]]] = {}
        for size, program in programs.items():
            made = all_of_them[size]
            known = enumerate([*program.params, *made.jaxpr.outvars])
            self._number[size] = {
                var: i for i, var in known if not isinstance(var, core.Literal)
            }
            number = self._number[size]
            self._weights[size] = [
                [number[var] for var in part.weights] for part in self._slices[size]
            ]
            same = _reads(made) == _reads(self.once)
            if not same or self._all_reads(size) != self._all_reads(sizes[0]):
                raise ValueError(OTHER_READS)
        of_loss = self._gradient[sizes[0]]
        self.trained += [_is_in(v, of_loss) for v in self.once.jaxpr.outvars]
        self.owner_stages = [*owner_stages, *self._owners()[len(owner_stages) :]]
        self.states = self._states(state or StateUpdate())
        self._forms: dict[tuple[int, int], Hashable] = {}
        # By stage, size and mode; and by what equal ones have in common.
        self._functions: dict[Any, Stage] = {}
        self._distinct: dict[Any, Stage] = {}
        self._forwards: dict[Any, Computation] = {}
        # By the sizes of micro-batches, what gives the weight of a weighted loss.
        self._weight = {
            n: self._weight_of(n) for n in programs if self.first.is_weighted
        }
        # Whether backwards divide by the sum of all weights, which is known before.
        self.divides = bool(self._weight) and None not in self._weight.values()

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self._remat)

    def part(self, stage: int, microbatch: int = 0) -> Stage:
        """What a stage computes on a micro-batch."""
        return self._slices[self._sizes[microbatch]][stage]

    def program(self, microbatch: int) -> TracedFunction:
        """The program of a micro-batch."""
        return self._programs[self._sizes[microbatch]]

    def weights(self, stage: int, microbatch: int = 0) -> list[Weight]:
        """What a stage reads that is the same for all micro-batches."""
        return self._weights[self._sizes[microbatch]][stage]

    def weights_on(self, stage: int) -> list[Weight]:
        """What it reads, and what stays there though nobody reads it."""
        owned = [i for i, owner in enumerate(self.owner_stages) if owner == stage]
        return [*dict.fromkeys([*self.weights(stage), *owned])]

    def params_of(self, stage: int) -> set[int]:
        """The parameters that it reads, itself or by what is made once in a step."""
        found, count = set[int](), self.first.num_params
        for weight in self.weights(stage):
            if weight < count:
                found.add(weight)
                continue
            made = [self.once.jaxpr.outvars[weight - count]]
            live = _jaxpr.used_inputs(_jaxpr.dce_jaxpr(self.once, made))
            found |= {param for param, is_read in enumerate(live) if is_read}
        return found

    def _trained_params(self, program: TracedFunction) -> set[core.Var]:
        pairs = zip(program.params, self.trained, strict=True)
        return {param for param, is_trained in pairs if is_trained}

    def spec_of(self, weight: Weight) -> Any:
        """What such a value is like."""
        made = [*self.first.params, *self.once.jaxpr.outvars]
        return _jaxpr.spec(made[weight].aval)

    def trained_by(self, stage: int) -> list[Weight]:
        """What it reads that has a gradient."""
        return [i for i in self.weights(stage) if self.trained[i]]

    def _all_reads(self, size: int) -> list[Any]:
        """Of each stage which weights it reads, and which leaves of a micro-batch."""
        given, parts = self._programs[size].given, self._slices[size]
        leaves = [[given.index(v) for v in part.given] for part in parts]
        return [*zip(self._weights[size], leaves, strict=True)]

    def _states(self, state: StateUpdate) -> list[StateUpdate]:
        """What each stage writes; what none makes belongs to the last."""
        parts, last = self._slices[self._sizes[0]], self.num_stages - 1
        made = {v: s for s, part in enumerate(parts) for v in [*part.leaves, *part.aux]}
        written = [self.first.aux_vars[i] for i in state.leaves]
        writers = [
            last if isinstance(v, core.Literal) else made.get(v, last) for v in written
        ]
        return state.of_stages(writers, self.num_stages)

    def kind(self, stage: int, microbatch: int = 0) -> Hashable:
        """What is equal for stages whose operations are the same."""
        part = self.part(stage, microbatch)
        form = self._form(stage, self._sizes[microbatch])
        is_last = stage == self.num_stages - 1
        return form, is_last, part.num_trained, part.num_differentiated

    def _form(self, stage: int, size: int) -> Hashable:
        """What is equal for stages that are one program."""
        if (stage, size) not in self._forms:
            part = self._slices[size][stage]
            groups = part.weights, part.arrives, part.inputs, part.batch, part.leaves
            self._forms[stage, size] = (
                *map(len, groups),
                *_structural_key.structural_key(part.closed),
            )
        return self._forms[stage, size]

    def has_gradient(self, var: core.Var, microbatch: int) -> bool:
        """Whether what crosses has a cotangent."""
        return var in self._gradient[self._sizes[microbatch]]

    def mode(self, stage: int, microbatch: int) -> Any:
        """What a stage stores of a micro-batch."""
        return _remat.mode(self._remat[stage], microbatch, len(self._sizes))

    def functions(self, stage: int, microbatch: int, mode: Any) -> Stage:
        """The stage in a remat mode; of equal stages the first."""
        key = stage, self._sizes[microbatch], mode
        if key not in self._functions:
            self._functions[key] = self._made(stage, microbatch, mode)
        return self._functions[key]

    def _made(self, stage: int, microbatch: int, mode: Any) -> Stage:
        key = self.kind(stage, microbatch), mode
        if key not in self._distinct:
            divisors = None
            if self.first.has_loss and stage == self.num_stages - 1:
                divisors = specs(self.first.weight if self.divides else [])
            part = self.part(stage, microbatch)
            self._distinct[key] = replace(part, mode=mode, divisors=divisors)
        return self._distinct[key]

    def forward(self, stage: int, microbatch: int) -> Computation:
        """The program of a stage of which no residuals are stored."""
        key = self._form(stage, self._sizes[microbatch])
        if key not in self._forwards:
            closed = self.part(stage, microbatch).closed
            self._forwards[key] = Computation.of("forward", closed)
        return self._forwards[key]

    def residuals(self, stage: int) -> Residuals:
        """The residuals of the first micro-batch in a stage."""
        return self.functions(stage, 0, self.mode(stage, 0)).stored

    def does(self, stage: int, microbatch: int, weights_only: bool) -> bool:
        """Whether a backward has anything to compute."""
        part = self.part(stage, microbatch)
        return part.num_trained > 0 if weights_only else part.has_backward

    def weight(self, microbatch: int) -> Computation | None:
        """``what the last stage is given -> weight`` of a weighted loss.

        ``None`` where it follows from more than that.
        """
        return self._weight[self._sizes[microbatch]]

    def _weight_of(self, size: int) -> Computation | None:
        program, given = self._programs[size], self._slices[size][-1].given
        closed = _jaxpr.dce_jaxpr(program.closed, program.weight)
        live = zip(closed.jaxpr.invars, _jaxpr.used_inputs(closed), strict=True)
        if not {var for var, is_read in live if is_read} <= set(given):
            return None
        jaxpr = closed.jaxpr.replace(invars=given)
        return Computation.of("weight", core.ClosedJaxpr(jaxpr, closed.consts))

    def _owners(self) -> list[int]:
        """Of what is read by way of a value of `once` its first reader."""
        num_made, last = len(self.once.jaxpr.outvars), self.num_stages - 1
        count = self.first.num_params + num_made
        owner: dict[Weight, int] = {}
        for stage in range(self.num_stages):
            for weight in self.weights(stage):
                owner.setdefault(weight, stage)
        for k, var in enumerate(self.once.jaxpr.outvars):
            live = _jaxpr.used_inputs(_jaxpr.dce_jaxpr(self.once, [var]))
            for param, yes in enumerate(live):
                if yes:
                    owner.setdefault(param, owner.get(count - num_made + k, last))
        if self.first.rest:  # it is added to the loss
            owner[count - 1] = last
        return [owner.get(weight, 0) for weight in range(count)]


def _reads(closed: core.ClosedJaxpr) -> list[Any]:
    """Of each result what it is like, and which parameters it follows from."""
    results = closed.jaxpr.outvars
    return [
        (v.aval, _jaxpr.used_inputs(_jaxpr.dce_jaxpr(closed, [v]))) for v in results
    ]


def _is_in(atom: Any, variables: set[core.Var]) -> bool:
    return not isinstance(atom, core.Literal) and atom in variables


def pull_once(
    closed: core.ClosedJaxpr, trained: Sequence[bool], wanted: Sequence[bool]
) -> Any:
    """``(params, cotangents) -> gradients`` of the trained ones.

    Args:
      closed: ``params -> values``.
      trained: whether each parameter has a gradient.
      wanted: whether each value has a cotangent.
    """

    def pull(params: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def values(free: Sequence[Any]) -> list[Any]:
            it = iter(free)
            given = [
                next(it) if yes else x for x, yes in zip(params, trained, strict=True)
            ]
            made = core.jaxpr_as_fun(closed)(*given)
            return [y for y, yes in zip(made, wanted, strict=True) if yes]

        free = [x for x, yes in zip(params, trained, strict=True) if yes]
        _, pullback = jax.vjp(values, free)
        return pullback(list(cotangents))[0]

    return pull

"""Profiles whose stages take the times of steps that ran.

Each kind of program of a stage has a factor, by which the times of its layers are
scaled. The layers keep their shares of the stage:

    forward    measured F / predicted F
    backward   (measured B - other) / (predicted B - other)
    halves     the same of I and W

*measured* and *predicted* are the seconds of all such programs of the stage in a step,
and *other* is what they take besides a backward: forwards that are fused with them or
computed again, and what an action takes whatever it computes.

Steps of several cuts say more about the layers than one of them. Each in turn scales
the profile that the others have scaled, several times over: then nearly all stages
take the times that were measured.
"""

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._partition._remat_mode import NONE
from ..schedules import Action, Costs
from ..schedules._action import BACKWARD, FORWARD
from ._forecast import evaluate
from ._fused import fused_costs
from ._layer_profile import LayerProfile
from ._mode_names import stores_only_inputs
from ._plan_record import Plan
from ._profile_record import Profile, costs_of_stages
from ._space import Choice, SearchSpace

# The times that each step scales the profile.
_NUM_SWEEPS = 4
# A program that takes less than an action does by itself was measured with noise. A
# factor of 0 would make all layers of a stage equal.
_LEAST_FACTOR = 1e-3


@dataclass(frozen=True)
class RanStep:
    """A step that ran.

    Attributes:
      choice: its balance, remat modes, schedule and mesh.
      action_seconds: action -> the seconds of its program by itself; of those that are
        programs.
      seconds: the seconds of the step; ``None`` if only its actions were timed.
    """

    choice: Choice
    action_seconds: Mapping[Action, float]
    seconds: float | None = None

    @classmethod
    def from_costs(cls, plan: Plan, costs: Costs) -> "RanStep":
        """The step of a plan whose stages have these measured costs."""
        choice = Choice(
            balance=tuple(plan.balance),
            remat=tuple(plan.remat),
            schedule=plan.schedule,
            num_shards=plan.data,
        )
        actions = itertools.chain.from_iterable(plan.schedule.rows)
        seconds = {action: costs.of(action) for action in actions}
        return cls(choice, {action: x for action, x in seconds.items() if x > 0})

    @property
    def num_microbatch_shards(self) -> int:
        """The number of shards of all micro-batches."""
        return self.choice.schedule.num_microbatches * self.choice.num_shards

    @property
    def has_whole_backwards(self) -> bool:
        """True if some backward is not in halves."""
        return any(action.op == BACKWARD for action in self.action_seconds)


class LayerFactors(NamedTuple):
    """The factors of a layer.

    Attributes:
      forward: the factor of its forward.
      backward: the factor of its whole backward.
      halves: the factor of both halves of it.
    """

    forward: float = 1.0
    backward: float = 1.0
    halves: float = 1.0

    def times(self, other: "LayerFactors") -> "LayerFactors":
        """The factors of both, one after the other."""
        return LayerFactors(
            forward=self.forward * other.forward,
            backward=self.backward * other.backward,
            halves=self.halves * other.halves,
        )


def check_same_layers(plan: Plan, names: Sequence[str]) -> None:
    """Checks that the plan of a step is one of these layers, or sections.

    Raises:
      ValueError: if it is of others.
    """
    ran_names = list(itertools.chain.from_iterable(x.layers for x in plan.stages))
    if ran_names != list(names):
        raise ValueError(
            f"plan: ran= has the layers {ran_names}, the model has {list(names)}; of "
            f"one model give the plan of jpipe.plan or jpipe.tune that was built"
        )


def learn_times(space: SearchSpace, steps: Sequence[RanStep]) -> SearchSpace:
    """The space that forecasts for steps that ran about what they took.

    Layers take the times of the stages of these steps. Micro-batches of a size that no
    step had take factors between those of the next smaller and the next larger size
    that one had, evenly by their logarithms.

    Devices may slow each other down: they share memory, and some also cores. That a
    step took so many times as long as its actions by themselves do, holds for all steps
    in which as many devices share a micro-batch: the median of those that ran.

    Args:
      space: the choices, with their profiles.
      steps: the steps, at least one.
    """
    # Programs of shards that run side by side were timed side by side.
    fewest = min(step.choice.num_shards for step in steps)
    steps_by_count: dict[int, list[RanStep]] = {}
    for step in steps:
        if step.choice.num_shards == fewest:
            steps_by_count.setdefault(step.num_microbatch_shards, []).append(step)
    counts = sorted(steps_by_count)
    profiles = space.profiles
    # [count, layer, kind of program]
    logarithms = np.log(
        [find_layer_factors(profiles[x], steps_by_count[x]) for x in counts]
    )
    scaled_profiles: dict[int, Profile] = {}
    for count, profile in profiles.items():
        interpolated = _interpolate(np.log(count), np.log(counts), logarithms)
        factors = [LayerFactors(*layer) for layer in np.exp(interpolated).tolist()]
        scaled_profiles[count] = scale_layers(profile, factors)

    space = dataclasses.replace(space, profiles=scaled_profiles, slowdowns={})
    ratios: dict[int, list[float]] = {}
    for step in steps:
        if step.seconds is not None and step.choice.num_devices > 1:
            ratio = step.seconds / evaluate(space, step.choice).seconds
            ratios.setdefault(step.choice.num_shards, []).append(ratio)
    slowdowns = {
        num_shards: statistics.median(listed) for num_shards, listed in ratios.items()
    }
    return dataclasses.replace(space, slowdowns=slowdowns)


def _interpolate(x: float, knots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The row at a number, from rows at some numbers in order."""
    return np.apply_along_axis(lambda column: np.interp(x, knots, column), 0, rows)


def find_layer_factors(
    profile: Profile, steps: Sequence[RanStep]
) -> list[LayerFactors]:
    """The factors of layers with which stages take the times that were measured.

    Whole backwards say nothing about halves, but that both depend on the size of a
    micro-batch alike: what no step had takes the factor of the other.

    Args:
      profile: the profile, of the size of the micro-batches of all these steps.
      steps: the steps.
    """
    has_whole_backwards = any(step.has_whole_backwards for step in steps)
    factors = [LayerFactors()] * len(profile.layers)
    for _ in range(_NUM_SWEEPS):
        for step in sorted(steps, key=lambda x: not x.has_whole_backwards):
            scaled = scale_layers(profile, factors)
            halves_only = has_whole_backwards and not step.has_whole_backwards
            step_factors = _find_factors_of_step(scaled, step, halves_only=halves_only)
            pairs = zip(factors, step_factors, strict=True)
            factors = [layer.times(further) for layer, further in pairs]
    return factors


def scale_layers(profile: Profile, factors: Sequence[LayerFactors]) -> Profile:
    """A profile whose layers take so many times as long, each by its factors."""
    larger = profile.larger
    if larger is not None:
        larger = scale_layers(larger, factors)
    pairs = zip(profile.layers, factors, strict=True)
    layers = tuple(_scale_layer(layer, factor) for layer, factor in pairs)
    return dataclasses.replace(profile, layers=layers, larger=larger)


def _scale_layer(layer: LayerProfile, factors: LayerFactors) -> LayerProfile:
    input_grad = layer.input_grad
    weight_grad = layer.weight_grad
    return dataclasses.replace(
        layer,
        forward=layer.forward * factors.forward,
        backward=layer.backward * factors.backward,
        input_grad=None if input_grad is None else input_grad * factors.halves,
        weight_grad=None if weight_grad is None else weight_grad * factors.halves,
    )


def _find_factors_of_step(
    profile: Profile, step: RanStep, *, halves_only: bool
) -> list[LayerFactors]:
    """The factors with which stages take the times of one step.

    Args:
      profile: the profile, of the size of its micro-batches.
      step: the step.
      halves_only: True if it says nothing about whole backwards.
    """
    forward, backward = _find_time_factors(profile, step)
    factors = [
        LayerFactors(
            forward=forward[stage],
            backward=1.0 if halves_only else backward[stage],
            halves=backward[stage],
        )
        for stage in range(len(step.choice.balance))
    ]
    return _repeat_by_layer(factors, step.choice.balance)


def _find_time_factors(
    profile: Profile, step: RanStep
) -> tuple[list[float], list[float]]:
    """For each stage the factor of forwards, and that of backwards or their halves."""
    choice = step.choice
    stages = range(len(choice.balance))
    call = profile.action_seconds
    predicted_costs = _predict_costs(profile, choice)
    actions = [x for x in step.action_seconds if predicted_costs.of(x) > 0]
    forwards = [action for action in actions if action.op == FORWARD]
    backwards = [action for action in actions if action.op != FORWARD]

    has_forward = {action.stage for action in forwards}
    forward_measured = _sum_over_stages(forwards, step.action_seconds.__getitem__, call)
    forward_predicted = _sum_over_stages(forwards, predicted_costs.of, call)
    forward_factors = [
        _ratio(forward_measured[stage], forward_predicted[stage]) for stage in stages
    ]

    def predict(backward: float) -> dict[int, float]:
        """The seconds of backwards of each stage, with their own share scaled."""
        factors = _repeat_by_layer(
            [LayerFactors(x, backward, backward) for x in forward_factors],
            choice.balance,
        )
        costs = _predict_costs(scale_layers(profile, factors), choice)
        return _sum_over_stages(backwards, costs.of, call)

    measured = _sum_over_stages(backwards, step.action_seconds.__getitem__, call)
    predicted = predict(1.0)
    other = predict(0.0)
    backward_factors: list[float] = []
    for stage in stages:
        factor = _ratio(measured[stage], predicted[stage])
        if stage not in has_forward:  # all are fused with backwards
            forward_factors[stage] = factor
        elif measured[stage] > other[stage]:
            factor = _ratio(
                measured[stage] - other[stage], predicted[stage] - other[stage]
            )
        backward_factors.append(factor)
    return forward_factors, backward_factors


def _predict_costs(profile: Profile, choice: Choice) -> Costs:
    """The costs of the programs of a step, as the profile predicts them."""
    modes = [_listed_mode(profile, mode) for mode in choice.remat]
    return fused_costs(
        profile.costs(choice.balance, remat=modes),
        choice.schedule,
        is_last_recomputed=stores_only_inputs(modes[-1]),
        action_seconds=profile.action_seconds,
    )


def _listed_mode(profile: Profile, mode: str) -> str:
    """A mode, or the one that stores all: the user's own modes store some too."""
    return mode if mode in costs_of_stages(profile).residual_bytes else NONE.name


def _sum_over_stages(
    actions: Sequence[Action], seconds_of: Callable[[Action], float], call: float
) -> dict[int, float]:
    """Stage -> the seconds of its actions, without those that a call takes."""
    sums = defaultdict[int, float](float)
    for action in actions:
        sums[action.stage] += seconds_of(action) - call
    return sums


def _repeat_by_layer(
    factors: Sequence[LayerFactors], balance: Sequence[int]
) -> list[LayerFactors]:
    """The factors of each stage, once for each of its layers."""
    pairs = zip(factors, balance, strict=True)
    return [layer for stage, size in pairs for layer in itertools.repeat(stage, size)]


def _ratio(measured: float, predicted: float) -> float:
    """A factor; 1 where nothing is predicted."""
    if predicted <= 0:
        return 1.0
    return max(measured / predicted, _LEAST_FACTOR)

"""Profiles whose stages take the times of steps that ran.

Each kind of program of a stage has a factor, by which the times of its layers are
scaled. The layers keep their shares of the stage:

    forward    measured F / predicted F
    backward   (measured B - other) / (predicted B - other)
    halves     the same of I and W

*measured* and *predicted* are the seconds of all such programs of the stage in a step,
and *other* is what they take besides a backward: forwards that are fused with them or
computed again, and what an action takes whatever it computes.

A layer that was in several steps takes the geometric mean of its factors. A forward
that was only fused with backwards takes the factor of both, if no step says more.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from .._partition._remat_mode import NONE
from ..schedules import Action, Costs
from ..schedules._action import BACKWARD, FORWARD
from ._forecast import evaluate
from ._fused import fused_costs
from ._layer_profile import LayerProfile
from ._mode_names import stores_only_inputs
from ._plan_record import Plan
from ._profile_record import Profile, costs_of_stages
from ._slowdowns import Slowdowns
from ._space import Choice, SearchSpace

_T = TypeVar("_T")
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
    def stages_with_forwards(self) -> set[int]:
        """The stages some of whose forwards are not fused with backwards."""
        return {x.stage for x in self.action_seconds if x.op == FORWARD}

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

    How many times as long a step took as its actions by themselves do, is learned too
    (`_slowdowns`).

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

    space = dataclasses.replace(space, profiles=scaled_profiles, slowdowns=Slowdowns())
    slowdowns = Slowdowns.from_steps(
        (step.choice.step_kind, step.seconds / evaluate(space, step.choice).seconds)
        for step in steps
        if step.seconds is not None
    )
    return dataclasses.replace(space, slowdowns=slowdowns)


def _interpolate(x: float, knots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The row at a number, from rows at some numbers in order."""
    return np.apply_along_axis(lambda column: np.interp(x, knots, column), 0, rows)


def find_layer_factors(
    profile: Profile, steps: Sequence[RanStep]
) -> list[LayerFactors]:
    """The factors of layers with which stages take about what was measured.

    Whole backwards say nothing about halves, but that both depend on the size of a
    micro-batch alike: what no step had takes the factor of the other.

    Args:
      profile: the profile, of the size of the micro-batches of all these steps.
      steps: the steps.
    """
    forwards = _average(
        [_find_forward_factors(profile, step) for step in steps],
        np.array([_find_layers_with_forwards(step) for step in steps]),
    )
    with_forwards = scale_layers(profile, [LayerFactors(forward=x) for x in forwards])
    backwards = [_find_backward_factors(with_forwards, step) for step in steps]
    are_whole = np.array([[step.has_whole_backwards] for step in steps])
    layers = zip(
        forwards,
        _average(backwards, are_whole),
        _average(backwards, ~are_whole),
        strict=True,
    )
    return [LayerFactors(*layer) for layer in layers]


def _average(factors: ArrayLike, counts: np.ndarray) -> list[float]:
    """The geometric mean of the factors of each layer, of those that count.

    Args:
      factors: the factors ``[step, layer]``.
      counts: True for each that counts, of the same shape or ``[step, 1]``; where none
        does, all do.
    """
    logarithms = np.log(factors)
    weights = np.broadcast_to(counts | ~np.any(counts, axis=0), logarithms.shape)
    return np.exp(np.average(logarithms, axis=0, weights=weights)).tolist()


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


def _find_forward_factors(profile: Profile, step: RanStep) -> list[float]:
    """The factor of each layer's forward, by the forwards of its stage.

    Where all of these are fused with backwards, by the programs of both.
    """
    stages_with_forwards = step.stages_with_forwards
    actions = [
        action
        for action in step.action_seconds
        if action.op == FORWARD or action.stage not in stages_with_forwards
    ]
    measured = _sum_measured(profile, step, actions)
    predicted = _sum_predicted(profile, step, actions)
    factors = [*map(_ratio, measured, predicted)]
    return _repeat_by_layer(factors, step.choice.balance)


def _find_layers_with_forwards(step: RanStep) -> list[bool]:
    """For each layer whether some forward of its stage is a program by itself."""
    balance = step.choice.balance
    stages_with_forwards = step.stages_with_forwards
    has_forwards = [stage in stages_with_forwards for stage in range(len(balance))]
    return _repeat_by_layer(has_forwards, balance)


def _find_backward_factors(profile: Profile, step: RanStep) -> list[float]:
    """The factor of each layer's backward, or its halves, by those of its stage.

    Args:
      profile: the profile, with the factors of forwards.
      step: the step.
    """
    actions = [action for action in step.action_seconds if action.op != FORWARD]
    no_backwards = [LayerFactors(backward=0.0, halves=0.0)] * len(profile.layers)
    measured = _sum_measured(profile, step, actions)
    predicted = _sum_predicted(profile, step, actions)
    other = _sum_predicted(scale_layers(profile, no_backwards), step, actions)
    factors: list[float] = []
    for stage in range(len(step.choice.balance)):
        factor = _ratio(measured[stage], predicted[stage])
        # Noise may leave nothing to the backwards themselves.
        if measured[stage] > other[stage]:
            factor = _ratio(
                measured[stage] - other[stage], predicted[stage] - other[stage]
            )
        factors.append(factor)
    return _repeat_by_layer(factors, step.choice.balance)


def _sum_measured(
    profile: Profile, step: RanStep, actions: Sequence[Action]
) -> list[float]:
    """For each stage the seconds of its actions, without those that calls take."""
    return _sum_over_stages(profile, step, actions, step.action_seconds.__getitem__)


def _sum_predicted(
    profile: Profile, step: RanStep, actions: Sequence[Action]
) -> list[float]:
    """The same as the profile predicts it."""
    return _sum_over_stages(profile, step, actions, _predict_costs(profile, step).of)


def _sum_over_stages(
    profile: Profile,
    step: RanStep,
    actions: Sequence[Action],
    seconds_of: Callable[[Action], float],
) -> list[float]:
    sums = [0.0] * len(step.choice.balance)
    for action in actions:
        sums[action.stage] += seconds_of(action) - profile.action_seconds
    return sums


def _predict_costs(profile: Profile, step: RanStep) -> Costs:
    """The costs of the programs of a step, as the profile predicts them."""
    choice = step.choice
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


def _repeat_by_layer(values: Sequence[_T], balance: Sequence[int]) -> list[_T]:
    """The value of each stage, once for each of its layers."""
    pairs = zip(values, balance, strict=True)
    return [layer for stage, size in pairs for layer in itertools.repeat(stage, size)]


def _ratio(measured: float, predicted: float) -> float:
    """A factor; 1 where nothing is predicted."""
    if predicted <= 0:
        return 1.0
    return max(measured / predicted, _LEAST_FACTOR)

"""Times of layers after a step that ran: those of each stage are scaled to its own.

    factor[stage] = (measured - calls) / (predicted - calls)

*measured* and *predicted* are the seconds of all actions of the stage in a step, and
*calls* what its actions take whatever they compute. The layers of a stage keep their
shares of it; so do micro-batches of other sizes.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._partition._remat_mode import NONE
from ..schedules import Costs
from ._fused import fused_costs
from ._interpolate import interpolate
from ._mode_names import stores_only_inputs
from ._plan_record import Plan
from ._profile_record import Profile, costs_of_stages


class RanStep(NamedTuple):
    """A step that ran.

    Attributes:
      plan: the stages, and their schedule.
      costs: the measured costs of these stages.
    """

    plan: Plan
    costs: Costs


def check_ran_step(plan: Any, costs: Any) -> RanStep | None:
    """The step of the arguments ``ran`` and ``costs`` of `jpipe.plan`.

    Raises:
      ValueError: if one is missing, or they are of different stages.
      TypeError: if one is nothing such.
    """
    if plan is None and costs is None:
        return None
    usage = "type ran=step.plan, costs=step.profile(state, x, targets).costs"
    if plan is None or costs is None:
        raise ValueError(f"plan: ran= and costs= belong together: {usage}")
    if not isinstance(plan, Plan) or not isinstance(costs, Costs):
        raise TypeError(
            f"plan: ran= is a {type(plan).__name__} and costs= a "
            f"{type(costs).__name__}: {usage}"
        )
    if costs.num_stages != len(plan.stages) or not costs.in_seconds:
        raise ValueError(
            f"plan: costs= are of {costs.num_stages} stages, ran= of "
            f"{len(plan.stages)}; they are measured seconds of its stages: {usage}"
        )
    return RanStep(plan, costs)


def scale_to_step(
    profile: Profile, ran: RanStep, names: Sequence[str], num_examples: int
) -> Profile:
    """The profile whose stages take the times of a step that ran.

    Args:
      profile: the profile, of any sizes.
      ran: the step.
      names: the names of the layers, or sections, of the model.
      num_examples: the number of examples of the mini-batch.

    Raises:
      ValueError: if the step is of other layers.
    """
    plan = ran.plan
    ran_names = list(itertools.chain.from_iterable(x.layers for x in plan.stages))
    if ran_names != list(names):
        raise ValueError(
            f"plan: ran= has the layers {ran_names}, the model has {list(names)}; of "
            f"one model give the plan of jpipe.plan or jpipe.tune that was built"
        )
    schedule = plan.schedule
    num_shards = schedule.num_microbatches * plan.data
    sized = interpolate(profile, -(-num_examples // num_shards))
    # Residuals do not matter here: the user's own modes store some too.
    listed = costs_of_stages(sized).residual_bytes
    modes = [mode if mode in listed else NONE.name for mode in plan.remat]
    predicted_costs = fused_costs(
        sized.costs(plan.balance, remat=modes),
        schedule,
        is_last_recomputed=stores_only_inputs(modes[-1]),
        action_seconds=sized.action_seconds,
    )
    measured = [0.0] * schedule.num_stages
    predicted = [0.0] * schedule.num_stages
    for action in itertools.chain.from_iterable(schedule.rows):
        seconds = predicted_costs.of(action)
        if seconds > 0:
            predicted[action.stage] += seconds - sized.action_seconds
            measured[action.stage] -= sized.action_seconds
        measured[action.stage] += ran.costs.of(action)

    factors: list[float] = []  # one per layer
    for size, stage_measured, stage_predicted in zip(
        plan.balance, measured, predicted, strict=True
    ):
        factor = 1.0
        if stage_predicted > 0:
            factor = max(stage_measured, 0.0) / stage_predicted
        factors += [factor] * size
    return scale_layers(profile, factors)


def scale_layers(profile: Profile, factors: Sequence[float]) -> Profile:
    """A profile whose layers take so many times as long, each by its factor."""
    larger = profile.larger
    if larger is not None:
        larger = scale_layers(larger, factors)
    pairs = zip(profile.layers, factors, strict=True)
    layers = tuple(layer.scaled(factor) for layer, factor in pairs)
    return dataclasses.replace(profile, layers=layers, larger=larger)

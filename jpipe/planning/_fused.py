"""The costs of the programs that a step runs, where these are not its actions."""

import dataclasses
import itertools
from typing import Any

from ..schedules import Action, Costs, Schedule
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT


def find_fused_microbatches(schedule: Schedule) -> set[int]:
    """The micro-batches whose forward in the last stage is fused with their backward.

    It is one program with the backward that directly follows it, whatever is stored.
    """
    last = schedule.num_stages - 1
    fused: set[int] = set()
    for rank in schedule.ranks_of[last]:
        for action, following in itertools.pairwise(schedule.rows[rank]):
            is_forward = action.op == FORWARD and action.stage == last
            if is_forward and following[1:] == action[1:]:
                fused.add(action.microbatch)
    return fused


def fused_costs(
    costs: Costs,
    schedule: Schedule,
    *,
    is_last_recomputed: bool,
    action_seconds: float,
) -> Costs:
    """The costs of the programs that a step runs, where these are not its actions.

    A forward of the last stage that its own backward follows is fused with it: nothing
    is stored between them or computed twice. The first stage has no I, since
    nothing needs the gradient of its input: its W does all that a backward does.

    Args:
      costs: the costs of actions, one number per stage.
      schedule: the actions of each rank, in order.
      is_last_recomputed: True if the last stage stores only its input, so that all of
        its forwards run in their backwards.
      action_seconds: seconds of each action whatever it computes; a program that does
        two actions takes them once.

    Returns:
      Costs with one number for each stage; of the last one, where only some of its
      forwards are fused, with one for each micro-batch.
    """
    stages = range(schedule.num_stages)
    last = stages[-1]
    microbatches = range(schedule.num_microbatches)
    fused_microbatches = set(microbatches)
    if not is_last_recomputed:
        fused_microbatches = find_fused_microbatches(schedule)

    backward = costs.of(Action(BACKWARD, last, 0))
    input_grads = [costs.of(Action(INPUT, stage, 0)) for stage in stages]
    weight_grads = [costs.of(Action(WEIGHT, stage, 0)) for stage in stages]
    # The seconds that a fused forward adds to its backward, which has them already
    # where it computes the forward again.
    added = 0.0
    if not is_last_recomputed:
        added = max(costs.forward[last] - action_seconds, 0.0)
    fused_backward = backward + added
    fused_input_grad = input_grads[last] + added

    # Whole backwards of the first stage run in its W.
    weight_grads[0] = max(input_grads[0] + weight_grads[0] - action_seconds, 0.0)
    input_grads[0] = 0.0
    fused_weight_grad = weight_grads[last]
    if last == 0:
        fused_input_grad = 0.0
        fused_weight_grad = fused_backward

    def replace_last(numbers: Any, fused: float) -> list[Any]:
        # One number for all micro-batches, where they agree: a simulation of costs
        # without lists takes a third of the time.
        if not fused_microbatches:
            return [*numbers]
        if len(fused_microbatches) == len(microbatches):
            return [*numbers[:last], fused]
        of_last = [numbers[last]] * len(microbatches)
        for microbatch in fused_microbatches:
            of_last[microbatch] = fused
        return [*numbers[:last], of_last]

    return dataclasses.replace(
        costs,
        forward=replace_last(costs.forward, 0.0),
        backward=replace_last(costs.backward, fused_backward),
        input_grad=replace_last(input_grads, fused_input_grad),
        weight_grad=replace_last(weight_grads, fused_weight_grad),
        residual_bytes=replace_last(costs.residual_bytes, costs.boundary_bytes[last]),
    )

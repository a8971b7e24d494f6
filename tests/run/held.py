"""What a step holds, byte by byte: by the simulator and by the executor."""

import jax

from jpipe._functions._objective import Objective
from jpipe._functions._trainable import Trainable
from jpipe._run import _memory

from .. import reference as ref


def counted(pipe, x, targets, rngs=None, **objective):
    """What the executor held after each action of a real run, and the program."""
    variables = pipe.init(jax.random.key(0), x)
    loss = objective.pop("loss", ref.mse)
    trainable = Trainable(objective.pop("trainable", None))
    gradient = pipe._library.gradients(Objective(loss, **objective), trainable)(
        variables, x, targets, rngs, True
    )
    meter = _memory.Meter(pipe.schedule.placement)
    gradient(
        gradient.program.layout.take(jax.tree.leaves(variables)),
        jax.tree.leaves(x),
        jax.tree.leaves(targets),
        jax.tree.leaves(rngs),
        meter,
    )
    return meter, gradient.program


def check_exact(pipe, x, targets, rngs=None, **objective):
    """The simulator's bytes, action by action, against those of a real run."""
    meter, program = counted(pipe, x, targets, rngs, **objective)
    costs = _memory.costs_of(program)
    timeline = pipe.schedule.simulate(costs)
    ranks = pipe.schedule.num_ranks
    now = [event.bytes for event in timeline.memory[:ranks]]
    assert meter.ranks()[0] == now
    after = {}
    events = iter(timeline.memory[ranks:])
    event = next(events, None)
    for action in timeline.order():
        # An action changes its own rank and those that it sends to: so many events.
        touched = {pipe.schedule.placement[action.stage]}
        if action.op == "F" and action.stage + 1 < pipe.num_stages:
            touched.add(pipe.schedule.placement[action.stage + 1])
        if action.op in "BI" and action.stage:
            touched.add(pipe.schedule.placement[action.stage - 1])
        for skip in costs.skips:
            if (action.op, action.stage) == ("F", skip.source):
                touched.add(pipe.schedule.placement[skip.target])
            if action.op in "BI" and action.stage == skip.target:
                touched.add(pipe.schedule.placement[skip.source])
        for _ in touched:
            now[event.rank] = event.bytes
            event = next(events, None)
        after[action] = list(now)
    assert event is None
    for action, row in zip(meter.actions[1:], meter.ranks()[1:], strict=True):
        if action in after:
            assert row == after[action], action
        else:  # a half had nothing to compute, and the other was the whole
            assert row in [after[action._replace(op=op)] for op in "IW"], action
    assert meter.peak_bytes == timeline.peak_bytes
    return timeline

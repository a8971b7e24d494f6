"""From a schedule and compiled stages to the steps of the executor."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..schedules import Action, Schedule
from ..schedules._action import BACKWARD, FORWARD, INPUT, WEIGHT
from . import _execute, _transfer
from ._execute import Step
from ._transfer import Device, Group
from ._work import Rows, Work


def inference(schedule: Schedule, devices: Sequence[Device], rows: Rows) -> list[Step]:
    """The forwards of a schedule, of which nothing is kept.

    Args:
      schedule: who runs what.
      devices: the device of each stage.
      rows: the work of each stage on each micro-batch.

    Returns:
      The steps, in an order that respects every dependency.
    """
    make = _Lowering(devices, rows)
    return [
        make.step(action, _execute.infer, make.of(action).programs.infer)
        for action in schedule.forwards().simulate().order()
    ]


def training(
    schedule: Schedule, devices: Sequence[Device], rows: Rows
) -> tuple[list[Step], dict[Action, Action]]:
    """A whole schedule. What has nothing to compute is left out.

    A forward of the stage with the loss becomes one program with its backward if
    nothing runs in between; and if nothing is to be kept in between, for then the
    forward would compute only what the backward computes again.

    Args:
      schedule: who runs what.
      devices: the device of each stage.
      rows: the work of each stage on each micro-batch.

    Returns:
      The steps, in an order that respects every dependency; and by scheduled action
      the one that does its work in its place. What is missing there does nothing.
    """
    make = _Lowering(devices, rows)
    fused = _fused(schedule, rows)
    steps, ran = [], {}
    for scheduled in schedule.simulate().order():
        action = _real(scheduled, rows)
        if action is None or (action.op == FORWARD and action[1:] in fused):
            continue
        step = (make.fused if action[1:] in fused else make.single)(action)
        if step is not None:
            steps.append(step)
            ran[scheduled] = action
    return steps, ran


def _real(action: Action, rows: Rows) -> Action | None:
    """What an action amounts to, where a half of a backward has nothing to compute."""
    derivatives = rows[action.stage][action.microbatch].programs.derivatives
    has = {INPUT: derivatives.has_x_grads, WEIGHT: derivatives.has_weight_grads}
    if action.op not in has or all(has.values()):
        return action
    # The first half stays if there is nothing to compute: with the loss, say.
    alone = WEIGHT if has[WEIGHT] else INPUT
    return action._replace(op=BACKWARD) if action.op == alone else None


def _fused(schedule: Schedule, rows: Rows) -> set[tuple[int, int]]:
    """The stage with the loss and its micro-batches whose forward is not run alone."""
    last = schedule.num_stages - 1
    modes = [work.programs.derivatives.mode for work in rows[last]]
    full = {(last, m) for m, mode in enumerate(modes) if mode == "full"}
    if full and rows[last][0].task.changes_integers:
        # All of them, or one that is not would run before those that are.
        full = {(last, m) for m in range(len(rows[last]))}
    row = schedule.rows[schedule.placement[last]]
    real = [action for action in (_real(a, rows) for a in row) if action is not None]
    adjacent = {
        action[1:]
        for action, after in itertools.pairwise(real)
        if action.op == FORWARD and action.stage == last and after[1:] == action[1:]
    }
    return full | adjacent


class _Lowering:
    """Makes the step of an action.

    Args:
      devices: the device of each stage.
      rows: the work of each stage on each micro-batch.
    """

    def __init__(self, devices: Sequence[Device], rows: Rows) -> None:
        self._devices = devices
        self._rows = rows
        self._layers = [str(row[0].task.stage) for row in rows]

    def of(self, action: Action) -> Work:
        """The work of its stage on its micro-batch."""
        return self._rows[action.stage][action.microbatch]

    def step(
        self,
        action: Action,
        run: Callable[..., None],
        program: Callable[..., Any],
        kept: tuple[int, ...] = (),
    ) -> Step:
        """One step, with its transfers."""
        source, groups = self._devices[action.stage], self._groups(action)
        return Step(
            run=run,
            stage=action.stage,
            microbatch=action.microbatch,
            program=program,
            send=_transfer.deliverer(source, groups),
            kept=kept,
            action=action,
            device=str(source),
            layers=self._layers[action.stage],
            routes=groups,
        )

    def single(self, action: Action) -> Step | None:
        """The step of an action by itself; ``None`` if there is nothing to compute."""
        programs = self.of(action).programs
        derivatives = programs.derivatives
        if action.op == FORWARD:
            kept = derivatives.cut.kept
            return self.step(action, _execute.forward, programs.forward, kept)
        if action.op == INPUT:
            kept = derivatives.halves.read
            return self.step(action, _execute.input_grad, programs.input_grad, kept)
        if action.op == WEIGHT:
            return self.step(action, _execute.weight_grad, programs.weight_grad)
        if derivatives.has_weight_grads or derivatives.has_x_grads:
            return self.step(action, _execute.backward, programs.backward)
        return None

    def fused(self, action: Action) -> Step:
        """The step of a backward, or of a half, that does its forward's work too."""
        programs = self.of(action).programs
        derivatives = programs.derivatives
        if action.op == INPUT:
            kept = derivatives.fused_halves.read
            return self.step(action, _execute.fused_input, programs.fused_input, kept)
        if action.op == WEIGHT:
            return self.step(action, _execute.weight_grad, programs.fused_weight)
        return self.step(action, _execute.fused, programs.fused)

    def _groups(self, action: Action) -> list[Group]:
        """Where the result of an action goes: derived, never written by a schedule."""
        task, forward = self.of(action).task, action.op == FORWARD
        pairs = task.sent if forward else task.returned
        has_keys = forward and task.sends_keys
        groups: list[Group] = []
        for stage, count in pairs:
            if not count and not forward:
                continue  # no gradient: nobody waits for it
            if groups and groups[-1].stage == stage:
                count += groups.pop().size
            # The outputs of the last stage stay where they are.
            device = self._devices[min(stage, len(self._devices) - 1)]
            joins = stage < len(self._rows) and self._joins(action, stage)
            groups.append(Group(stage, count, device, joins, has_keys))
        return groups

    def _joins(self, action: Action, stage: int) -> bool:
        """Whether skip connections too end where the result of an action goes."""
        ports = self._rows[stage][action.microbatch].task.ports
        if action.op == FORWARD:
            return any(route.source != stage - 1 for route in ports.incoming)
        return any(route.target != stage + 1 for route in ports.outgoing)

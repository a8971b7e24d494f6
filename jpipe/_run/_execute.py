"""The one loop that drives every schedule.

It takes no decision: which program runs, what it keeps and where its results go is
in the steps, which `_lower` derived from the schedule. It never waits: Python
dispatches ahead of the devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._functions._vjp import Leaves
from ..schedules._action import Action
from ._transfer import Group

Cells = list[list[Any]]


@dataclass
class Live:
    """Every array that a mini-batch in flight holds: flat leaves, or ``None``.

    ``x``, ``extra``, ``held``, ``cotangents`` and ``emitted`` are indexed by stage,
    then micro-batch; the others by stage. ``x`` has one row more than there are
    stages: the outputs of the last one. A cell is emptied at its last use.
    """

    weights: list[Leaves]
    x: Cells
    extra: Cells
    held: Cells
    cotangents: Cells
    emitted: Cells
    grads: list[Leaves]
    tally: list[Leaves]


class Step(NamedTuple):
    """One action, with everything resolved that can be before the arrays are there.

    Attributes:
      run: one of the functions below.
      stage: its stage.
      microbatch: its micro-batch.
      program: the compiled program.
      send: ``(cells, microbatch, leaves)`` moves the result to where it is read.
      kept: the positions of the leaves that a later action will read again, among
        those of the input; after a first half among all that it was given.
      action: what it is; of two that were fused, the second.
      device: where it runs, for messages.
      layers: what runs, for messages.
      routes: where ``send`` sends to.
    """

    run: "Callable[[Step, Live], None]"
    stage: int
    microbatch: int
    program: Callable[..., Any]
    send: Callable[[Cells, int, Leaves], None]
    kept: tuple[int, ...]
    action: Action
    device: str
    layers: str
    routes: Sequence[Group]


def execute(
    steps: Sequence[Step],
    live: Live,
    observe: Callable[[Step | None, Live], None] | None = None,
) -> None:
    """Runs all steps in order; results are left in ``live``.

    Args:
      steps: in an order that respects every dependency.
      live: the arrays; changed in place.
      observe: called before the first step, with ``None``, and after each, for
        measurements.

    Raises:
      Exception: what a program raised, with a note that names the action.
    """
    step = None
    if observe is not None:
        observe(None, live)
    try:
        for step in steps:
            step.run(step, live)
            if observe is not None:
                observe(step, live)
    except Exception as error:
        if step is not None:
            error.add_note(
                f"raised in action {step.action} on {step.device}: {step.layers}"
            )
        raise


def infer(step: Step, live: Live) -> None:
    """A forward of which nothing is kept."""
    _, s, m, program, send, *_ = step
    x, extra = live.x[s][m], live.extra[s][m]
    live.x[s][m] = live.extra[s][m] = None
    send(live.x, m, program(live.weights[s], x, extra))


def forward(step: Step, live: Live) -> None:
    """A forward that keeps what its backward will read."""
    _, s, m, program, send, kept, *_ = step
    x = live.x[s][m]
    live.x[s][m] = None
    y, live.tally[s], live.emitted[s][m], carried = program(
        live.weights[s], x, live.extra[s][m], live.tally[s]
    )
    live.held[s][m] = [x[i] for i in kept], carried
    send(live.x, m, y)


def backward(step: Step, live: Live) -> None:
    """A backward: adds to the gradients, sends the cotangent of the input back."""
    _, s, m, program, send, *_ = step
    (kept, carried), extra = live.held[s][m], live.extra[s][m]
    cotangents = live.cotangents[s][m]
    live.held[s][m] = live.extra[s][m] = live.cotangents[s][m] = None
    x_grads, live.grads[s] = program(
        live.weights[s], kept, extra, carried, cotangents, live.grads[s]
    )
    send(live.cotangents, m, x_grads)


def fused(step: Step, live: Live) -> None:
    """Forward and backward of the stage with the loss, in one program."""
    _, s, m, program, send, *_ = step
    x, extra = live.x[s][m], live.extra[s][m]
    live.x[s][m] = live.extra[s][m] = None
    x_grads, live.tally[s], live.emitted[s][m], live.grads[s] = program(
        live.weights[s], x, extra, live.tally[s], live.grads[s]
    )
    send(live.cotangents, m, x_grads)


def input_grad(step: Step, live: Live) -> None:
    """The first half of a backward: sends the cotangent of the input back."""
    _, s, m, program, send, kept, *_ = step
    (x, carried), extra = live.held[s][m], live.extra[s][m]
    cotangents = live.cotangents[s][m]
    live.extra[s][m] = live.cotangents[s][m] = None
    x_grads, crossing = program(live.weights[s], x, extra, carried, cotangents)
    given = (*x, *extra, *carried, *cotangents)
    live.held[s][m] = [*(given[i] for i in kept), *crossing]
    send(live.cotangents, m, x_grads)


def weight_grad(step: Step, live: Live) -> None:
    """The second half of a backward: adds to the gradients."""
    _, s, m, program, *_ = step
    left = live.held[s][m]
    live.held[s][m] = None
    live.grads[s] = program(live.weights[s], left, live.grads[s])


def fused_input(step: Step, live: Live) -> None:
    """Forward and first half of the backward of the stage with the loss."""
    _, s, m, program, send, kept, *_ = step
    x, extra = live.x[s][m], live.extra[s][m]
    live.x[s][m] = live.extra[s][m] = None
    x_grads, live.tally[s], live.emitted[s][m], crossing = program(
        live.weights[s], x, extra, live.tally[s]
    )
    given = (*x, *extra)
    live.held[s][m] = [*(given[i] for i in kept), *crossing]
    send(live.cotangents, m, x_grads)

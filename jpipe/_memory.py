"""How many bytes a mini-batch in flight holds on each device."""

from collections.abc import Sequence
from typing import Any

import jax

from . import _execute
from ._execute import Live, Step
from ._program import Program
from ._transfer import Device


def nbytes(tree: Any) -> int:
    """The bytes of the arrays of a pytree; one that appears twice is counted once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())


class Meter:
    """Counts what the executor holds: give it to `_execute.execute` as ``observe``.

    Counted are inputs, boundary activations, residuals, cotangents, sums of gradients
    and of losses, targets and keys; not the weights and the optimizer's state, and
    not what a program needs while it runs.

    Attributes:
      peak: the largest number of bytes after any action, by device.
      activations: the largest number of bytes kept between forward and backward, by
        stage.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self.peak = dict.fromkeys(devices, 0)
        self.activations = [0] * len(devices)

    def __call__(self, step: Step, live: Live) -> None:
        """Takes the count after one action."""
        count = dict.fromkeys(self._devices, 0)
        for s, device in enumerate(self._devices):
            held = nbytes(live.held[s])
            self.activations[s] = max(self.activations[s], held)
            rows = [live.x[s], live.extra[s], live.cotangents[s], live.emitted[s]]
            count[device] += held + nbytes([*rows, live.grads[s], live.tally[s]])
        for device, total in count.items():
            self.peak[device] = max(self.peak[device], total)


def predict(program: Program) -> Meter:
    """What a `Meter` will count when a program runs, found without running it.

    The executor's own loop walks the steps on shapes and dtypes.

    Args:
      program: a compiled mini-batch.

    Returns:
      The meter at the end of the mini-batch.
    """
    meter = Meter(program.devices)
    steps = [_abstract(step) for step in program.steps]
    _execute.execute(steps, program.abstract_feed(), meter)
    return meter


def _abstract(step: Step) -> Step:
    """The same step on shapes and dtypes: nothing is computed, nothing moves."""

    def program(*leaves: Any) -> Any:
        return jax.eval_shape(step.program, *leaves)

    return step._replace(program=program, send=lambda leaves: leaves)

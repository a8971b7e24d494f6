"""Processor time of each action of a step, by remat mode.

Run it with ``python -m benchmarks.overhead.actions``, or with names of models. Two
stages, eight micro-batches, 1F1B, all on one core. Each action is waited for, so that
the processor time of the process is that of the action, whatever else the machine does.
The modes of a model are measured in one process, in turns.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jpipe
from jpipe.schedules import Action, Costs

from ..allocator import KEEP_MEMORY
from ..experiment import mean_cross_entropy
from ..markdown import table
from ..peers import ours, workload
from ..peers.measure import separate_cores
from ..processes import restart_with, xla_flags
from . import remat

# A program with its arguments: one step's gradients.
Program = tuple[Any, Sequence[Any]]
# action, such as "0B" of all micro-batches -> processor seconds, one per run of it
Seconds = dict[str, list[float]]
ACTIONS = ("0F", "0B", "1B")
MODES = ("none", "min_cut", "dots", "full")
MICROBATCHES = remat.MICROBATCHES


class Model(NamedTuple):
    """A model in two stages.

    Attributes:
      layers: its layers.
      balance: the number of layers of each stage.
      x: a mini-batch.
      targets: its targets.
      loss: the loss function.
    """

    layers: Sequence[Any]
    balance: Sequence[int]
    x: Any
    targets: Any
    loss: Callable[[Any, Any], jax.Array]


class Figures(NamedTuple):
    """What one remat mode costs: medians, in processor seconds.

    Attributes:
      held_bytes: the bytes that the first stage stores of the micro-batches in flight.
      forward: a forward of the first stage.
      backward: a backward of the first stage.
      last: a forward and its backward in the last stage, which are one call.
      step: a step with these times, simulated: two cores with nothing else to do.
    """

    held_bytes: int
    forward: float
    backward: float
    last: float
    step: float


def _peers_model(name: str) -> Model:
    """A model of the comparison with other libraries."""
    case = workload.Case(name, "full", MICROBATCHES)
    layers = [ours.module(layer, case.size) for layer in case.layers()]
    return Model(layers, case.balance(), *case.data(), mean_cross_entropy)


def _remat_model(name: str) -> Model:
    """A model of `remat`."""
    layers, first, x = remat.MODELS[name]()
    balance = [first, len(layers) - first]
    return Model(layers, balance, x, jnp.zeros(len(x)), remat.mean_of_squares)


MODELS: dict[str, Callable[[str], Model]] = dict.fromkeys(
    workload.SIZES, _peers_model
) | dict.fromkeys(remat.MODELS, _remat_model)


def measure(model: Model, rounds: int) -> dict[str, Figures]:
    """The figures of each remat mode on one model."""
    pipes: dict[str, jpipe.Pipeline] = {}
    programs: dict[str, Program] = {}
    held_bytes: dict[str, int] = {}
    for mode in MODES:
        pipes[mode] = jpipe.pipeline(
            model.layers, MICROBATCHES, remat=mode, balance=model.balance
        )
        gradient = pipes[mode].value_and_grad(model.loss)
        programs[mode] = _gradient_program(pipes[mode], gradient, model)
        held_bytes[mode] = gradient.plan.stages[0].residual_bytes or 0
    seconds: dict[str, Seconds] = {
        mode: {action: [] for action in ACTIONS} for mode in MODES
    }
    for number in range(rounds + 1):
        for mode in MODES[:: 1 if number % 2 else -1]:
            run_seconds = _action_seconds(*programs[mode])
            if number:  # in the first round memory is new
                for action in ACTIONS:
                    seconds[mode][action] += run_seconds[action]

    figures: dict[str, Figures] = {}
    for mode in MODES:
        medians = [statistics.median(seconds[mode][action]) for action in ACTIONS]
        forward, backward, last = medians
        costs = Costs(forward=[forward, 0.0], backward=[backward, last])
        figures[mode] = Figures(
            held_bytes=held_bytes[mode],
            forward=forward,
            backward=backward,
            last=last,
            step=pipes[mode].schedule.simulate(costs).makespan,
        )
    return figures


def rows(name: str, figures: dict[str, Figures]) -> list[list[str]]:
    """The rows of one model in the table of `main`."""
    return [
        [
            name,
            f"`{mode}`",
            f"{costs.held_bytes / 2**20:.1f}",
            f"{1000 * costs.forward:.1f}",
            f"{1000 * costs.backward:.1f}",
            f"{1000 * (costs.forward + costs.backward):.1f}",
            f"{1000 * costs.last:.1f}",
            f"{1000 * costs.step:.0f}",
            f"{costs.step / figures['none'].step:.3f} x",
        ]
        for mode, costs in figures.items()
    ]


def _gradient_program(pipe: jpipe.Pipeline, gradient: Any, model: Model) -> Program:
    """The program of the gradients of a mini-batch, compiled, and its arguments."""
    variables = pipe.init(jax.random.key(0), model.x)
    program = gradient._program(variables, model.x, model.targets)
    program.compile()
    return program, jax.tree.leaves((variables, model.x, model.targets))


def _action_seconds(program: Any, leaves: Sequence[Any]) -> Seconds:
    """Runs a program and waits for each action."""
    seconds: Seconds = {action: [] for action in ACTIONS}
    begin = 0.0

    def observe(instruction: Any, slots: list[Any]) -> None:
        nonlocal begin
        jax.block_until_ready(slots[instruction.result_slots])
        end = time.process_time()
        label = instruction.label
        if isinstance(label, Action) and not instruction.is_move:
            seconds[f"{label.stage}{label.op}"].append(end - begin)
        begin = time.process_time()

    begin = time.process_time()
    program(leaves, observe=observe)
    return seconds


def main() -> None:
    """Prints a table.

    Its columns are `Figures`, in milliseconds and MiB, and the step by that of
    ``none``.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(workload.SIZES))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    one_thread = xla_flags("--xla_cpu_multi_thread_eigen=false")
    restart_with(KEEP_MEMORY | one_thread, "benchmarks.overhead.actions")
    if cores := separate_cores():
        os.sched_setaffinity(0, cores[:1])
    jax.config.update("jax_num_cpu_devices", 2)
    head = ["model", "remat", "MiB", "`0F`, ms", "`0B`, ms", "`0F` + `0B`, ms"]
    head += ["`1B`, ms", "step, simulated, ms", "by `none`"]
    lines: list[list[str]] = []
    for name in options.models:
        lines += rows(name, measure(MODELS[name](name), options.rounds))
    print(table(head, lines, left=2))


if __name__ == "__main__":
    main()

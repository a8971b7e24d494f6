"""The compiled calls of a pipeline's stages, on shapes and dtypes alone.

Nothing of a model has to exist for this: the stages of a model of billions of
parameters are compiled to read off their bytes, or one of them is filled with random
numbers and timed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax

import jpipe
from jpipe._api._pipelined_model import PipelinedModel
from jpipe._arguments._objective import Objective
from jpipe._instructions._compiler import PlacedExecutable
from jpipe._instructions._stage_bytes import stage_costs
from jpipe._jaxprs import _jaxpr
from jpipe._partition._partition import Partition
from jpipe._partition._stage_placement import StagePlacement
from jpipe._pipelined._specialization import Specialization
from jpipe.schedules import Action, Costs

from ..experiment import random_key

PyTree = Any


class _Apart(StagePlacement):
    """Stages that pass everything on, as if each had a device of its own."""

    @cached_property
    def devices_of_places(self) -> tuple[Any, ...]:
        return self.devices

    def place(self, stage: int, microbatch: int | None = None) -> int:
        return stage


class _PartitionApart(Partition):
    """The same for a list of layers."""

    def placement(self, num_stages: int, *, has_tail: bool = False) -> _Apart:
        pipe = super().placement(num_stages, has_tail=has_tail)
        return _Apart(*(getattr(pipe, field.name) for field in fields(StagePlacement)))


def gradient_of(
    pipe: jpipe.Pipeline, loss: Callable[..., Any], x: PyTree, targets: PyTree
) -> Specialization:
    """The mini-batch of a pipeline that a train step would compile; compiles nothing.

    Args:
      pipe: the pipeline; its stages may be on one device.
      loss: the loss function.
      x: specs of the input.
      targets: specs of the targets.

    Returns:
      The mini-batch, with the rngs of a train step.
    """
    known = pipe._pipelined_model
    layers = PipelinedModel(
        known.model,
        _PartitionApart(known.partition.options, known.placement.layer_groups),
    )
    sample = layers.model.sample_batch(x, layers.partition)
    variables = layers.model.initial(sample).specs
    key = jax.eval_shape(random_key)
    pipelined_loss = layers.loss(Objective(loss), None)
    return pipelined_loss.specialize(variables, x, targets, key, train=True)


@dataclass(frozen=True)
class Call:
    """One compiled program and the arrays that it is given, as specs.

    Attributes:
      program: a `jax.jit` function.
      args: specs of its arguments.
    """

    program: Any
    args: tuple[Any, ...]

    @cached_property
    def text(self) -> str:
        """What is computed, and what is overwritten: equal texts, equal programs."""
        traced = self.program.trace(*self.args)
        donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
        # Functions are printed with their addresses, which differ from trace to trace.
        return re.sub(r" at 0x[0-9a-f]+", "", f"{traced.jaxpr} {donated}")

    @cached_property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the arguments."""
        leaves, tree = jax.tree.flatten(self.args)
        return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


class Calls:
    """All calls of the actions of a mini-batch, those that compute the same made one.

    Args:
      gradient: the mini-batch.

    Attributes:
      distinct: the calls that differ.
      of: which of them an action runs, by its number in `distinct`; actions that run
        nothing by themselves are missing.
      costs: the bytes that the mini-batch moves and keeps.
    """

    def __init__(self, gradient: Specialization) -> None:
        program = gradient.program
        self.costs: Costs = stage_costs(program, gradient.placement.schedule)
        self.distinct: list[Call] = []
        self.of: dict[Action, int] = {}
        self._specs = list(map(_jaxpr.spec, program.specs))
        # Equal stages have one function; it is traced once.
        self._by_function: dict[Any, int] = {}
        self._by_shapes: dict[Any, list[int]] = {}
        for instruction in program.instructions:
            executable, label = instruction.executable, instruction.label
            if executable and not isinstance(label, str):
                self.of[label] = self._number(instruction.reads, executable)

    def _number(self, reads: Sequence[int], executable: PlacedExecutable) -> int:
        live_results = tuple(executable.live_results)
        key = executable.function, live_results, tuple(executable.donated)
        if key not in self._by_function:
            args = tuple(self._specs[slot] for slot in reads)
            self._by_function[key] = self._find(Call(executable.run, args))
        return self._by_function[key]

    def _find(self, call: Call) -> int:
        alike = self._by_shapes.setdefault(call.shapes, [])
        for number in alike:
            if self.distinct[number].text == call.text:
                return number
        alike.append(len(self.distinct))
        self.distinct.append(call)
        return alike[-1]

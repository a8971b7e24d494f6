"""The compiled calls of a pipeline's stages, on shapes and dtypes alone.

Nothing of a model has to exist for this: the stages of a model of billions of
parameters are compiled to read off their bytes, or one of them is filled with random
numbers and timed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

import jpipe
from jpipe._functions._objective import Objective
from jpipe._run import _execute, _memory
from jpipe._run._execute import Step
from jpipe._run._program import Program
from jpipe.schedules import Action, Costs

from ..experiment import random_key

PyTree = Any


def program_of(
    pipe: jpipe.Pipeline, loss: Callable[..., Any], x: PyTree, targets: PyTree
) -> Program:
    """The mini-batch of a pipeline that a train step would compile; compiles nothing.

    Args:
      pipe: the pipeline.
      loss: the loss function.
      x: specs of the input.
      targets: specs of the targets.

    Returns:
      The program, with the rngs of a train step.
    """
    library = pipe._library
    variables = tuple(visit.variables for visit in library.expected(x)[0])
    key = jax.eval_shape(random_key)
    find = library.gradients(Objective(loss))
    return find(variables, x, targets, key, True).program


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
    """All calls of a program, those that compute the same made one.

    Attributes:
      program: the mini-batch.
      distinct: the calls that differ.
      of: which of them an action runs, by its number in `distinct`; actions that run
        nothing by themselves are missing.
      costs: the bytes that the mini-batch moves and keeps.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.distinct: list[Call] = []
        self.of: dict[Action, int] = {}
        self._by_program: dict[int, int] = {}
        self._by_shapes: dict[Any, list[int]] = {}
        self.costs: Costs = _memory.costs_of(program)
        steps = _memory.abstract(program.steps, self._note)
        _execute.execute(steps, program.abstract_feed())

    def _note(self, step: Step, args: Sequence[Any]) -> None:
        self.of[step.action] = self._number(step, tuple(args))

    def _number(self, step: Step, args: tuple[Any, ...]) -> int:
        known = self._by_program.get(id(step.program))
        if known is not None:
            return known
        call = Call(step.program, args)
        alike = self._by_shapes.setdefault(call.shapes, [])
        for number in alike:
            if self.distinct[number].text == call.text:
                break
        else:
            number = len(self.distinct)
            self.distinct.append(call)
            alike.append(number)
        self._by_program[id(step.program)] = number
        return number

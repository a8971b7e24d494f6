"""The programs that a pipeline has compiled, and how to make the next one.

A program is compiled for structures, shapes and dtypes; every check of what the
caller gave is made here, on abstract values, before anything is compiled or moved.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from . import _microbatch, _signature, _variables
from ._gradient import Gradient
from ._layer import Layer
from ._memory import costs_of
from ._objective import Objective
from ._program import Batch, Pipe, Program
from ._rng import Rngs
from ._stage import walk
from ._task import Weights
from .schedules import Timeline

PyTree = Any
Expected = tuple[int, Layer, PyTree, PyTree]
FindGradient = Callable[[Any, PyTree, PyTree, Rngs, bool], Gradient]


class Axes(NamedTuple):
    """Where the examples are: the arguments of `jpipe.pipeline` of these names."""

    in_axes: Any
    target_axes: Any
    out_axes: int


class Inference(NamedTuple):
    """A compiled forward pass.

    Attributes:
      program: the mini-batch.
      join: joins the outputs of its micro-batches, as flat leaves.
      tree: their structure.
    """

    program: Program
    join: Callable[[Sequence[Sequence[jax.Array]]], list[jax.Array]]
    tree: Any


class Library:
    """The compiled programs of one pipeline, found by what they were compiled for.

    Attributes:
      weights: the variables seen last, for print; empty before the first.
      objective: the loss asked for last; ``None`` before the first.
      training: the program with a loss seen last, for print.
    """

    def __init__(self, pipe: Pipe, axes: Axes) -> None:
        self._pipe = pipe
        self._axes = axes
        self._inference: dict[Any, Inference] = {}
        # By objective: a loss function that is written anew for each call would
        # otherwise keep its programs for ever.
        self._gradients = lru_cache(maxsize=32)(self._find_gradients)
        self.weights: Sequence[Weights] = ()
        self.objective: Objective | None = None
        self.training: Program | None = None
        self._expected: dict[Any, list[Expected]] = {}
        self._timeline: Timeline | None = None

    def inference(
        self, variables: Any, x: PyTree, rngs: Rngs, train: bool
    ) -> Inference:
        """The forward pass for such variables and such an input."""
        signature = _signature.of(variables, x, rngs), train
        if signature not in self._inference:
            batch = self._batch(x, (), rngs)
            weights = self._check(variables, batch.x)
            program = Program(self._pipe, weights, batch, train=train)
            y, axis = program.last_task.y, self._axes.out_axes
            if len(batch.sizes) > 1:
                _microbatch.check_joinable(y, axis, batch.sizes[0])
            leaves, tree = jax.tree.flatten(y)
            join = _microbatch.joiner([axis] * len(leaves))
            self._inference[signature] = Inference(program, join, tree)
        return self._inference[signature]

    def gradients(self, objective: Objective) -> FindGradient:
        """The gradients of one objective, by what they are compiled for."""
        schedule = self._pipe.schedule
        if schedule.forward_only:
            raise ValueError(
                f"schedule {schedule.name!r} has forwards only: it can apply, not "
                f"train; build the pipeline with another, such as schedule='1f1b'"
            )
        self.objective = objective
        return self._gradients(objective)

    def _find_gradients(self, objective: Objective) -> FindGradient:
        compiled: dict[Any, Gradient] = {}

        def find(
            variables: Any, x: PyTree, targets: PyTree, rngs: Rngs, train: bool
        ) -> Gradient:
            signature = _signature.of(variables, x, targets, rngs), train
            if signature not in compiled:
                batch = self._batch(x, targets, rngs)
                weights = self._check(variables, batch.x)
                program = Program(
                    self._pipe, weights, batch, train=train, objective=objective
                )
                compiled[signature] = Gradient(program, objective)
                self.training, self._timeline = program, None
            return compiled[signature]

        return find

    def _batch(self, x: PyTree, targets: PyTree, rngs: Rngs) -> Batch:
        _variables.check_concrete(jax.tree.leaves((x, targets, rngs)))
        x = _microbatch.specs(x, "x")
        targets = _microbatch.specs(targets, "targets")
        x_axes = _microbatch.flat_axes(self._axes.in_axes, x, "x", "in_axes")
        target_axes = _microbatch.flat_axes(
            self._axes.target_axes, targets, "targets", "target_axes"
        )
        number = self._pipe.schedule.num_microbatches
        parts = [("x", x, x_axes), ("targets", targets, target_axes)]
        sizes = _microbatch.sizes(_microbatch.batch_size(parts, number), number)
        keys = None if rngs is None else _microbatch.specs(rngs, "rngs")
        return Batch(x, x_axes, targets, target_axes, keys, sizes)

    def expected(self, x: PyTree) -> list[Expected]:
        """What the layers are given and would make, for such an input.

        Args:
          x: the input, as `jax.ShapeDtypeStruct` leaves.

        Returns:
          For each layer its stage's number, itself, its input and its variables.

        Raises:
          ValueError: if one module with parameters stands in two places of the list.
        """
        signature = _signature.of(x)
        if signature not in self._expected:
            walked = list(walk(self._pipe.stages, jax.random.key(0), x))
            _check_untied([layer for _, layer, *_ in walked], [v for *_, v in walked])
            self._expected[signature] = walked
        return self._expected[signature]

    def note_weights(self, variables: Sequence[PyTree]) -> Sequence[Weights]:
        """Reads the structure of variables, or of their specs; keeps it for print."""
        stages = self._pipe.stages
        self.weights = [Weights.of(variables[stage.span]) for stage in stages]
        return self.weights

    def _check(self, variables: Any, x: PyTree) -> Sequence[Weights]:
        """Checks the variables against what the layers would make for such an input."""
        _variables.check([made for *_, made in self.expected(x)], variables)
        return self.note_weights(variables)

    def predicted(self) -> Timeline | None:
        """What a training step holds, once one is compiled; times are in units."""
        if self._timeline is None and self.training is not None:
            costs = costs_of(self.training)
            self._timeline = self._pipe.schedule.simulate(costs)
        return self._timeline


def _check_untied(layers: Sequence[Layer], specs: Sequence[PyTree]) -> None:
    seen: dict[int, int] = {}
    for number, (layer, variables) in enumerate(zip(layers, specs, strict=True)):
        first = seen.setdefault(id(layer.source), number)
        if first != number and jax.tree.leaves(variables):
            raise ValueError(
                f"layers {first} and {number} are the same {layer.name} object: "
                f"shared parameters are not in this version; list two modules, or "
                f"wrap both uses in one module"
            )

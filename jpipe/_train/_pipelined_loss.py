"""The loss of a mini-batch and its gradients, as functions in stages."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .._arguments import _microbatch
from .._arguments._batch import Batch
from .._arguments._objective import Objective
from .._arguments._trainable import Trainable
from .._check import _loss_check
from .._layers._rng import Rngs
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization

PyTree = Any


@dataclass(eq=False, repr=False)
class PipelinedLoss:
    """The loss of `value_and_grad` or `train_step`, and its gradients, in stages.

    Attributes:
      objective: the loss.
      trainable: the parameters that have gradients.
      functions: ``train`` -> the function in stages, of training or of evaluation.
      losses: ``train`` -> ``(variables, x, targets, rngs) -> ...``, which ``functions``
        trace.
      outputs: specs of the outputs that the loss was traced on: each trace of
        ``losses`` appends an entry, see `_model_functions.loss_function`.
      unchecked: the reason why the loss was not checked, for print; empty if it was.
    """

    objective: Objective
    trainable: Trainable
    functions: Mapping[bool, PipelinedFunction]
    losses: Mapping[bool, Callable[..., Any]]
    outputs: list[PyTree]
    unchecked: str = ""
    # specialization -> ``targets -> None``, which checks its loss, until it was checked
    _checks: dict[Specialization, Callable[[PyTree], None]] = field(
        default_factory=dict, init=False
    )

    @property
    def last_specialization(self) -> Specialization | None:
        """The newest specialization of training, or else of evaluation."""
        return (
            self.functions[True].last_specialization
            or self.functions[False].last_specialization
        )

    def specialize(
        self, variables: PyTree, x: PyTree, targets: PyTree, rngs: Rngs, *, train: bool
    ) -> Specialization:
        """The specialization for these arguments; checks the loss of a new one."""
        self.outputs.clear()  # after a trace that could not be built
        specialization = self.functions[train].specialize(variables, x, targets, rngs)
        if self.outputs:
            self._checks[specialization] = functools.partial(
                self._probe,
                outputs=self.outputs[0],
                variables=_microbatch.array_specs(variables, "variables"),
                batch=specialization.batch,
                train=train,
            )
        self.check_loss(specialization, targets)
        return specialization

    def check_loss(self, specialization: Specialization, targets: PyTree) -> None:
        """Checks the loss of a specialization, unless it was checked.

        Args:
          specialization: the specialization.
          targets: the targets; of specs, as `compile` may pass, no loss can be run.

        Raises:
          ValueError: if micro-batches would train another loss.
        """
        if specialization not in self._checks:
            return
        self._checks[specialization](targets)
        if not any(map(_is_spec, jax.tree.leaves(targets))):
            del self._checks[specialization]

    def _probe(
        self,
        targets: PyTree,
        *,
        outputs: PyTree,
        variables: PyTree,
        batch: Batch,
        train: bool,
    ) -> None:
        """Runs the loss alone, at once and in parts: see `_loss_check.probe`."""
        if batch.num_microbatch_shards == 1:
            return

        def trace_outputs(num_examples: int) -> PyTree:
            args = batch.microbatch_specs(num_examples)
            jax.eval_shape(lambda *args: self.losses[train](*args), variables, *args)
            return self.outputs.pop()

        num_inputs = len(jax.tree.leaves(batch.args[0]))
        num_targets = len(jax.tree.leaves(targets))
        self.unchecked = _loss_check.probe(
            self.objective,
            outputs,
            targets,
            target_axes=batch.axes[num_inputs : num_inputs + num_targets],
            batch=batch,
            trace_outputs=trace_outputs,
        )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)

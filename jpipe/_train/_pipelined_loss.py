"""The loss of a mini-batch and its gradients, as functions in stages."""

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
    # specialization -> specs of the outputs that its loss reads, until it was checked
    _outputs_to_check: dict[Specialization, PyTree] = field(
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
            self._outputs_to_check[specialization] = self.outputs[0]
        if specialization in self._outputs_to_check:
            batch = specialization.batch
            if batch.num_microbatch_shards > 1:
                self._check_loss(
                    self._outputs_to_check[specialization],
                    batch,
                    variables,
                    targets,
                    train=train,
                )
            # `compile` may pass specs, with which no loss can be run.
            if not any(map(_is_spec, jax.tree.leaves(targets))):
                del self._outputs_to_check[specialization]
        return specialization

    def _check_loss(
        self,
        outputs: PyTree,
        batch: Batch,
        variables: PyTree,
        targets: PyTree,
        *,
        train: bool,
    ) -> None:
        """Runs the loss alone, at once and in parts: see `_loss_check.probe`."""

        def trace_outputs(num_examples: int) -> PyTree:
            specs = _microbatch.array_specs(variables, "variables")
            args = batch.microbatch_specs(num_examples)
            jax.eval_shape(lambda *args: self.losses[train](*args), specs, *args)
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

"""A slice of the traced function: what one stage computes on a micro-batch."""

from dataclasses import dataclass

from jax.extend import core


@dataclass(frozen=True, eq=False)
class StageSlice:
    """The slice of one stage, on micro-batches of one size.

    Its inputs, in order: weights and activations that have a gradient, weights and
    activations that have none, then batch inputs.

    Attributes:
      weight_vars: the inputs that are the same for all micro-batches: parameters, and
        values of the prologue. Weights with a gradient come first.
      num_trained: the number of weights with a gradient.
      input_activations: the activations of other stages, those with a gradient first.
      num_input_grads: the number of activations with a gradient.
      model_inputs: the leaves of the input of the model that it reads.
      side_inputs: the other leaves of a micro-batch that it reads: targets, keys.
      differentiated_outputs: the outputs that have a cotangent: activations that other
        stages read, or the loss; without a loss, results.
      other_outputs: the outputs that have no cotangent and that other stages, or the
        user, read.
      closed: its jaxpr: ``inputs -> (*differentiated_outputs, *other_outputs)``.
    """

    weight_vars: list[core.Var]
    num_trained: int
    input_activations: list[core.Var]
    num_input_grads: int
    model_inputs: list[core.Var]
    side_inputs: list[core.Var]
    differentiated_outputs: list[core.Var]
    other_outputs: list[core.Var]
    closed: core.ClosedJaxpr

    @property
    def batch_inputs(self) -> list[core.Var]:
        """The leaves of a micro-batch that it reads."""
        return [*self.model_inputs, *self.side_inputs]

    @property
    def outputs(self) -> list[core.Var]:
        """All outputs, in the order of its jaxpr."""
        return [*self.differentiated_outputs, *self.other_outputs]

    @property
    def has_weight_grads(self) -> bool:
        """True if a weight of the stage is trained."""
        return self.num_trained > 0

    @property
    def has_backward(self) -> bool:
        """True if a weight of the stage, or of one before it, is trained."""
        return self.num_trained + self.num_input_grads > 0

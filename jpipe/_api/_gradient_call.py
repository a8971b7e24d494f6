"""The loss of a mini-batch and its gradients, in the structures that users hold."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._arguments import _variables
from .._check._report import CheckReport
from .._instructions._program import Program
from .._layers._rng import Rngs
from .._messages import warn
from .._pipelined._specialization import Specialization
from .._placed._mesh_context import outside_of_meshes
from .._train._pipelined_loss import PipelinedLoss
from ..schedules import Timeline
from ._compile_report import Report, compile_report
from ._handle import explain_method
from ._loss_methods import LossMethods
from ._pipelined_model import PipelinedModel
from ._step_profile import profile_actions

PyTree = Any


class ValueAndGrad(LossMethods):
    """``f(variables, x, targets)``: see `Pipeline.value_and_grad`, which makes it.

    ``print`` shows its stages, the bytes of a call, and why its loss was not checked
    if it was not.

    Args:
      pipelined_model: the model.
      pipelined_loss: its loss and gradients, in stages.
      has_state: True if the collections that training changes are returned too.
    """

    def __init__(
        self,
        pipelined_model: PipelinedModel,
        pipelined_loss: PipelinedLoss,
        *,
        has_state: bool,
    ) -> None:
        super().__init__(pipelined_model, pipelined_loss)
        self._has_aux = pipelined_loss.objective.has_aux
        self._has_state = has_state
        self._feed = pipelined_model.feed("pipe.value_and_grad(loss_fn)")
        # True after the warning of collections that it does not return.
        self._has_warned = False

    @outside_of_meshes
    @explain_method("f(variables, x, targets) of f = pipe.value_and_grad(loss_fn)")
    def __call__(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Any:
        """Computes the loss and its gradients; returns as soon as both are dispatched.

        Args:
          variables: the variables, as `Pipeline.init` returns them, in place.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.
          rngs: a key, or keys by stream name.
          train: the value for layers that ask whether they are trained.

        Returns:
          ``(loss, grads)``; ``((loss, aux), grads)``, ``((loss, state), grads)`` or
          ``((loss, aux, state), grads)``.

        Raises:
          ValueError: if batch, targets or variables do not fit.
          TypeError: if the loss function does not return a loss, or loss and aux.
        """
        x, targets = self._feed(x, targets, rngs)
        specialization = self._pipelined_loss.specialize(
            variables, x, targets, rngs, train=train
        )
        program = self._program_of(specialization)
        leaves = specialization.check_arguments(variables, (x, targets, rngs))
        outputs = program(leaves)
        layout = specialization.layout
        results = specialization.unpack(
            outputs, layout.state_indices if self._has_state else ()
        )
        (loss,) = results.loss
        aux = specialization.aux_tree.unflatten(results.aux)
        # The variables, with gradients in place of parameters.
        result_leaves = leaves[: len(layout.specs)]
        for index in layout.param_indices:
            result_leaves[index] = (
                results.grads[index]
                if index in results.grads
                else self._no_grad(leaves[index])
            )
        for index, value in results.new_state.items():
            result_leaves[index] = value
        result_tree = layout.join_params(result_leaves)

        extra = [aux] if self._has_aux else []
        if self._has_state:
            extra.append(_variables.model_state(result_tree))
        elif specialization.written and not self._has_warned:
            self._has_warned = True
            written = [index for index, _ in specialization.written]
            _warn_of_state(_variables.collections(variables, written))
        value = (loss, *extra) if extra else loss
        return value, _variables.params(result_tree)

    @outside_of_meshes
    @explain_method("f.compile(variables, x, targets)")
    def compile(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Report:
        """Compiles all programs that the first call would compile, side by side.

        Args:
          variables: as for a call; specs (`jax.ShapeDtypeStruct`) will do for arrays.
          x: likewise.
          targets: likewise.
          rngs: likewise.
          train: as for a call.

        Returns:
          A report of bytes, flops and seconds. It prints as a table.

        Raises:
          ValueError: if batch, targets or variables do not fit.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([jnp.sin], num_microbatches=2)
          >>> f = pipe.value_and_grad(lambda y, t: jnp.mean((y - t) ** 2))
          >>> report = f.compile(({},), jnp.ones(4), jnp.ones(4))
          >>> report.flops > 0
          True
        """
        return compile_report(
            lambda: self._program(variables, x, targets, rngs=rngs, train=train)
        )

    @outside_of_meshes
    @explain_method("f.check(variables, x, targets)")
    def check(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
        microbatch_sizes: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches, and compares.

        It compares the layers as `Pipeline.check` does; of gradients by parameters
        those that are trained. Then it compares the loss and its gradient by the
        outputs.

        Args:
          variables: as for a call, or on the host.
          x: an input, of two examples at least, such as two micro-batches.
          targets: its targets.
          rngs: as for a call; a model with dropout needs any key.
          train: as for a call.
          microbatch_sizes: as for `Pipeline.check`.
          tolerance: as for `Pipeline.check`.

        Returns:
          A report. It prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch, ``microbatch_sizes`` or the variables do not fit, or
            there are several processes.
          TypeError: if a leaf of the batch is not an array.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([jnp.sin], num_microbatches=2)
          >>> f = pipe.value_and_grad(lambda y, t: jnp.max((y - t) ** 2))
          >>> x = jax.random.normal(jax.random.key(0), (6, 2))
          >>> report = f.check(({},), x, x)
          >>> report.layers[0].is_same, report.loss.is_same
          (True, False)
        """
        return self._check(
            variables,
            x,
            targets,
            rngs=rngs,
            train=train,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )

    @outside_of_meshes
    @explain_method("f.profile(variables, x, targets)")
    def profile(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Timeline:
        """Runs the gradients of a mini-batch with each action timed.

        Each action is waited for, so the whole takes somewhat longer than a call.

        Args:
          variables: as for a call.
          x: as for a call.
          targets: as for a call.
          rngs: as for a call.
          train: as for a call.

        Returns:
          The measured timeline, in seconds and bytes: see `TrainStep.profile`.

        Raises:
          ValueError: if batch, targets or variables do not fit, or there are several
            processes.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([jnp.sin], num_microbatches=2)
          >>> f = pipe.value_and_grad(lambda y, t: jnp.mean((y - t) ** 2))
          >>> f.profile(({},), jnp.ones(4), jnp.ones(4)).makespan > 0
          True
        """
        specialization = self._pipelined_loss.specialize(
            variables, x, targets, rngs, train=train
        )
        leaves = specialization.check_arguments(variables, (x, targets, rngs))
        return profile_actions(specialization, leaves)

    @outside_of_meshes
    def _program(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: Rngs = None,
        train: bool = True,
    ) -> Program:
        """The program that a call with these arguments runs."""
        specialization = self._pipelined_loss.specialize(
            variables, x, targets, rngs, train=train
        )
        return self._program_of(specialization)

    def _program_of(self, specialization: Specialization) -> Program:
        if self._has_state:
            return specialization.program_with_state
        return specialization.program

    def _no_grad(self, leaf: Any) -> Any:
        """The placeholder for the gradient of a leaf that has none.

        It is ``None``, or, if ``trainable`` was left out, that of `jax.grad` for
        integers.
        """
        if not self._pipelined_loss.trainable.selects_all:
            return None
        return np.zeros(leaf.shape, jax.dtypes.float0)


def _warn_of_state(collections: str) -> None:
    """Warns that a call without ``has_state`` does not return what training changes."""
    warn(
        f"value_and_grad leaves {collections} as given, which training changes; type "
        f"value_and_grad(..., has_state=True), which returns ((loss, state), grads), "
        f"or take a train_step, which keeps them"
    )

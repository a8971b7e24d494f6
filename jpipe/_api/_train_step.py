"""The training step: gradients of a mini-batch, then one update.

All of it is one program, compiled once per signature of state and batch: see
`_train._lowered_step`. A state that the step returned itself is not checked again: see
`StateOrigin`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._arguments import _signature, _variables
from .._arguments._cache import RecentCache
from .._arguments._signature import SignatureIndices
from .._check._report import CheckReport
from .._instructions._interrupts import Interrupts
from .._instructions._program import Observer, Program
from .._jaxprs import _nan_location
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._train._lowered_step import LoweredStep, make_optimizer
from .._train._optimizer import Optimizer
from .._train._pipelined_loss import PipelinedLoss
from .._train._train_state import (
    TrainState,
    become,
    check_apart,
    check_state,
    origin_of,
)
from ..schedules import Timeline
from ._compile_report import Report, compile_report
from ._handle import explain_method
from ._loss_methods import LossMethods
from ._pipelined_model import PipelinedModel
from ._step_profile import profile_actions

PyTree = Any
# Arguments that a step does not take -> what to type.
_ADVICE_ON = {
    "rngs": "the keys of a step follow from state.rng and state.step: "
    "pipe.init_train_state(key, x, tx, rngs=...) names them",
    "train": "a step trains; pipe.apply(variables, x) evaluates",
}


class TrainStep(LossMethods):
    """``step(state, x, targets) -> (state, metrics)``; made by `Pipeline.train_step`.

    ``print`` shows its stages, the bytes of a step, and why its loss was not checked
    if it was not.

    Args:
      pipelined_model: the model.
      pipelined_loss: the loss and its gradients, in stages.
      tx: the optimizer.
      donate: True if the state is overwritten.
      skip_nonfinite: True if nothing changes where a gradient is not finite.
    """

    def __init__(
        self,
        pipelined_model: PipelinedModel,
        pipelined_loss: PipelinedLoss,
        *,
        tx: optax.GradientTransformation,
        donate: bool,
        skip_nonfinite: bool,
    ) -> None:
        super().__init__(pipelined_model, pipelined_loss)
        self._tx = tx
        self._donate = donate
        self._skip_nonfinite = skip_nonfinite
        self._feed = pipelined_model.feed("pipe.train_step(loss_fn, tx)")
        self._by_layer = pipelined_model.model.is_list
        self._signature_indices = SignatureIndices()
        # (settings, signature index of the state) -> optimizer
        self._optimizers = RecentCache[Any, Optimizer]()
        # (settings, signature index of the state, signature of the batch) -> step
        self._lowered_steps = RecentCache[Any, LoweredStep]()

    @explain_method("step(state, x, targets)", _ADVICE_ON)
    def __call__(
        self, state: TrainState, x: PyTree, targets: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step. Returns as soon as the work is dispatched.

        Args:
          state: the state; its arrays are donated, unless ``donate=False``.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.

        Returns:
          The new state, and ``{"loss": ...}`` with ``"aux"`` where there is one; with
          ``skip_nonfinite`` also ``"skipped"``, 1 where nothing was changed, else 0.

        Raises:
          KeyboardInterrupt: as ever; then ``state`` is as it was, or, if it was being
            overwritten, what the step would have returned: ``state.step`` tells.
          ValueError: if the state or the batch does not fit; nothing is changed.
          TypeError: if a leaf of the batch is not an array; nothing is changed.
        """
        # The new state, as soon as there is one: an interrupt may come when the old one
        # is overwritten and the new one has not reached the caller.
        new_states: list[TrainState] = []
        try:
            return self._take(state, x, targets, new_states=new_states)
        except BaseException:
            if new_states and self._may_donate():
                become(state, new_states[0])
            raise

    @outside_of_meshes
    def _take(
        self,
        state: TrainState,
        x: PyTree,
        targets: PyTree,
        *,
        new_states: list[TrainState],
        observe: Observer | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step; appends the new state to ``new_states`` before it returns."""
        check_state(state, by_layer=self._by_layer)
        x, targets = self._feed(x, targets)
        leaves, structure = jax.tree.flatten(state)
        origin = origin_of(state)
        if origin is not None and not origin.matches(self, leaves):
            origin = None
        if origin is None:
            signature_index = self._signature_indices(structure, leaves)
        else:
            signature_index = origin.signature_index
        _variables.check_alive(leaves)

        step = self._step_for(signature_index, state, x, targets)
        if origin is None:
            _variables.check_concrete(leaves)
            inner_state = step.split_state(state)
            leaves = jax.tree.leaves(inner_state)
            variables = [leaves[i] for i in step.variable_indices]
            step.specialization.layout.check(variables, "state")
            step.optimizer.check_places(inner_state.opt_state)
            check_apart(inner_state, step.program)
        else:
            leaves = origin.inner_leaves
        batch = jax.tree.leaves((x, targets))
        _variables.check_concrete(batch)

        with Interrupts() as interrupts:
            outputs = step.program(
                [*leaves, *batch], observe=observe, overwriting=interrupts.hold
            )
            new_state, metrics = step.result(outputs, self)
            new_states.append(new_state)
        return new_state, metrics

    @outside_of_meshes
    @explain_method("step.compile(state, x, targets)", _ADVICE_ON)
    def compile(self, state: TrainState, x: PyTree, targets: PyTree) -> Report:
        """Compiles all programs that the first step would compile, side by side.

        Args:
          state: a train state; specs (`jax.ShapeDtypeStruct`) will do for arrays.
          x: the input of a mini-batch, likewise.
          targets: its targets, likewise.

        Returns:
          A report of bytes, flops and seconds. It prints as a table.

        Raises:
          ValueError: if the state or the batch does not fit.
          TypeError: if ``state`` is no `TrainState`.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jnp.ones((4, 3))
          >>> tx = optax.sgd(0.1)
          >>> state = pipe.init_train_state(jax.random.key(0), x, tx)
          >>> step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx)
          >>> report = step.compile(state, x, x)
          >>> report.flops > 0, int(state.step)
          (True, 0)
        """
        return compile_report(lambda: self._program(state, x, targets))

    @outside_of_meshes
    @explain_method("step.check(state, x, targets)", _ADVICE_ON)
    def check(
        self,
        state: TrainState,
        x: PyTree,
        targets: PyTree,
        *,
        microbatch_sizes: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches, and compares.

        It compares the layers as `Pipeline.check` does, in training, with the keys of
        the next step; of gradients by parameters those that are trained. Then it
        compares the loss and its gradient by the outputs.

        Args:
          state: a train state, in place or on the host.
          x: an input, of two examples at least, such as two micro-batches.
          targets: its targets.
          microbatch_sizes: as for `Pipeline.check`.
          tolerance: as for `Pipeline.check`.

        Returns:
          A report. It prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch, ``microbatch_sizes`` or the state do not fit, or
            there are several processes.
          TypeError: if a leaf of the batch is not an array.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jax.random.normal(jax.random.key(0), (6, 3))
          >>> tx = optax.sgd(0.1)
          >>> state = pipe.init_train_state(jax.random.key(1), x, tx)
          >>> step = pipe.train_step(lambda y, t: jnp.max((y - t) ** 2), tx)
          >>> report = step.check(state, x, 2 * x)
          >>> report.layers[0].is_same, report.loss.is_same
          (True, False)
        """
        check_state(state, by_layer=self._by_layer)
        return self._check(
            state.variables,
            x,
            targets,
            rngs=_rng.step_keys(state.rng, state.step),
            train=True,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )

    @outside_of_meshes
    @explain_method("step.profile(state, x, targets)", _ADVICE_ON)
    def profile(self, state: TrainState, x: PyTree, targets: PyTree) -> Timeline:
        """Runs the gradients of the next step with each action timed.

        Each action is waited for, so the whole takes somewhat longer than a step. The
        state stays as it is.

        Args:
          state: a train state, in place.
          x: the input of a mini-batch.
          targets: its targets.

        Returns:
          The measured timeline, in seconds and bytes. `Schedule.simulate` predicts from
          its ``costs``, the median times and the bytes of each stage.

        Raises:
          ValueError: if the state or the batch does not fit, or there are several
            processes.
          TypeError: if ``state`` is no `TrainState`.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jnp.ones((4, 3))
          >>> tx = optax.sgd(0.1)
          >>> state = pipe.init_train_state(jax.random.key(0), x, tx)
          >>> step = pipe.train_step(lambda y, t: jnp.mean((y - t) ** 2), tx)
          >>> measured = step.profile(state, x, x)
          >>> pipe.schedule.simulate(measured.costs).makespan > 0
          True
        """
        check_state(state, by_layer=self._by_layer)
        rngs = _rng.step_keys(state.rng, state.step)
        specialization = self._pipelined_loss.specialize(
            state.variables, x, targets, rngs, train=True
        )
        leaves = specialization.check_arguments(
            state.variables, (x, targets, rngs), "state"
        )
        return profile_actions(specialization, leaves)

    @outside_of_meshes
    def _program(self, state: TrainState, x: PyTree, targets: PyTree) -> Program:
        """The program that a call with these arguments runs."""
        check_state(state, by_layer=self._by_layer)
        leaves, structure = jax.tree.flatten(state)
        signature_index = self._signature_indices(structure, leaves)
        return self._step_for(signature_index, state, x, targets).program

    def _may_donate(self) -> bool:
        """True if a state is overwritten: not if a program is expected to fail.

        A state that was overwritten when the program failed could not be restored.
        """
        return self._donate and not _nan_location.is_checking()

    def _step_for(
        self, signature_index: int, state: TrainState, x: PyTree, targets: PyTree
    ) -> LoweredStep:
        """Returns the step for the signature of a state and a batch, lowered once.

        It checks all shapes. XLA compiles the program when it runs first.

        Args:
          signature_index: the index of the state's signature.
          state: the state.
          x: the input of the mini-batch.
          targets: its targets.
        """
        state_key = _signature.settings(), signature_index
        key = state_key, _signature.tree_signature(x, targets)
        if key not in self._lowered_steps:
            # Keys that are not folded will do: the program makes those of the step.
            specialization = self._pipelined_loss.specialize(
                state.variables, x, targets, state.rng, train=True
            )
            # Another batch size needs another specialization, not another optimizer.
            if state_key not in self._optimizers:
                self._optimizers[state_key] = make_optimizer(
                    self._tx,
                    state,
                    specialization,
                    skip_nonfinite=self._skip_nonfinite,
                )
            optimizer = self._optimizers[state_key]
            self._lowered_steps[key] = LoweredStep(
                specialization,
                optimizer,
                state,
                signature_indices=self._signature_indices,
                has_aux=self._pipelined_loss.objective.has_aux,
                donate=self._may_donate(),
            )
        step = self._lowered_steps[key]
        # `compile` may have lowered it for specs, of which no loss can be run.
        self._pipelined_loss.check_loss(step.specialization, targets)
        return step


def take_observed_step(
    step: TrainStep, state: TrainState, x: PyTree, targets: PyTree, observe: Observer
) -> tuple[TrainState, dict[str, Any]]:
    """Takes a step, after each of whose instructions a function is called."""
    return step._take(state, x, targets, new_states=[], observe=observe)

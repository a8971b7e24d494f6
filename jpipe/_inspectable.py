"""What one can know of a pipeline: its plan, its check, its timed actions."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from ._check._report import CheckReport
from ._functions._objective import Objective
from ._instructions import _transfer
from ._instructions._sharding import SubMesh
from ._layers import _rng
from ._pipelined_model import UNKNOWN, PipelinedModel
from ._profile import profile, split_batch
from ._report import Report, compile_report
from ._run._context import outside_of_meshes
from ._train._gradients import Gradients
from ._train._state import TrainState, check_state
from .planning._describe import Known, describe
from .planning._plan import Forecast, Plan
from .schedules import Schedule, Timeline

PyTree = Any


class Inspectable:
    """The methods of a pipeline that show what it is and does."""

    _pipelined: PipelinedModel
    _forecast: Forecast | None
    # The gradients that were made last, and those before that had a mini-batch.
    _made: Gradients | None = None
    _used: Gradients | None = None
    _gradients: Callable[[Objective, Any], Gradients]
    apply: Callable[..., Any]

    @property
    def num_stages(self) -> int:
        """The number of stages.

        Raises:
          ValueError: of a model, before it is known.
        """
        return self.schedule.num_stages

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self._pipelined.num_microbatches

    @property
    def schedule(self) -> Schedule:
        """Who runs which action, in which order.

        Raises:
          ValueError: before it is known in how many stages a model is divided.
        """
        return self._pipelined.pipe.schedule

    @property
    def devices(self) -> tuple[_transfer.Device | Mesh, ...]:
        """The device of each stage, or its mesh."""
        return tuple(
            device.mesh if isinstance(device, SubMesh) else device
            for device in self._pipelined.pipe.devices
        )

    @property
    @outside_of_meshes
    def plan(self) -> Plan:
        """Who runs what, in names and numbers; with more details the more is known.

        Raises:
          ValueError: before it is known in how many stages a model is divided.
        """
        known = self._known
        if known is None:
            raise ValueError(UNKNOWN)
        return describe(known, self._forecast)

    @property
    def _last(self) -> Gradients | None:
        """The gradients that a mini-batch was given last, or that were made last."""
        return self._made if self._made and self._made.last else self._used

    @property
    def _known(self) -> Known | None:
        return self._pipelined.describe(self._last.last if self._last else None)

    def __repr__(self) -> str:
        known = self._pipelined.num_stages is not None
        what = f"{self.num_stages} stages, " if known else ""
        schedule = f", {self.schedule.name}" if known else ""
        return (
            f"<jpipe.Pipeline: {self._pipelined} in {what}{self.num_microbatches} "
            f"micro-batches{schedule}>"
        )

    @outside_of_meshes
    def __str__(self) -> str:
        if self._known is None:
            return f"{self!r}\n{UNKNOWN}"
        why = self._last.unchecked if self._last else ""
        return str(self.plan) + (f"\nthe loss was not checked: {why}" if why else "")

    def compile(self, function: Any, *args: Any, **kwargs: Any) -> Report:
        """Compiles now what the first call would compile, side by side.

        Args:
          function: what `train_step` or `value_and_grad` returned, or `apply`.
          *args: what it would be called with; of arrays, specs
            (`jax.ShapeDtypeStruct`) will do.
          **kwargs: likewise, by name.

        Returns:
          What is then known: bytes, flops, seconds. It prints as a table.

        Raises:
          TypeError: if the function is none of these.
          ValueError: if the arguments do not fit the model.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jnp.ones((4, 3))
          >>> variables = pipe.init(jax.random.key(0), x)
          >>> report = pipe.compile(pipe.apply, variables, x)
          >>> sum(program.calls for program in report.programs)
          4
        """
        if getattr(function, "__func__", None) is type(self).apply:
            lower = function.__self__._inference
        elif hasattr(function, "program"):
            lower = function.program
        else:
            raise TypeError(
                f"pipe.compile takes what pipe.train_step or pipe.value_and_grad "
                f"returned, or pipe.apply, and its arguments; not "
                f"{reprlib.repr(function)}"
            )
        return compile_report(lambda: lower(*args, **kwargs))

    @outside_of_meshes
    def check(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        reduction: str = "mean",
        has_aux: bool = False,
        rngs: _rng.Rngs = None,
        train: bool = True,
        microbatch_sizes: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches, and compares.

        Compared are outputs, what training writes, and gradients by the input and the
        parameters; then the loss and its gradient. Each layer is given what the one
        before it made of all examples at once. Flax's batch norms, which normalize
        each micro-batch by itself, are left out of outputs, and their statistics are
        compared as they are merged. Of the keys in ``rngs`` all random numbers are the
        middle one: a dropout leaves out nothing. All is computed on the device of the
        first stage, one layer after the other. A dropout, batch norm or attention that
        is off in training, since an argument on the way to it was left at its default,
        is noted beside its layer with the line to type.

        Args:
          variables: one entry per layer.
          x: an input, of two examples at least, such as two micro-batches.
          targets: its targets.
          loss_fn: as for `value_and_grad`; ``None``: layers only.
          reduction: as for `value_and_grad`.
          has_aux: as for `value_and_grad`.
          rngs: as for `apply`.
          train: whether layers are run as in training.
          microbatch_sizes: how many examples each micro-batch has, such as
            ``(4, 8)``; default: two of different sizes.
          tolerance: how far numbers may be apart, relative to the largest of the same
            example; default: as far as rounding explains in the narrowest dtype that a
            layer computes in.

        Returns:
          What was found: prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch, ``microbatch_sizes`` or the variables do not fit, or
            there are several processes.
          TypeError: if a leaf of the batch is not an array.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> layers = [jnp.sin, lambda x: x - x.mean(0)]
          >>> pipe = jpipe.pipeline(layers, num_microbatches=2)
          >>> x = jax.random.normal(jax.random.key(0), (6, 2))
          >>> report = pipe.check(({}, {}), x)
          >>> [layer.is_same for layer in report.layers]
          [True, False]
        """
        objective = None
        if loss_fn is not None:
            objective = Objective(loss_fn, has_aux, reduction)
        from ._checking import checked  # which a step does not need

        return checked(
            self._pipelined,
            variables,
            x,
            targets,
            objective=objective,
            rngs=rngs,
            train=train,
            tolerance=tolerance,
            microbatch_sizes=microbatch_sizes,
        )

    @outside_of_meshes
    def profile_step(
        self,
        state: TrainState,
        batch: tuple[PyTree, PyTree],
        loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
        *,
        has_aux: bool = False,
        reduction: str = "mean",
        trainable: Any = None,
    ) -> Timeline:
        """Runs the gradients of a mini-batch with each action timed.

        Each action is waited for, so the whole takes somewhat longer than a step.

        Args:
          state: a train state, in place.
          batch: the input and the targets.
          loss_fn: as for `train_step`; default: all is as in the step built last.
          has_aux: as for `train_step`.
          reduction: as for `train_step`.
          trainable: as for `train_step`.

        Returns:
          What was measured, in seconds and bytes. Its ``costs``, the median times and
          the bytes of each stage, are what `Schedule.simulate` predicts from.

        Raises:
          ValueError: if there is no loss yet, or the state or the batch does not fit.
          TypeError: if ``batch`` is not a pair.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jnp.ones((4, 3))
          >>> state = pipe.init_train_state(jax.random.key(0), x, optax.sgd(0.1))
          >>> square = lambda y, t: jnp.mean((y - t) ** 2)
          >>> measured = pipe.profile_step(state, (x, x), square)
          >>> pipe.schedule.simulate(measured.costs).makespan > 0
          True
        """
        check_state(state, by_layer=self._pipelined.model.is_list)
        x, targets = split_batch(batch)
        gradients = self._made
        if loss_fn is not None:
            objective = Objective(loss_fn, has_aux, reduction)
            is_last = gradients and gradients.is_of(objective, trainable)
            if not is_last:
                gradients = self._gradients(objective, trainable)
        if gradients is None:
            raise ValueError(
                "no step was built yet whose loss could be profiled; give loss_fn="
            )
        key = _rng.step_key(state.rng, state.step)
        built = gradients(state.variables, x, targets, key, train=True)
        leaves = built.given(state.variables, (x, targets, key), "state")
        return profile(built, leaves)

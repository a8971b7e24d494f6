"""A pipeline: what its user can do with it."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import optax
from jax.sharding import Mesh

from .._arguments import _variables
from .._arguments._objective import Objective
from .._arguments._trainable import Trainable
from .._check._report import CheckReport
from .._instructions import _transfer
from .._instructions._program import Program
from .._instructions._sharding import StageMesh
from .._layers import _rng
from .._placed._mesh_context import outside_of_meshes
from .._train._gradient_call import ValueAndGrad
from .._train._gradients import Gradients
from .._train._train_state import TrainState, check_state
from .._train._train_step import TrainStep
from .._train._transformation import check_optimizer
from ..planning._describe import PipelineInfo, describe
from ..planning._plan import Forecast, Plan
from ..schedules import Schedule, Timeline
from . import _train_states
from ._compile_report import Report, compile_report
from ._custom_loop import CustomLoop
from ._pipelined_model import UNKNOWN, PipelinedModel
from ._step_profile import profile, split_batch

PyTree = Any
LossFunction = Callable[[PyTree, PyTree], Any]


class Pipeline(CustomLoop):
    """A model spread over devices; made by `pipeline`. It holds no arrays.

    Of a list of layers, variables, gradients and states have one entry per layer; of
    one model they are trees of the model's own.
    """

    def __init__(
        self, pipelined: PipelinedModel, forecast: Forecast | None = None
    ) -> None:
        super().__init__(pipelined.places)
        self._pipelined = pipelined
        self._forecast = forecast
        self._feed = pipelined.feed()
        # The gradients that were made last, and the last ones that had a mini-batch.
        self._last_made: Gradients | None = None
        self._last_used: Gradients | None = None

    # ------------------------------------------------------------------ what it is

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
            device.mesh if isinstance(device, StageMesh) else device
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
        return (
            self._last_made
            if self._last_made and self._last_made.last
            else self._last_used
        )

    @property
    def _known(self) -> PipelineInfo | None:
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

    # ------------------------------------------------------- variables and programs

    @outside_of_meshes
    def init(self, key: chex.PRNGKey | None, x: PyTree) -> Any:
        """Makes the variables of all layers, each on its layer's device.

        The values depend on the key, the layer's number and shapes only, not on
        balance, devices or schedule. Of ``x`` only shapes and dtypes are used. What an
        initializer makes weakly typed, as optax does not leave it, is strongly typed.
        Each layer is made on the first device and moved, so that device needs room for
        one more.

        Args:
          key: a JAX random key; ``None`` will do where all variables are those that
            nnx modules hold.
          x: an input, or its `jax.ShapeDtypeStruct` leaves. Layers are made for its
            first micro-batch, as they run; for all of it if it has fewer examples.

        Returns:
          One entry per layer: its Flax variables, ``{}`` where it has none. Of a model
          what ``model.init(key, x)`` gives; of an nnx module its values, by collection.

        Raises:
          TypeError: if a leaf of ``x`` is not an array.
          ValueError: if the dtype of an output hangs on whether a variable is weakly
            typed.
        """
        return self._pipelined.init(key, x)

    @outside_of_meshes
    def place(self, tree: Any, x: PyTree = None) -> Any:
        """Puts variables, or a train state, on the devices of their layers.

        Args:
          tree: variables, one entry per layer, or a `TrainState`; on the host or any
            devices: from a pipeline of another balance, or from a checkpoint.
          x: of a model that was not divided yet an input, or specs of one.

        Returns:
          The same values in place. What was there already is not copied: a step that
          overwrites the result overwrites it in ``tree`` too.

        Raises:
          ValueError: if there is not one entry per layer, or a step overwrote it.
        """
        _variables.check_alive(jax.tree.leaves(tree))
        if isinstance(tree, TrainState):
            return _train_states.place_train_state(self._pipelined, tree, x)
        return self._pipelined.place(tree, x)

    @outside_of_meshes
    def apply(
        self,
        variables: PyTree,
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = False,
    ) -> PyTree:
        """Applies all layers, forward only.

        Args:
          variables: one entry per layer, in place.
          x: the input, on the host or any device.
          rngs: a key, or keys by stream name such as ``{"dropout": key}``.
          train: given to layers that take ``train``, ``deterministic`` or
            ``use_running_average``. What training changes besides parameters is left
            as given, which is warned of.

        Returns:
          The output of the last layer for the whole mini-batch, on its device.

        Raises:
          ValueError: if the batch or the variables do not fit the model.
          TypeError: if a leaf of ``x`` is not an array.
        """
        x, _ = self._feed(x, rngs=rngs)
        built = self._pipelined.forward(variables, x, rngs, train=train)
        found = built.program(built.given(variables, (x, rngs)))
        return jax.tree.unflatten(built.aux_tree, found)

    @outside_of_meshes
    def _inference(
        self, variables: Any, x: PyTree, *, rngs: _rng.Rngs = None, train: bool = False
    ) -> Program:
        return self._pipelined.forward(variables, x, rngs, train=train).program

    def value_and_grad(
        self,
        loss_fn: LossFunction,
        *,
        has_aux: bool = False,
        has_state: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
    ) -> Callable[..., Any]:
        """The loss of a mini-batch and its gradients, as `jax.value_and_grad`.

        Args:
          loss_fn: ``(outputs, targets) -> scalar``, applied to each micro-batch on the
            last device. It is known again as by `jax.jit`, by its hash and equality.
          has_aux: whether ``loss_fn`` returns ``(loss, aux)``; with ``"weighted"``
            ``((total, weight), aux)``.
          has_state: whether the other collections, such as ``batch_stats``, are
            returned as they are after the mini-batch, one entry per layer: the next
            variables are ``[{**own, **new} for own, new in zip(variables, state)]``.
          aux_axes: on which axes the micro-batches' aux are joined, as ``out_axes`` of
            `jax.vmap`: an int, or a pytree of ints and ``None`` that is a prefix of
            aux. ``None``: they are stacked along a new first axis. `jpipe.MEAN`: the
            mean over the examples, of integers what the last micro-batch returns.
            `jpipe.SUM`: the sum. What follows from no example is that of one device,
            where an axis is named.
          reduction: how micro-batches combine. ``"mean"``: the loss is a mean over
            examples. ``"sum"``: it is a sum. ``"weighted"``: ``loss_fn`` returns
            ``(total, weight)`` and the loss is the sum of totals over the sum of
            weights, taken as constants. ``"microbatch_mean"``: the mean of what each
            micro-batch gives by itself. A loss of another reduction raises.
            Cotangents are as large as on one device; where a weight follows from more
            than targets, they are those of the total.
          trainable: which parameters have gradients; default: all. By path, from the
            layer's number on: text with wildcards, such as ``"*/lora_*"``, that matches
            a leaf or all below; by ``(path, leaf) -> bool``, where a path is
            ``(2, "query", "lora_a")``; by what `flax.nnx` takes as a filter of
            Variables, such as `nnx.LoRAParam`; or by a list of these. The rest costs
            nothing. Other collections change in training all the same: what freezes
            the statistics of a batch norm is its own ``use_running_average=True``.

        Returns:
          ``f(variables, x, targets, *, rngs=None, train=True) -> (loss, grads)``;
          ``((loss, aux), grads)``, ``((loss, state), grads)`` or ``((loss, aux,
          state), grads)``: ``grads[i]`` has the structure of
          ``variables[i]["params"]`` and its device, with ``None`` where ``trainable``
          left a leaf out: optax then takes parameters with the same gaps.

        Raises:
          ValueError: if the reduction is unknown; from ``f``, if batch, targets or
            variables do not fit, the loss is not of this ``reduction``, or
            ``trainable`` selects nothing.
          TypeError: if ``loss_fn`` or ``trainable`` is nothing such; from ``f``, if
            ``loss_fn`` does not return what was agreed.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([lambda x: 2 * x], num_microbatches=2)
          >>> square = lambda y, t: jnp.mean((y - t) ** 2)
          >>> loss, grads = pipe.value_and_grad(square)(({},), jnp.ones(4), jnp.ones(4))
          >>> float(loss), grads
          (1.0, ({},))
        """
        objective = Objective(loss_fn, has_aux, reduction, aux_axes)
        return ValueAndGrad(
            self._gradients(objective, trainable),
            has_aux=has_aux,
            has_state=has_state,
            feed=self._pipelined.feed(),
        )

    def _gradients(self, objective: Objective, trainable: Any) -> Gradients:
        """The gradients of an objective, which are remembered.

        Raises:
          ValueError: if the schedule cannot train.
        """
        if self._pipelined.num_stages:
            self._pipelined.pipe.check_trains()
        if self._last_made and self._last_made.last:
            self._last_used = self._last_made
        chosen = Trainable(trainable, self._pipelined.model.is_list)
        self._last_made = self._pipelined.gradients(objective, chosen)
        return self._last_made

    @outside_of_meshes
    def init_train_state(
        self,
        key: chex.PRNGKey,
        x: PyTree,
        tx: optax.GradientTransformation,
        *,
        variables: PyTree = None,
        trainable: Any = None,
    ) -> TrainState:
        """Makes everything that training changes, each part where it is used.

        Args:
          key: a JAX random key; the state keeps a key that follows from it.
          x: an input, or its `jax.ShapeDtypeStruct` leaves.
          tx: the optax optimizer.
          variables: what to start from instead of `init`, such as pretrained ones, on
            the host or any devices: one entry per layer, ``None`` for a layer that is
            initialized. They are copied.
          trainable: as for `value_and_grad`; ``tx`` sees ``None`` for the rest.

        Returns:
          The state at step 0.

        Raises:
          TypeError: if ``tx`` is not an optax transformation.
          ValueError: if the variables are not those of the model.
        """
        check_optimizer(tx)
        chosen = Trainable(trainable, self._pipelined.model.is_list)
        if variables is None:
            variables = self.init(key, x)
        else:
            variables = self._pipelined.take(key, variables, x)
        return _train_states.train_state(self._pipelined, key, variables, x, tx, chosen)

    def train_step(
        self,
        loss_fn: LossFunction,
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
        donate: bool = True,
    ) -> TrainStep:
        """One training step: gradients of a mini-batch, and one optax update.

        Args:
          loss_fn: as for `value_and_grad`.
          tx: the optax optimizer with which the state was made.
          has_aux: as for `value_and_grad`; ``metrics["aux"]``.
          aux_axes: as for `value_and_grad`.
          reduction: as for `value_and_grad`.
          trainable: as for `value_and_grad`, and as the state was made with. The step
            leaves the rest as it is: the same arrays.
          donate: whether a step overwrites the memory of the state that it is given;
            that state cannot be used again. Without it a step needs room for both.

        Returns:
          ``step(state, x, targets) -> (state, metrics)`` with ``metrics["loss"]``.

        Raises:
          ValueError: if the reduction is unknown.
          TypeError: if ``tx`` is not an optax transformation.
        """
        check_optimizer(tx)
        objective = Objective(loss_fn, has_aux, reduction, aux_axes)
        return TrainStep(
            self._gradients(objective, trainable),
            tx,
            has_aux=has_aux,
            feed=self._pipelined.feed(),
            donate=donate,
            by_layer=self._pipelined.model.is_list,
        )

    @outside_of_meshes
    def modules(self, variables: PyTree) -> Any:
        """What was listed as layers, with values: the way back to Flax.

        Args:
          variables: one entry per layer, such as ``state.variables``.

        Returns:
          For each layer a bound linen module or a new nnx module, ready to be called;
          a function or a `Layer` as it is. What is listed twice is one module here
          too. They hold the arrays themselves, which a training step overwrites: copy
          them first if training goes on.

        Raises:
          ValueError: if the variables are not those of the layers, or a layer was
            changed.
        """
        return self._pipelined.modules(variables)

    # ------------------------------------------------------------ checks and profiles

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
        from ._pipeline_check import checked  # which a step does not need

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
        gradients = self._last_made
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

"""A pipeline: the handle that users hold, and its methods."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import chex
import jax
import optax
from jax.sharding import Mesh

from .._arguments import _variables
from .._arguments._mutable import Mutable, read_mutable
from .._arguments._objective import Objective
from .._arguments._trainable import Trainable
from .._arguments._wrong_call import check_flag, describe_argument
from .._check._report import CheckReport
from .._instructions import _transfer
from .._instructions._program import Program
from .._instructions._sharding import StageMesh
from .._layers import _rng
from .._pipelined._specialization import Specialization
from .._placed._mesh_context import outside_of_meshes
from .._train._train_state import TrainState
from .._train._transformation import check_optimizer
from ..planning._plan_record import Plan
from ..schedules import Schedule
from . import _train_states
from ._compile_report import Report, compile_report
from ._custom_loop import CustomLoop
from ._gradient_call import ValueAndGrad
from ._handle import (
    CHECK_ADVICE,
    CHECK_ADVICE_ON,
    COMPILE_ADVICE,
    Handle,
    explain_method,
)
from ._pipelined_model import UNKNOWN, PipelinedModel
from ._train_step import TrainStep

PyTree = Any
LossOfOutputs = Callable[[PyTree, PyTree], Any]


class Pipeline(CustomLoop, Handle):
    """A model spread over devices; made by `pipeline`. It holds no arrays.

    The variables, gradients and states of a list of layers have one entry per layer;
    those of one model are trees of the model's own.
    """

    def __init__(self, pipelined: PipelinedModel) -> None:
        super().__init__(pipelined.devices)
        self._pipelined_model = pipelined
        self._feed = pipelined.feed("pipe.apply")

    # ------------------------------------------------------------------- properties

    @property
    def num_stages(self) -> int:
        """The number of stages.

        Raises:
          ValueError: if the pipeline is of a model that was not divided yet.
        """
        return self.schedule.num_stages

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self._pipelined_model.num_microbatches

    @property
    def schedule(self) -> Schedule:
        """The schedule: which rank runs which actions, in order.

        Raises:
          ValueError: if the pipeline is of a model that was not divided yet.
        """
        return self._pipelined_model.placement.schedule

    @property
    def devices(self) -> tuple[_transfer.Device | Mesh, ...]:
        """The device of each stage, or its mesh."""
        return tuple(
            device.mesh if isinstance(device, StageMesh) else device
            for device in self._pipelined_model.placement.devices
        )

    @property
    @outside_of_meshes
    def plan(self) -> Plan:
        """The plan of the model alone, in names and numbers.

        After variables were initialized it has their bytes. What a loss adds, such as
        the bytes of a step, is in the ``plan`` of the step or gradients that have it.

        Raises:
          ValueError: if the pipeline is of a model that was not divided yet.
        """
        return self._pipelined_model.plan()

    def __repr__(self) -> str:
        size = f"{self.num_microbatches} micro-batches"
        if self._pipelined_model.num_stages is not None:
            size = f"{self.num_stages} stages, {size}, {self.schedule.name}"
        return f"<jpipe.Pipeline: {self._pipelined_model} in {size}>"

    @outside_of_meshes
    def __str__(self) -> str:
        if not self._pipelined_model.is_divided:
            return f"{self!r}\n{UNKNOWN}"
        return str(self.plan)

    @property
    def _input_names(self) -> Collection[str]:
        return self._pipelined_model.input_names

    # ------------------------------------------------------- variables and programs

    @outside_of_meshes
    @explain_method("pipe.init(key, x)")
    def init(self, key: chex.PRNGKey | None, x: PyTree) -> Any:
        """Makes the variables of all layers, each on its layer's device.

        The values depend on the key, the layer's index and shapes only, not on
        balance, devices or schedule. Only shapes and dtypes of ``x`` are used. Weakly
        typed values of initializers become strongly typed, since optax returns strongly
        typed ones. Each leaf is made on the first device and moved, so that this device
        needs room for one leaf more.

        Args:
          key: a JAX random key; ``None`` will do where all variables are those that
            nnx modules hold.
          x: an input, or its `jax.ShapeDtypeStruct` leaves. As in Flax, layers are
            initialized for all of it: a cache has a row for each example.

        Returns:
          Of a list one entry per layer: its Flax variables, ``{}`` where it has none.
          For one linen module, the result of ``model.init(key, x)``; for one nnx
          module, its values by collection.

        Raises:
          TypeError: if a leaf of ``x`` is not an array.
          ValueError: if the dtype of an output depends on whether a variable is weakly
            typed.
        """
        return self._pipelined_model.init(key, x)

    @outside_of_meshes
    @explain_method("pipe.place(variables, x)")
    def place(self, tree: Any, x: PyTree = None) -> Any:
        """Puts variables, or a train state, on the devices of their layers.

        Args:
          tree: variables, as `init` returns them, or a `TrainState`; on the host or any
            devices: from a pipeline of another balance, or from a checkpoint.
          x: an input, or specs of one; needed for a model that was not divided yet.

        Returns:
          The same values in place. Arrays that are there already are not copied: a step
          that overwrites the result overwrites them in ``tree`` too.

        Raises:
          ValueError: if they are not the variables of the model, or a step overwrote
            one.
        """
        _variables.check_alive(jax.tree.leaves(tree))
        if isinstance(tree, TrainState):
            return _train_states.place_train_state(self._pipelined_model, tree, x)
        return self._pipelined_model.place(tree, x)

    @outside_of_meshes
    @explain_method("pipe.apply(variables, x)")
    def apply(
        self,
        variables: PyTree,
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = False,
        mutable: Any = False,
        donate: bool = False,
    ) -> PyTree:
        """Applies all layers, forward only.

        Args:
          variables: the variables, as `init` returns them, in place.
          x: the input, on the host or any device.
          rngs: a key, or keys by stream name such as ``{"dropout": key}``.
          train: passed on to all that take a switch of training and evaluation, such as
            ``train`` or ``deterministic``. The state that training changes, such as
            ``batch_stats``, stays as it is, with a warning.
          mutable: the collections that layers may change in evaluation, such as
            ``["cache"]``, as in Flax. Each micro-batch reads and writes its own rows of
            the leaves with a row for each example. Modules of linen tell which axis
            that is; for those of nnx in several micro-batches type it, as in
            ``{"cache": 0}``.
          donate: True to overwrite the arrays of these collections that are given.

        Returns:
          The output of the last layer for the whole mini-batch, on its device; of
          several processes the one of the last stage has its values, and ``pipe.jit``
          makes numbers of it that all have. With
          ``mutable`` a pair of it and these collections, one entry per layer, each leaf
          on the device of its layer: the next variables are ``[{**old, **new} for old,
          new in zip(variables, state)]``, of one model ``{**variables, **state}``.

        Raises:
          ValueError: if the batch or the variables do not fit the model, or it is not
            known which axis of a leaf that changes has the examples.
          TypeError: if a leaf of ``x`` is not an array.
        """
        x, _ = self._feed(x, rngs=rngs)
        pipelined = self._pipelined_model
        state_names = _read_mutable(mutable, train=train, donate=donate)
        specialization = pipelined.forward(
            variables, x, rngs, train=train, mutable=state_names
        )
        leaves = specialization.check_arguments(variables, (x, rngs))
        outputs = _forward_program(specialization, donate=donate)(leaves)
        num_outputs = specialization.aux_tree.num_leaves
        y = jax.tree.unflatten(specialization.aux_tree, outputs[:num_outputs])
        if not state_names.names:
            return y
        new_leaves = leaves[: len(specialization.layout.specs)]
        for i, leaf in zip(
            specialization.joined_state, outputs[num_outputs:], strict=True
        ):
            new_leaves[i] = leaf
        new_variables = specialization.layout.join_params(new_leaves)
        return y, pipelined.model.collections(new_variables, state_names.names)

    @outside_of_meshes
    @explain_method("pipe.compile(variables, x)", surplus=COMPILE_ADVICE)
    def compile(
        self,
        variables: PyTree,
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = False,
        mutable: Any = False,
        donate: bool = False,
    ) -> Report:
        """Compiles all programs that `apply` would compile, side by side.

        Args:
          variables: as for `apply`; specs (`jax.ShapeDtypeStruct`) will do for arrays.
          x: likewise.
          rngs: likewise.
          train: as for `apply`.
          mutable: as for `apply`.
          donate: as for `apply`.

        Returns:
          A report of bytes, flops and seconds. It prints as a table.

        Raises:
          ValueError: if the arguments do not fit the model.
          TypeError: if ``variables`` is a function: a step compiles itself.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> from flax import linen as nn
          >>> pipe = jpipe.pipeline([nn.Dense(3)], num_microbatches=2)
          >>> x = jnp.ones((4, 3))
          >>> report = pipe.compile(pipe.init(jax.random.key(0), x), x)
          >>> sum(program.calls for program in report.programs)
          4
        """
        if isinstance(variables, Handle) or inspect.isroutine(variables):
            raise TypeError(
                f"variables is {describe_argument(variables)}, a function; "
                f"{COMPILE_ADVICE}"
            )

        state_names = _read_mutable(mutable, train=train, donate=donate)

        def lower() -> Program:
            specialization = self._pipelined_model.forward(
                variables, x, rngs, train=train, mutable=state_names
            )
            return _forward_program(specialization, donate=donate)

        return compile_report(lower)

    @outside_of_meshes
    @explain_method("pipe.check(variables, x)", CHECK_ADVICE_ON, surplus=CHECK_ADVICE)
    def check(
        self,
        variables: PyTree,
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = True,
        microbatch_sizes: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs each layer at once and in micro-batches, and compares.

        It compares outputs, the state that training writes, and gradients by the input
        and the parameters. The input of each layer is the output of the one before it
        for all examples at once. Flax's batch norms normalize each micro-batch by
        itself: where outputs are compared they return their input, and their statistics
        are compared as they are merged. All random numbers that follow from ``rngs``
        are the middle one: a dropout drops nothing.
        Everything is computed on the device of the first stage, one layer after the
        other. A dropout, batch norm or attention of Flax that is off in training, since
        no switch reached it, is noted beside its layer.

        `TrainStep.check` checks the loss too.

        Args:
          variables: the variables, as `init` returns them.
          x: an input, of two examples at least, such as two micro-batches.
          rngs: as for `apply`; a model with dropout needs any key.
          train: True to run layers as in training.
          microbatch_sizes: the number of examples of each micro-batch, such as
            ``(4, 8)``; default: two of different sizes.
          tolerance: the largest difference that passes, relative to the largest number
            of the same example; default: the rounding errors of the narrowest dtype
            that a layer computes in.

        Returns:
          A report. It prints as a table, is true where nothing differs, and has
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
        from ._pipeline_check import check_pipeline  # which a step does not need

        return check_pipeline(
            self._pipelined_model,
            variables,
            (x, None),
            pipelined_loss=None,
            rngs=rngs,
            train=train,
            microbatch_sizes=microbatch_sizes,
            tolerance=tolerance,
        )

    @explain_method("pipe.value_and_grad(loss_fn)", has_options=True)
    def value_and_grad(
        self,
        loss_fn: LossOfOutputs,
        *,
        has_aux: bool = False,
        has_state: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
    ) -> ValueAndGrad:
        """Makes the function of a loss and its gradients, as `jax.value_and_grad`.

        Args:
          loss_fn: ``(outputs, targets) -> scalar``, applied to each micro-batch on the
            last device.
          has_aux: True if ``loss_fn`` returns ``(loss, aux)``; with ``"weighted"``
            ``((total, weight), aux)``.
          has_state: True to return the other collections too, such as ``batch_stats``,
            as they are after the mini-batch: the next variables of one model are
            ``{**variables, **state}``, those of a list
            ``[{**old, **new} for old, new in zip(variables, state)]``.
          aux_axes: the axes on which the micro-batches' aux are joined, as ``out_axes``
            of `jax.vmap`: an int, or a pytree of ints and ``None`` that is a prefix of
            aux. ``None``: they are stacked along a new first axis. `jpipe.MEAN`: the
            mean over the examples; integers are those of the last micro-batch.
            `jpipe.SUM`: the sum. Where an axis is named, a leaf that follows from no
            example is what one device returns.
          reduction: the way in which micro-batches combine. ``"mean"``: the loss is a
            mean over examples. ``"sum"``: it is a sum. ``"weighted"``: ``loss_fn``
            returns ``(total, weight)`` and the loss is the sum of totals over the sum
            of weights, which are constants. ``"microbatch_mean"``: the mean of the
            losses of the micro-batches. ``"batch"``: any loss; ``loss_fn`` runs once,
            on the outputs of the whole mini-batch, joined by ``out_axes``, and its aux
            is what it returns; each rank runs all forwards first, see
            `jpipe.whole_batch`. A loss of another reduction raises. Cotangents are as
            large as on one device; where a weight follows from more than
            targets, they are those of the total.
          trainable: a selection of the parameters that have gradients; default: all.
            Text with wildcards, such as ``"*/lora_*"``, that matches the path of a
            leaf or all below; ``(path, leaf) -> bool`` of paths such as
            ``(2, "query", "lora_a")``, which begin with the layer's index; a filter of
            Variables as `flax.nnx` takes it, such as `nnx.LoRAParam`; or a list of
            these. Frozen parameters cost nothing. Other collections change in training
            all the same: to freeze the statistics of a batch norm, set its
            ``use_running_average=True``.

        Returns:
          ``f(variables, x, targets, *, rngs=None, train=True) -> (loss, grads)``;
          ``((loss, aux), grads)``, ``((loss, state), grads)`` or ``((loss, aux,
          state), grads)``. The gradients have the structure of ``variables["params"]``
          and its devices, of a list ``grads[i]`` those of ``variables[i]["params"]``,
          with ``None`` for a leaf that is
          frozen: optax then takes parameters with the same gaps. ``f`` has ``check``,
          ``compile`` and ``profile``, of the same arguments, and ``plan``; ``print(f)``
          shows that.

        Raises:
          ValueError: if the reduction is unknown or the schedule cannot train; from
            ``f``, if batch, targets or variables do not fit, the loss is not of this
            ``reduction``, or ``trainable`` selects nothing.
          TypeError: if ``loss_fn`` is no function or ``trainable`` no selection; from
            ``f``, if ``loss_fn`` does not return a loss as described.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([lambda x: 2 * x], num_microbatches=2)
          >>> square = lambda y, t: jnp.mean((y - t) ** 2)
          >>> loss, grads = pipe.value_and_grad(square)(({},), jnp.ones(4), jnp.ones(4))
          >>> float(loss), grads
          (1.0, ({},))
        """
        check_flag("has_state", has_state)
        objective = Objective(loss_fn, has_aux, reduction, aux_axes)
        return ValueAndGrad(
            self._pipelined_model,
            self._pipelined_model.loss(objective, trainable),
            has_state=has_state,
        )

    @outside_of_meshes
    @explain_method("pipe.init_train_state(key, x, tx)", has_options=True)
    def init_train_state(
        self,
        key: chex.PRNGKey,
        x: PyTree,
        tx: optax.GradientTransformation,
        *,
        variables: PyTree = None,
        trainable: Any = None,
        rngs: _rng.Rngs = None,
    ) -> TrainState:
        """Makes everything that training changes, each part where it is used.

        Args:
          key: a JAX random key; without ``rngs`` the state keeps one that follows.
          x: an input, or its `jax.ShapeDtypeStruct` leaves.
          tx: the optax optimizer.
          variables: variables to start from instead of those of `init`, such as
            pretrained ones, on the host or any devices: as `init` returns them; of a
            list with ``None`` for a layer that is initialized. They are copied.
          trainable: as for `value_and_grad`; ``tx`` sees ``None`` for frozen leaves.
          rngs: the keys of training, which ``state.rng`` keeps: one, or by stream name,
            such as ``{"dropout": key}``, as modules lifted with ``split_rngs`` need.

        Returns:
          The state at step 0.

        Raises:
          TypeError: if ``tx`` is not an optax transformation, or ``rngs`` no keys.
          ValueError: if the variables are not those of the model.
        """
        check_optimizer(tx, "pipe.init_train_state(key, x, tx)")
        selection = Trainable(trainable, by_layer=self._pipelined_model.model.is_list)
        if variables is None:
            variables = self.init(key, x)
        else:
            variables = self._pipelined_model.copy_in_place(key, variables, x)
        return _train_states.initial_train_state(
            self._pipelined_model,
            key,
            rngs=rngs,
            variables=variables,
            x=x,
            tx=tx,
            trainable=selection,
        )

    @explain_method("pipe.train_step(loss_fn, tx)", has_options=True)
    def train_step(
        self,
        loss_fn: LossOfOutputs,
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
        donate: bool = True,
        skip_nonfinite: bool = False,
    ) -> TrainStep:
        """Makes a training step: gradients of a mini-batch, and one optax update.

        Args:
          loss_fn: as for `value_and_grad`.
          tx: the optax optimizer with which the state was made.
          has_aux: as for `value_and_grad`; ``metrics["aux"]``.
          aux_axes: as for `value_and_grad`.
          reduction: as for `value_and_grad`.
          trainable: as for `value_and_grad`, and as for the `init_train_state` of the
            state. Frozen parameters stay the same arrays.
          donate: True if a step overwrites the memory of its state, which cannot be
            used again; with False a step needs room for both states.
          skip_nonfinite: True if a step whose loss or gradients are not finite leaves
            parameters, optimizer state and statistics as they are, to the bit;
            ``metrics["skipped"]`` is then 1, else 0. Its number counts all the same.

        Returns:
          ``step(state, x, targets) -> (state, metrics)`` with ``metrics["loss"]``. It
          has ``check``, ``compile`` and ``profile``, of the same arguments, and
          ``plan``; ``print(step)`` shows that.

        Raises:
          ValueError: if the reduction is unknown or the schedule cannot train.
          TypeError: if ``loss_fn`` is no function, ``tx`` no optax transformation or
            ``trainable`` no selection.
        """
        check_optimizer(tx, "pipe.train_step(loss_fn, tx)")
        check_flag("donate", donate)
        check_flag("skip_nonfinite", skip_nonfinite)
        objective = Objective(loss_fn, has_aux, reduction, aux_axes)
        return TrainStep(
            self._pipelined_model,
            self._pipelined_model.loss(objective, trainable),
            tx=tx,
            donate=donate,
            skip_nonfinite=skip_nonfinite,
        )

    @outside_of_meshes
    @explain_method("pipe.modules(variables)")
    def modules(self, variables: PyTree) -> Any:
        """Returns the layers as modules of Flax that hold their values.

        Args:
          variables: the variables, such as ``state.variables``.

        Returns:
          For the model, or each layer of a list, a bound linen module or a new nnx
          module, ready to be called; a function or a `Layer` as it is. A module that is
          listed twice is one module here too. One model whose variables are on several
          devices has copies on the first; where they do not fit, give
          ``jax.device_get(variables)``. Others hold the arrays themselves, which a
          training step overwrites: copy them first if training goes on.

        Raises:
          ValueError: if the variables are not those of the layers, or a layer was
            changed.
        """
        return self._pipelined_model.modules(variables)


def _read_mutable(mutable: Any, *, train: bool, donate: bool) -> Mutable:
    """Reads the argument ``mutable`` of `Pipeline.apply`.

    Raises:
      ValueError: if other arguments do not go with it.
    """
    state_names = read_mutable(mutable)
    if donate and not state_names.names:
        raise ValueError(
            "donate=True overwrites the collections that mutable= names, and it names "
            "none; type mutable=['cache'] too"
        )
    if train and state_names.names:
        raise ValueError(
            f"train=True, mutable={mutable!r}: what training changes is returned by "
            f"value_and_grad(..., has_state=True), and kept by a train_step; mutable= "
            f"is for evaluation, as of attention with a cache"
        )
    return state_names


def _forward_program(specialization: Specialization, *, donate: bool) -> Program:
    """The program of a forward pass, which overwrites state if that is donated."""
    if not specialization.joined_state:
        return specialization.program
    if donate:
        return specialization.program_overwriting_state
    return specialization.program_with_joined_state

"""A pipeline: what its user can do with it."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import optax

from . import _states
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._inspectable import Inspectable
from ._instructions._program import Program
from ._layers import _rng
from ._loop import OwnLoop
from ._pipelined_model import PipelinedModel
from ._run import _variables
from ._run._context import outside_of_meshes
from ._train._gradients import Gradients
from ._train._state import TrainState
from ._train._step import TrainStep
from ._train._transformation import check_optimizer
from ._train._value_and_grad import ValueAndGrad
from .planning._plan import Forecast

PyTree = Any
LossFunction = Callable[[PyTree, PyTree], Any]


class Pipeline(Inspectable, OwnLoop):
    """A model spread over devices; made by `pipeline`. It holds no arrays.

    Of a list of layers, variables, gradients and states have one entry per layer; of
    one model they are trees of the model's own.
    """

    def __init__(
        self, pipelined: PipelinedModel, forecast: Forecast | None = None
    ) -> None:
        self._pipelined, self._forecast = pipelined, forecast
        self._places, self._feed = pipelined.places, pipelined.feed()

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
            return _states.place_train_state(self._pipelined, tree, x)
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
        if self._made and self._made.last:
            self._used = self._made
        chosen = Trainable(trainable, self._pipelined.model.is_list)
        self._made = made = self._pipelined.gradients(objective, chosen)
        return made

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
        return _states.train_state(self._pipelined, key, variables, x, tx, chosen)

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

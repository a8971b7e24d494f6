"""A pipeline of one model as it is: `pipeline` of a module or a function."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ._cache import NO_LOSS, Axes
from ._check._report import CheckReport
from ._describe import rows
from ._functions import _microbatch
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._instructions._transfer import put_one
from ._layers import _batchnorm, _rng
from ._layers._layer import Layer, as_module, check_unchanged
from ._layers._stage import shapes
from ._loop import OwnLoop
from ._model_forward import forward, refuse_writes
from ._model_step import ModelGradient
from ._processes._elsewhere import is_here, of_copies, own_copy
from ._profile import as_pair, profile
from ._run import _variables
from ._run._context import outside_of_meshes
from ._run._feed import Feed
from ._run._pipe import Pipe
from ._slices._division import Division
from ._slices._initial import Initial, check_given
from ._train._optimizer import Optimizer, place_state
from ._train._state import TrainState, note_chosen
from ._train._step import TrainStep, check_optimizer
from ._values import agree_on_key
from .schedules import Schedule, Timeline

PyTree = Any
LossFunction = Callable[[PyTree, PyTree], Any]


class ModelPipeline(OwnLoop):
    """One model spread over devices; made by `pipeline`. It holds no arrays.

    It has the methods of a `Pipeline`; variables, gradients and states are trees of the
    model's own. A model of several inputs is given `inputs`.

    Args:
      layer: the model.
      division: in which stages it is divided.
      axes: where the examples are.
      unpipelined: the same model as a list of one layer, which `check` runs.
    """

    def __init__(
        self,
        layer: Layer,
        division: Division,
        axes: Axes,
        unpipelined: Callable[[], Any],
    ) -> None:
        self._layer, self._division, self._axes = layer, division, axes
        self._unpipelined = unpipelined
        self._places = division.places
        # One of this process.
        own = next(filter(is_here, self._places), self._places[0])
        self._first = _transfer.one_of(own)
        self._forwards = {
            train: forward(layer, division, axes, self._applied, train)
            for train in (False, True)
        }
        self._trained: ModelGradient | None = None
        self._compared: Feed | None = None

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self._division.num_microbatches

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        first = self._division.first
        return len(first[1]) + 1 if first else self._division.num_stages

    @property
    def schedule(self) -> Schedule:
        """Who runs which action, in which order.

        Raises:
          ValueError: before it is known in how many stages the model is divided.
        """
        if self.num_stages is None:
            raise ValueError("the stages are known once the model is initialized")
        return self._division.pipe(self.num_stages).schedule

    def __str__(self) -> str:
        head = f"jpipe.pipeline({self._layer.name}), {self.num_microbatches} "
        head += "micro-batches"
        known = [self._trained, *self._forwards.values()]
        last = next((one.last for one in known if one and one.last), None)
        if last is None:
            return f"{head}; the stages are known once it is initialized or called"
        why = self._trained.unchecked if self._trained else ""
        told = [f"the loss was not checked: {why}"] * bool(why)
        return "\n".join([head, *rows(*last), *told])

    def _applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """What the model makes of a micro-batch, and what it changes."""
        check_unchanged([self._layer], "the model")
        with (
            _batchnorm.merging(self._division.num_parts > 1),
            _batchnorm.recording(),
        ):
            try:
                return self._layer.apply(variables, x, _rng.streams(rngs), train)
            except Exception as error:
                refuse_writes(error, self._layer.owner, variables, train)
                error.add_note(
                    f"raised by the model ({self._layer.name}), whose input was "
                    f"{shapes(x)}; x comes before the targets"
                )
                raise

    # --------------------------------------------------------------------- variables

    @outside_of_meshes
    def init(self, key: chex.PRNGKey, x: PyTree) -> PyTree:
        """Makes the variables of the model, each on its stage's device.

        Args:
          key: a JAX random key.
          x: an input, or its `jax.ShapeDtypeStruct` leaves, of which shapes and dtypes
            are used: the model is divided by them, and made for a micro-batch.

        Returns:
          What ``model.init(key, x)`` gives; of an nnx module its values, by collection.
        """
        if key is not None:
            _rng.check_key(key)
        key = jax.random.key(0) if key is None else key
        initial = Initial(self._layer, key, self._part(x))
        homes = self._locate(initial.specs, x)
        agree_on_key(self._pipe, key)
        made = initial.leaves(key, self._first)
        leaves = [put_one(leaf, *home) for leaf, home in zip(made, homes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(initial.specs), leaves)

    def _part(self, x: PyTree) -> PyTree:
        """The input of the first micro-batch, as specs."""
        return self._forwards[False].part((x, None))[0]

    @cached_property
    def _pipe(self) -> Pipe:
        """The stages, once they are known."""
        assert self.num_stages
        return self._division.pipe(self.num_stages)

    def _everywhere(self, *leaves: Any) -> list[jax.Array]:
        """Leaves on the first device, of several processes in each."""
        pipe = self._pipe
        here = _transfer.put(leaves, pipe.own_places[0])
        return (
            here if pipe.copies is None else [of_copies(x, pipe.copies) for x in here]
        )

    def _locate(self, variables: PyTree, x: PyTree) -> list[tuple[Any, Sharding]]:
        """The device of each leaf of the variables, and how it lies there."""
        args = x, _rng.key_spec()  # there are models that draw in evaluation
        return self._forwards[False].locate(variables, args)

    def _resting_of(
        self, params: PyTree, variables: PyTree, x: PyTree
    ) -> tuple[list[int], list[Sharding]]:
        """The stage of each leaf of the parameters, and how it lies there."""
        homes, structure = self._locate(variables, x), jax.tree.structure(variables)
        assert self._division.first
        numbered, _ = _apart(structure.unflatten(range(len(homes))))
        own = jax.tree.leaves(numbered)
        stages = self._division.first[2]
        return [stages[i] for i in own], [homes[i][1] for i in own]

    @outside_of_meshes
    def place(self, tree: Any, x: PyTree = None) -> Any:
        """Puts variables, or a train state, on the devices of their stages.

        Args:
          tree: variables or a `TrainState`, on the host or any devices.
          x: an input, or specs of one; where `init` or a step was called before, it is
            not needed.

        Returns:
          The same values in place.
        """
        is_state = isinstance(tree, TrainState)
        variables = tree.variables if is_state else tree
        if x is None and self._division.first is None:
            raise ValueError(
                "where the variables of a model stay is known once it is divided, "
                "which takes an input: type pipe.place(variables, x)"
            )
        homes = self._locate(variables, x)
        leaves, structure = jax.tree.flatten(variables)
        pairs = zip(leaves, homes, strict=True)
        placed = structure.unflatten([put_one(leaf, *home) for leaf, home in pairs])
        if not is_state:
            return placed
        params, model_state = _apart(placed)
        step, rng = self._everywhere(tree.step, tree.rng)
        own = self._resting_of(params, variables, x)
        opt_state = place_state(tree.opt_state, params, self._pipe, *own)
        state = TrainState(step, params, opt_state, model_state, rng)
        note_chosen(state, tree.chosen)
        return state

    @outside_of_meshes
    def apply(
        self,
        variables: PyTree,
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = False,
    ) -> PyTree:
        """Applies the model, forward only: see `Pipeline.apply`."""
        return self._forwards[train](variables, x, rngs).aux[0]

    def _inference(
        self, variables: Any, x: PyTree, *, rngs: _rng.Rngs = None, train: bool = False
    ) -> Any:
        return self._forwards[train].build(variables, (x, rngs))

    def modules(self, variables: PyTree) -> Any:
        """The model with values: see `Pipeline.modules`."""
        return as_module(self._layer, variables)

    # ---------------------------------------------------------------------- training

    def value_and_grad(
        self,
        loss_fn: LossFunction,
        *,
        has_aux: bool = False,
        has_state: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
    ) -> ModelGradient:
        """The loss of a mini-batch and its gradients: see `Pipeline.value_and_grad`.

        Paths that ``trainable`` is asked about are those of the model's parameters.
        """
        objective = Objective(loss_fn, has_aux, reduction, aux_axes)
        made = ModelGradient(
            self._layer,
            self._division,
            self._axes,
            self._applied,
            objective,
            Trainable(trainable, by_layer=False),
            has_state=has_state,
        )
        self._trained = made
        return made

    @outside_of_meshes
    def init_train_state(
        self,
        key: chex.PRNGKey,
        x: PyTree,
        tx: Any,
        *,
        variables: PyTree = None,
        trainable: Any = None,
    ) -> TrainState:
        """Makes everything that training changes: see `Pipeline.init_train_state`."""
        tx = check_optimizer(tx)
        chosen = Trainable(trainable, by_layer=False)
        if variables is None:
            variables = self.init(key, x)
        else:  # a step overwrites them
            check_given(self._layer, self._part(x), variables)
            variables = jax.tree.map(jnp.copy, self.place(variables, x))
        marks = chosen.marks([self._layer], (variables,))[0]
        params, model_state = _apart(variables)
        trained = jax.tree.leaves(marks.get("params", {}))
        specs = _microbatch.specs(params, "params")
        places = self._resting_of(params, variables, x)
        own = Optimizer(tx, specs, trained, self._pipe, *places)
        with jax.disable_jit(False):  # zeros made by hand are on the default device
            opt_state = own.init(params)
        agree_on_key(self._pipe, key)
        step, rng = self._everywhere(np.int32(0), _rng.training_key(own_copy(key)))
        state = TrainState(step, params, opt_state, model_state, rng)
        if not chosen.selects_all:
            note_chosen(state, trained)
        return state

    def train_step(
        self,
        loss_fn: LossFunction,
        tx: Any,
        *,
        has_aux: bool = False,
        aux_axes: Any = None,
        reduction: str = "mean",
        trainable: Any = None,
        donate: bool = True,
    ) -> TrainStep:
        """One training step: see `Pipeline.train_step`."""
        gradient = self.value_and_grad(
            loss_fn,
            has_aux=has_aux,
            aux_axes=aux_axes,
            reduction=reduction,
            trainable=trainable,
        )
        return TrainStep(
            gradient.built,
            tx,
            has_aux=has_aux,
            feed=self._feed,
            donate=donate,
            by_layer=False,
        )

    def _feed(self, x: PyTree, targets: PyTree) -> tuple[PyTree, PyTree]:
        """The mini-batch, which all processes are given alike."""
        if self._compared is None and self._division.first:
            self._compared = Feed(self._pipe)
        if self._compared:
            self._compared((x, targets))
        return x, targets

    @outside_of_meshes
    def profile_step(
        self,
        state: TrainState,
        batch: tuple[PyTree, PyTree],
        loss_fn: LossFunction | None = None,
        *,
        has_aux: bool = False,
        reduction: str = "mean",
        trainable: Any = None,
    ) -> Timeline:
        """Runs the gradients with each action timed: see `Pipeline.profile_step`."""
        x, targets = as_pair(batch)
        gradient = self._trained
        if loss_fn is not None:
            given = {"has_aux": has_aux, "reduction": reduction, "trainable": trainable}
            gradient = self.value_and_grad(loss_fn, **given)
        if gradient is None:
            raise ValueError(NO_LOSS)
        key = _rng.step_key(state.rng, state.step)
        return profile(*gradient.profiled(state.variables, x, targets, key))

    def check(self, variables: PyTree, *args: Any, **kwargs: Any) -> CheckReport:
        """Runs the model and the loss at once and in micro-batches, and compares.

        It is as `Pipeline.check` of a list of one layer, on the first device.
        """
        report = self._unpipelined().check((variables,), *args, **kwargs)
        found = replace(report.layers[0], name=f"the model ({self._layer.name})")
        return replace(report, layers=(found,))


def _apart(variables: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters, and the other collections."""
    (params,), (state,) = (
        _variables.params([variables]),
        _variables.model_state([variables]),
    )
    return params, state

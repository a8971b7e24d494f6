"""A list of layers: what a pipeline of it computes, and where its variables are."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax

from ._check._report import CheckReport
from ._checking import check_first, checked
from ._describe import Known
from ._faults import refuse
from ._fitting import Fitting
from ._functions._batch import Axes
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._layers import _nnx_values, _rng
from ._layers._layer import check_unchanged
from ._layers._skip import label
from ._processes._elsewhere import is_here
from ._processes._group import agree_on_key
from ._run import _resting, _variables
from ._run._feed import Feed
from ._run._pipe import Pipe
from ._slices import _left, _results
from ._slices._built import Built, Divided
from ._slices._initial import strong
from ._slices._listed import Listed, listed
from ._slices._programs import Programs
from ._train._gradients import Gradients

PyTree = Any


class LayerList:
    """A list of layers.

    Args:
      pipe: its stages.
      axes: where the examples are.
      checks_first: whether the first mini-batch that is trained on is checked.
    """

    by_layer = True

    def __init__(self, pipe: Pipe, axes: Axes, checks_first: bool = False) -> None:
        self.pipe, self.fitting, self._axes = pipe, Fitting(pipe, axes), axes
        self._checks_first = checks_first
        self._forwards = {
            train: Programs(partial(self._forward, train)) for train in (False, True)
        }

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.pipe.stages)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.pipe.schedule.num_microbatches

    @property
    def places(self) -> tuple[Any, ...]:
        """The devices, each once."""
        return self.pipe.places

    def __str__(self) -> str:
        return f"{len(self.pipe.stage_of_layer)} layers"

    def feed(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """Gives what this process has to know of mini-batches."""
        return Feed(self.pipe)

    def known(self, divided: Divided | None) -> Known:
        """What is known of the pipeline.

        Args:
          divided: the last mini-batch with a loss.
        """
        built = divided.built if divided else None
        layout = self.fitting.layout
        return Known(
            self.pipe,
            [[layer.name for layer in stage.layers] for stage in self.pipe.stages],
            built.layout if built else layout,
            self._reads(built),
            built.stages if built else None,
            built,
            [(label(r.key), r.source, r.target) for r in self.fitting.routes],
        )

    def _reads(self, built: Built | None) -> list[list[int]]:
        """Of each stage the leaves that it reads, or before that is known, has."""
        if built is not None:
            return [built.stages.held_by(s) for s in range(self.num_stages)]
        owners = self.fitting.layout.owner_stages if self.fitting.layout else []
        return [
            [i for i, owner in enumerate(owners) if owner == s]
            for s in range(self.num_stages)
        ]

    # ---------------------------------------------------------------------- programs

    def look_again(self) -> None:
        """Traces layers anew from now on, as where variables are made of them.

        Layers and losses may read what was changed since: globals, variables of
        functions around them, helpers in other modules. What is built anew has them
        as they are now, as under a new `jax.jit`, and what is evaluated after it too;
        what came to the same is not compiled again: see `_compile`.

        Raises:
          ValueError: if an nnx module was changed.
        """
        self.fitting.look_again()
        for programs in self._forwards.values():
            programs.clear()

    def forward(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> Built:
        """The forward pass for such variables and such an input."""
        return self._forwards[train](variables, x, (), rngs)

    def _forward(self, train: bool, variables: PyTree, *args: PyTree) -> Divided:
        found = self._listed(variables, args, train, None, Trainable())
        if changed := found.state.at:
            _left.in_training(_variables.collections(variables, changed))
        built = _results.forward(found, self._axes.out_axes)
        return Divided(built.pipe, built.stages, built.layout, built=built)

    def gradients(self, objective: Objective, trainable: Trainable) -> Gradients:
        """The gradients of one objective.

        Raises:
          TypeError: if the loss takes what is trained.
        """
        self.look_again()
        outputs: list[PyTree] = []
        made = partial(self._gradient, objective, trainable, outputs)
        programs = {t: Programs(partial(made, t)) for t in (False, True)}
        given = objective, trainable, programs, outputs, self._axes.out_axes
        return Gradients(*given, self._check_first)

    def _gradient(
        self,
        objective: Objective,
        trainable: Trainable,
        outputs: list[PyTree],
        train: bool,
        variables: PyTree,
        *args: PyTree,
    ) -> Divided:
        found = self._listed(variables, args, train, objective, trainable)
        self._check_constants(found, variables)
        outputs.append(found.y)
        built = _results.gradient(found, objective)
        return Divided(built.pipe, built.stages, built.layout, built=built)

    def _listed(
        self,
        variables: PyTree,
        args: Sequence[PyTree],
        train: bool,
        objective: Objective | None,
        trainable: Trainable,
    ) -> Listed:
        """The layers on a mini-batch, traced."""
        self.fitting.check_order(variables)
        batch = self.fitting.batch(*args)
        layout = self.fitting.check(variables, batch, trainable)
        if objective is not None:
            objective = replace(objective, num_microbatches=batch.num_parts)
        given = self.pipe, self.fitting.layers, layout, variables, batch
        try:
            return listed(*given, train=train, objective=objective)
        except Exception:
            self.fitting.explain(variables, batch)
            raise

    def _check_constants(self, layers: Listed, variables: Sequence[PyTree]) -> None:
        """Checks that what is trained is not closed over by a layer or the loss too.

        Raises:
          TypeError: with the variables that are.
        """
        constants = set(map(id, layers.stages.first.closed.consts))
        paths = jax.tree_util.tree_leaves_with_path(tuple(variables))
        found = [
            f"variables{jax.tree_util.keystr(path)}"
            for (path, leaf), trained in zip(paths, layers.layout.marks, strict=True)
            if trained and id(leaf) in constants
        ]
        for number, layer in enumerate(self.pipe.layers):
            found += [
                f"{'.'.join(map(str, path))} of layer {number} ({layer.name})"
                for path, (collection, leaf) in _nnx_values.leaves(layer.owner).items()
                if collection == "params" and id(leaf.get_raw_value()) in constants
            ]
        refuse(
            "the loss or a layer takes variables from outside, which would be "
            "constants without a gradient and stay as they are now; compute it in a "
            "layer that lists the module again, or add the gradient to that of the "
            "loss: pipe.jit(jax.value_and_grad(penalty))(params), where penalty is a "
            "function of them; for constants give copies",
            found,
            TypeError,
        )

    # --------------------------------------------------------------------- variables

    def init(
        self,
        key: chex.PRNGKey | None,
        x: PyTree,
        given: Sequence[PyTree] | None = None,
    ) -> tuple[PyTree, ...]:
        """Makes the variables of all layers, or of those where ``None`` is given."""
        pipe, fitting = self.pipe, self.fitting
        _variables.check_concrete(jax.tree.leaves((key, x)))
        if key is not None:
            _rng.check_key(key)
        batch = fitting.sample(x)
        self.look_again()
        taken = given or [None] * len(pipe.layers)
        initial = fitting.initial(batch, [own or {} for own in taken])
        if key is None:
            if initial.draws:
                _rng.check_key(key)
            key = jax.random.key(0)  # which nobody reads
        if pipe.copies is not None:
            agree_on_key(key)
        fitting.note(initial.specs, batch.x)
        wanted = [
            own is None and is_here(pipe.devices[stage])
            for own, stage, entry in zip(
                taken, pipe.stage_of_layer, initial.specs, strict=True
            )
            for _ in jax.tree.leaves(entry)
        ]
        # Made on one device, where equal draws share a compiled program, and moved at
        # once: it has room for one array more, not for all.
        first = _transfer.one_of(pipe.own_places[0])
        made = initial.leaves(key, first, wanted)
        variables = []
        for number, specs in enumerate(initial.specs):
            leaves, tree = jax.tree.flatten(specs)
            own = itertools.islice(made, len(leaves))
            leaves = [a if x is None else x for a, x in zip(leaves, own, strict=True)]
            entry = taken[number]
            entry = tree.unflatten(leaves) if entry is None else entry
            variables.append(self._placed(number, entry))
        return tuple(variables)

    def take(
        self, key: chex.PRNGKey, variables: Sequence[PyTree], x: PyTree
    ) -> tuple[PyTree, ...]:
        """Copies of variables, in place, each in the entry that `init` gives it to.

        Raises:
          ValueError: if they are not those of the model, or overwritten.
        """
        _variables.check_length(variables, len(self.pipe.layers))
        if any(entry is None for entry in variables):
            variables = self.init(key, x, variables)
        batch = self.fitting.sample(x)
        self.look_again()
        variables = self.fitting.by_owner(variables, batch)
        _variables.check_alive(jax.tree.leaves(variables))
        numbered = enumerate(variables)
        copies = tuple(self._placed(i, own, may_alias=False) for i, own in numbered)
        return jax.tree.map(strong, copies)

    def place(self, variables: PyTree, x: PyTree = None) -> tuple[PyTree, ...]:
        """Variables in place."""
        del x
        _variables.check_length(variables, len(self.pipe.stage_of_layer))
        return tuple(self._placed(i, entry) for i, entry in enumerate(variables))

    def locations(
        self, variables: PyTree, x: PyTree = None
    ) -> list[tuple[int, Sharding]]:
        """Of each leaf of the variables its stage, and how it lies there."""
        del x
        _variables.check_length(variables, len(self.pipe.stage_of_layer))
        stages = [
            stage
            for stage, entry in zip(self.pipe.stage_of_layer, variables, strict=True)
            for _ in jax.tree.leaves(entry)
        ]
        return [*zip(stages, _resting.shardings(self.pipe, variables), strict=True)]

    def marks(self, variables: PyTree, trainable: Trainable) -> PyTree:
        """Whether each leaf of the variables, or of their specs, is trained."""
        return self.fitting.marks(variables, trainable)

    def modules(self, variables: PyTree) -> list[Any]:
        """The layers with values: see `Pipeline.modules`."""
        layers = self.pipe.layers
        check_unchanged(layers)
        _variables.check_length(variables, len(layers))
        _variables.check_alive(jax.tree.leaves(variables))
        return self.fitting.layers.parent.modules(variables)

    def check(self, *given: Any) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches."""
        return checked(self.pipe, self.fitting, *given)

    def _check_first(self, *given: Any) -> None:
        """Checks the first mini-batch, where that is to be; once."""
        if self._checks_first:
            check_first(self.pipe, self.fitting, *given)
            self._checks_first = False

    def _placed(
        self, layer: int, entry: PyTree, may_alias: bool | None = None
    ) -> PyTree:
        """What a layer has, in its place."""
        shardings = _resting.of_layer(self.pipe, layer, entry)
        device = self.pipe.devices[self.pipe.stage_of_layer[layer]]
        return _transfer.put_tree(entry, device, shardings, may_alias)

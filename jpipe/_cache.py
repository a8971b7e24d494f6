"""The programs that a pipeline has compiled, and how to make the next one.

A program is compiled for structures, shapes and dtypes; every check of what the
caller gave is made on abstract values, before anything is compiled or moved.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ._faults import refuse
from ._functions import _microbatch, _probe
from ._functions._batch import Batch, explained, of_input
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._layers import _nnx_values, _rng
from ._layers._layer import check_unchanged
from ._layers._rng import Rngs
from ._layers._skip import Route
from ._layers._stage import shapes
from ._layers._walk import Visit, walk
from ._run import _layout, _signature, _variables
from ._run._layout import Layout
from ._run._pipe import Pipe
from ._slices import _left
from ._slices._inference import Inference
from ._slices._listed import Listed, listed
from ._train._build import Build, Gradients
from ._train._gradient import Gradient

PyTree = Any
Expected = tuple[list[Visit], tuple[Route, ...]]
Marks = tuple[PyTree, ...]
ALL = Trainable()
NO_LOSS = "no step was built yet whose loss could be profiled; give loss_fn="


class Axes(NamedTuple):
    """Where the examples are: the arguments of `jpipe.pipeline` of these names."""

    in_axes: Any
    target_axes: Any
    out_axes: Any


class ProgramCache:
    """The compiled programs of one pipeline, found by what they were compiled for.

    Attributes:
      layout: how the variables seen last lie, for print; ``None`` before the first.
      routes: the skip connections between stages, for print.
      built: the gradients that were built last; ``None`` before the first.
      training: the mini-batch with a loss seen last, for print.
      unchecked: why its loss was not checked, for print; empty if it was.
      check_first: what checks the first mini-batch that is trained on; ``None``: not.
    """

    def __init__(self, pipe: Pipe, axes: Axes) -> None:
        self._pipe = pipe
        self._axes = axes
        self._inference: dict[Any, Inference] = {}
        self.layout: Layout | None = None
        self.built: Build | None = None
        self.training: Gradient | None = None
        self.routes: tuple[Route, ...] = ()
        self.check_first: Callable[..., None] | None = None
        self._expected: dict[Any, Expected] = {}
        # By the shapes of variables, an input that they fit, in words.
        self._inputs: dict[Any, str] = {}
        self.unchecked = ""

    def look_again(self) -> None:
        """Traces layers anew from now on, as where variables are made of them.

        Layers and losses may read what was changed since: globals, variables of
        functions around them, helpers in other modules. What is built anew has them
        as they are now, as under a new `jax.jit`, and what is evaluated after it too;
        what came to the same is not compiled again: see `_compile`.

        Raises:
          ValueError: if an nnx module was changed.
        """
        check_unchanged(self._pipe.layers)
        self._expected.clear()
        self._inference.clear()

    def inference(
        self, variables: Any, x: PyTree, rngs: Rngs, train: bool
    ) -> Inference:
        """The forward pass for such variables and such an input."""
        signature = _signature.settings(), _signature.of(variables, x, rngs), train
        if signature not in self._inference:
            self._check_order(variables)
            batch = self._batch(x, (), rngs)
            layout, routes = self._check(variables, batch)
            given = self._pipe, layout, batch, routes
            layers = listed(*given, train=train, objective=None)
            _check_changes(layers, variables)
            if changed := layers.state.at:
                _left.in_training(_variables.collections(variables, changed))
            self._inference[signature] = Inference(layers, self._axes.out_axes)
        return self._inference[signature]

    def gradients(self, objective: Objective, trainable: Trainable = ALL) -> Gradients:
        """The gradients of one objective, by what they are compiled for.

        Raises:
          ValueError: if the schedule cannot train.
          TypeError: if the loss takes what is trained.
        """
        schedule = self._pipe.schedule
        if schedule.forward_only:
            raise ValueError(
                f"schedule {schedule.name!r} has forwards only: it can apply, not "
                f"train; build the pipeline with another, such as schedule='1f1b'"
            )
        self.look_again()
        self.built = Build(objective, trainable)
        return Gradients(self._gradient, self.built)

    def _gradient(
        self,
        build: Build,
        variables: Any,
        x: PyTree,
        targets: PyTree,
        rngs: Rngs,
        train: bool,
    ) -> Gradient:
        """The gradient of a build for such arguments."""
        objective, known = build.objective, build.known
        kind = _signature.of(variables, x, targets, rngs), train
        signature = _signature.settings(), kind
        if signature not in known:
            self._check_order(variables)
            batch = self._batch(x, targets, rngs)
            layout, routes = self._check(variables, batch, build.trainable)
            objective = replace(objective, num_microbatches=batch.num_parts)
            given = self._pipe, layout, batch, routes
            layers = listed(*given, train=train, objective=objective)
            self._check_constants(layers, variables)
            _check_changes(layers, variables)
            if batch.num_parts > 1:
                if self.check_first is not None:
                    self.check_first(variables, x, targets, objective, rngs, train)
                axis = self._axes.out_axes
                axis = axis if isinstance(axis, int) else 0
                self.unchecked = _probe.check(objective, layers.y, targets, batch, axis)
            made = Gradient(layers, objective)
            known[signature] = self.training = made
        return known[signature]

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
        for number, layer in enumerate(self._pipe.layers):
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

    def profiled(self, objective: Objective | None, trainable: Trainable) -> Gradients:
        """The gradients that were built last, where these are meant; else new ones.

        Args:
          objective: the loss; ``None``: that of the last.
          trainable: what is trained by it.

        Raises:
          ValueError: if none were.
        """
        last = self.built
        if objective is None and last is None:
            raise ValueError(NO_LOSS)
        if last is not None:
            whole = trainable.selects_all and last.trainable.selects_all
            if objective is None or (whole and objective == last.objective):
                return Gradients(self._gradient, last)
        assert objective is not None
        return self.gradients(objective, trainable)

    def _check_order(self, variables: Any) -> None:
        """Tells arguments in another order, before a batch is made of variables."""
        if not isinstance(variables, Sequence):
            _variables.check_length(variables, len(self._pipe.stage_of_layer))

    def _batch(self, x: PyTree, targets: PyTree, rngs: Rngs) -> Batch:
        _variables.check_concrete(jax.tree.leaves((x, targets, rngs)))
        parts = self.examples(x, targets)
        (_, x, x_axes), (_, targets, target_axes) = parts
        number = self._pipe.schedule.num_microbatches
        size = _microbatch.batch_size(parts, number)
        shards = self._pipe.num_shards
        sizes = _microbatch.sizes(_microbatch.shard(size, number, shards), number)
        if rngs is not None:
            _rng.check_rngs(rngs)
        keys = None if rngs is None else _microbatch.specs(rngs, "rngs")
        return Batch(x, x_axes, targets, target_axes, keys, sizes, shards)

    def examples(
        self, x: PyTree, targets: PyTree = ()
    ) -> list[tuple[str, PyTree, list[int | None]]]:
        """The input and the targets as specs, and where their examples are."""
        found = []
        for what, tree, name in (
            ("x", x, "in_axes"),
            ("targets", targets, "target_axes"),
        ):
            specs = _microbatch.specs(tree, what)
            # Without a loss there are no targets, whatever their axes would be.
            axes = getattr(self._axes, name) if jax.tree.leaves(specs) else 0
            flat = _microbatch.flat_axes(axes, specs, what, name)
            found.append((what, specs, flat))
        return found

    def sample(self, x: PyTree) -> Batch:
        """An input from which variables are made: see `_batch.of_input`."""
        (_, x, axes), _ = self.examples(x)
        number = self._pipe.schedule.num_microbatches
        return of_input(x, axes, number, self._pipe.num_shards)

    def expected(self, batch: Batch, given: Any = None) -> Expected:
        """What the layers are given and would make, for the first micro-batch.

        Args:
          batch: the mini-batch.
          given: variables that they take as they are: see `walk`.

        Returns:
          What is met at each layer, and the routes of the skip connections.

        Raises:
          ValueError: if skip connections do not fit, or a layer was changed.
        """
        signature = _signature.settings(), _signature.of(batch.first, given)
        if signature not in self._expected:
            stages, key = self._pipe.stages, _rng.key_spec()
            with explained(batch):
                visits, routes = walk(stages, key, batch.first, given)
            self._expected[signature] = visits, routes
            self.routes = routes
        return self._expected[signature]

    def fitting(self, variables: Any, batch: Batch) -> Expected:
        """What the layers are given with variables of the caller, which are checked.

        Layers that cannot make such variables are given them as they are.

        Raises:
          ValueError: if they are not those of the model.
        """

        def checked(known: Expected) -> Expected:
            told = self._misfit(variables, batch.x)
            _layout.check(self._pipe.sharing, known[0], variables, told)
            return known

        try:
            return checked(self.expected(batch))
        except Exception:
            with suppress(Exception):  # the first one says what is wrong
                return checked(self.expected(batch, variables))
            raise

    def _misfit(self, variables: Any, x: PyTree) -> str:
        """What an error says of variables and an input that do not fit."""
        before = self._inputs.get(_signature.shapes(jax.tree.leaves(variables)))
        if before in (None, shapes(x)):
            return (
                f"the variables are not those of this model for x of {shapes(x)}; one "
                f"of the two is wrong"
            )
        return (
            f"x is {shapes(x)}, and the variables fit {before}, with which they were "
            f"made or used before; give such an x, and x before the targets"
        )

    def note(
        self,
        variables: Sequence[PyTree],
        visits: Sequence[Visit],
        x: PyTree,
        trainable: Trainable = ALL,
    ) -> Layout:
        """How such variables, which fit an input, lie; kept for print."""
        marks = self.marks(variables, trainable)
        self._inputs[_signature.shapes(jax.tree.leaves(variables))] = shapes(x)
        self.layout = Layout(self._pipe, visits, variables, marks)
        return self.layout

    def marks(self, variables: Sequence[PyTree], trainable: Trainable) -> Marks:
        """Whether each leaf of the variables, or of their specs, is trained."""
        stages = self._pipe.stages
        return trainable.marks([a for s in stages for a in s.layers], variables)

    def by_owner(self, variables: Any, batch: Batch) -> Sequence[PyTree]:
        """Checks variables, and gives each to the entry that `init` gives it to."""
        visits = self.fitting(variables, batch)[0]
        own = _layout.by_owner(self._pipe.sharing, visits, variables)
        self.note(own, visits, batch.x)
        return own

    def _check(
        self, variables: Any, batch: Batch, trainable: Trainable = ALL
    ) -> tuple[Layout, Sequence[Route]]:
        visits, routes = self.fitting(variables, batch)
        return self.note(variables, visits, batch.x, trainable), routes


def _check_changes(layers: Listed, variables: Sequence[PyTree]) -> None:
    """Checks that what training changes is used by one layer.

    Raises:
      ValueError: with the collections that another uses too.
    """
    uses = Counter(leaf for order in layers.layout.order for leaf in order)
    several = [leaf for leaf in sorted(layers.state.at) if uses[leaf] > 1]
    if several:
        raise ValueError(
            f"training changes {_variables.collections(variables, several)}, which "
            f"several layers use: these cannot be shared; wrap all uses in one layer, "
            f"list two modules, or freeze it (use_running_average=True)"
        )

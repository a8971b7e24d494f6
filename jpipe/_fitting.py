"""Whether variables and an input fit a list of layers, on abstract values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from ._functions import _microbatch
from ._functions._batch import Axes, Batch, explained, of_input
from ._functions._trainable import Trainable
from ._layers import _rng
from ._layers._layer import check_unchanged
from ._layers._rng import Rngs
from ._layers._sequence import Sequential
from ._layers._skip import Route
from ._layers._stage import shapes
from ._run import _signature, _variables
from ._run._pipe import Pipe
from ._slices._built import TreeLayout
from ._slices._initial import Initial
from ._slices._listed import layout_of

PyTree = Any
Marks = tuple[PyTree, ...]
ALL = Trainable()


def _kind(variables: PyTree) -> Any:
    leaves, tree = jax.tree.flatten(tuple(variables))
    return tree, _signature.shapes(leaves)


def _state_of(specs: Mapping[str, PyTree], given: Any) -> dict[str, PyTree]:
    """What is given in place of what is no parameter.

    A layer is not held to the shapes that its state has at the start: a cache has room
    for more tokens than the input has.
    """
    structure = jax.tree.structure
    return {
        name: given[name]
        for name, own in specs.items()
        if name != "params" and structure(given.get(name)) == structure(own)
    }


class Fitting:
    """What layers are given and make; checks are made before anything is compiled.

    Args:
      pipe: the stages.
      axes: where the examples are.

    Attributes:
      layers: the layers, as one function.
      layout: where the variables seen last are, for print; ``None`` before the first.
      routes: the skip connections between stages, for print.
    """

    def __init__(self, pipe: Pipe, axes: Axes) -> None:
        self._pipe, self._axes = pipe, axes
        self.layers = Sequential(pipe.layers, pipe.stage_of_layer)
        self.layout: TreeLayout | None = None
        self.routes: tuple[Route, ...] = ()
        self._initial: dict[Any, Initial] = {}
        # By the shapes of variables, an input that they fit, in words.
        self._inputs: dict[Any, str] = {}

    def look_again(self) -> None:
        """Traces layers anew from now on.

        Raises:
          ValueError: if an nnx module was changed.
        """
        check_unchanged(self._pipe.layers)
        self._initial.clear()

    def check_order(self, variables: Any) -> None:
        """Tells arguments in another order, before a batch is made of variables."""
        if not isinstance(variables, Sequence):
            _variables.check_length(variables, len(self._pipe.stage_of_layer))

    def batch(self, x: PyTree, targets: PyTree, rngs: Rngs) -> Batch:
        """A mini-batch as abstract values."""
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

    def initial(self, batch: Batch, given: Sequence[PyTree] | None = None) -> Initial:
        """What the layers would make, for the first micro-batch.

        Args:
          batch: the mini-batch.
          given: variables that they take as they are: see `Initial`.

        Raises:
          ValueError: if skip connections do not fit.
        """
        signature = _signature.settings(), _signature.of(batch.first, given)
        if signature not in self._initial:
            key = _rng.key_spec()
            with explained(batch):
                found = Initial(self.layers, key, batch.first, given)
            self._initial[signature] = found
            self.routes = found.routes
        return self._initial[signature]

    def fitting(self, variables: Any, batch: Batch) -> Initial:
        """What the layers would make, as which variables of the caller are.

        Layers that cannot make such variables are given them as they are.

        Raises:
          ValueError: if they are not those of the model.
        """
        given = variables
        try:
            initial = self.initial(batch)
            given = [*map(_state_of, initial.specs, variables)]
            return self._checked(initial, variables, batch)
        except Exception:
            with suppress(Exception):  # the first one says what is wrong
                return self._checked(self.initial(batch, given), variables, batch)
            raise

    def _checked(self, initial: Initial, variables: Any, batch: Batch) -> Initial:
        """Checks that variables are like those which layers would make."""
        message = self._misfit(variables, batch.x)
        parent = self.layers.parent
        _variables.check_layers(parent, initial.specs, variables, message)
        return initial

    def explain(self, variables: Any, batch: Batch) -> None:
        """Says what is wrong with variables on which layers raised an error.

        Raises:
          ValueError: if they are not those of the model.
        """
        try:
            initial = self.initial(batch)
        except Exception:  # it is not for the variables
            return
        self._checked(initial, variables, batch)

    def _misfit(self, variables: Any, x: PyTree) -> str:
        """What an error says of variables and an input that do not fit."""
        before = self._inputs.get(_kind(variables))
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
        self, variables: Sequence[PyTree], x: PyTree, trainable: Trainable = ALL
    ) -> TreeLayout:
        """Where such variables, which fit an input, are; kept for print."""
        marks = self.marks(variables, trainable)
        self._inputs.setdefault(_kind(variables), shapes(x))
        self.layout = layout_of(self._pipe, variables, marks)
        return self.layout

    def marks(self, variables: Sequence[PyTree], trainable: Trainable) -> Marks:
        """Whether each leaf of the variables, or of their specs, is trained."""
        return trainable.marks(self._pipe.layers, variables)

    def by_owner(self, variables: Any, batch: Batch) -> Sequence[PyTree]:
        """Checks variables, and gives each to the entry that `init` gives it to."""
        initial = self.fitting(variables, batch)
        own = self.layers.parent.like(initial.specs, variables)
        self.note(own, batch.x)
        return own

    def check(
        self, variables: Any, batch: Batch, trainable: Trainable = ALL
    ) -> TreeLayout:
        """Where such variables are; those of another kind than before are checked."""
        if _kind(variables) not in self._inputs:
            self.fitting(variables, batch)
        return self.note(variables, batch.x, trainable)

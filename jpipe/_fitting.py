"""Whether variables and an input fit a list of layers, on abstract values."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from ._functions import _microbatch
from ._functions._batch import Axes, Batch, explained, of_input
from ._functions._trainable import Trainable
from ._layers import _rng
from ._layers._layer import check_unchanged
from ._layers._rng import Rngs
from ._layers._skip import Route
from ._layers._stage import shapes
from ._layers._walk import Visit, walk
from ._run import _layout, _signature, _variables
from ._run._layout import Layout
from ._run._pipe import Pipe

PyTree = Any
Expected = tuple[list[Visit], tuple[Route, ...]]
Marks = tuple[PyTree, ...]
ALL = Trainable()


class Fitting:
    """What layers are given and make; checks are made before anything is compiled.

    Args:
      pipe: the stages.
      axes: where the examples are.

    Attributes:
      layout: how the variables seen last lie, for print; ``None`` before the first.
      routes: the skip connections between stages, for print.
    """

    def __init__(self, pipe: Pipe, axes: Axes) -> None:
        self._pipe, self._axes = pipe, axes
        self.layout: Layout | None = None
        self.routes: tuple[Route, ...] = ()
        self._expected: dict[Any, Expected] = {}
        # By the shapes of variables, an input that they fit, in words.
        self._inputs: dict[Any, str] = {}

    def look_again(self) -> None:
        """Traces layers anew from now on.

        Raises:
          ValueError: if an nnx module was changed.
        """
        check_unchanged(self._pipe.layers)
        self._expected.clear()

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

    def check(
        self, variables: Any, batch: Batch, trainable: Trainable = ALL
    ) -> tuple[Layout, Sequence[Route]]:
        """How such variables lie, which are checked, and the skip connections."""
        visits, routes = self.fitting(variables, batch)
        return self.note(variables, visits, batch.x, trainable), routes

"""Flax modules as functions of their variables and a micro-batch."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import chex
import jax
from jax.tree_util import tree_leaves_with_path

from .._functions._batch import Axes, Batch, explained
from .._functions._objective import Objective
from .._functions._trainable import Trainable
from .._instructions._sharding import Sharding
from .._jaxprs import _jaxpr
from .._layers import _batchnorm, _rng
from .._layers._layer import LayerAdapter, check_unchanged
from .._layers._parent import Parent
from .._layers._sequence import Made
from .._run import _signature
from .._run._pipe import Pipe
from .._run._recent import Recent
from . import _arguments, _discarded, _join
from ._division import ByLayer, Division
from ._initial import Initial
from ._program import Traced
from ._results import Results
from ._sliced import Work
from ._state import Written

PyTree = Any
# What Flax's own TrainState overwrites with its gradient.
_BY_GRADIENT = "_overwrite_with_gradient"


class Modules(ABC):
    """One model, or a list of layers.

    Args:
      layers: the layers; a model is one.
      parent: the modules in them.
      axes: where the examples are.
    """

    # What errors call a layer, by its number.
    called: str
    # What to type where variables are not in place.
    advice: str
    # Whether the first stage alone reads the input, and the last the targets.
    is_local = False

    def __init__(
        self, layers: Sequence[LayerAdapter], parent: Parent, axes: Axes
    ) -> None:
        self.layers, self.parent, self.axes = layers, parent, axes
        # What is made for inputs of one kind.
        self._initial = Recent[Any, Initial]()

    @abstractmethod
    def init(self, key: chex.PRNGKey, x: PyTree, given: Sequence[PyTree]) -> Made:
        """Makes the variables: see `Sequential.init`."""

    @abstractmethod
    def applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """The output for a micro-batch, and what changes of the variables."""

    @abstractmethod
    def shardings(
        self, pipe: Pipe, variables: PyTree, stages: Sequence[int]
    ) -> list[Sharding]:
        """Of each leaf of the variables, in its stage."""

    @abstractmethod
    def text(self, path: Any) -> str:
        """How errors call what is written to a variable."""

    def entries(self, variables: PyTree) -> Sequence[PyTree]:
        """The variables of each layer."""
        return (variables,)

    def of_entries(self, entries: Sequence[PyTree]) -> PyTree:
        """The inverse."""
        return entries[0]

    def marks(self, variables: PyTree, trainable: Trainable) -> PyTree:
        """Whether each leaf of the variables, or of their specs, is trained."""
        entries = self.entries(variables)
        return self.of_entries(trainable.marks(self.layers, entries))

    def look_again(self) -> None:
        """Traces layers anew from now on.

        Raises:
          ValueError: if an nnx module was changed.
        """
        check_unchanged(self.layers, self.called)
        self._initial.clear()

    def sample(self, x: PyTree, division: Division | ByLayer) -> Batch:
        """An input from which variables are made, as a mini-batch."""
        return _arguments.batch(
            [x],
            (self.axes.in_axes,),
            ["x"],
            num_microbatches=division.num_microbatches,
            num_shards=division.num_shards,
            few=True,
        )

    def initial(
        self,
        batch: Batch,
        given: Sequence[PyTree] | None = None,
        key: chex.PRNGKey | None = None,
    ) -> Initial:
        """The variables before any step, for the first micro-batch.

        Args:
          batch: the mini-batch.
          given: variables that are taken as they are: see `Initial`.
          key: such as they are drawn by, typed or raw; default: typed.

        Raises:
          ValueError: if skip connections do not fit.
        """
        like: Any = _rng.key_spec() if key is None else key
        (x,) = batch.first
        signature = _signature.settings(), _signature.of(like, x, given)
        if signature not in self._initial:
            with explained(batch):
                made = Initial(self, like, x, given)
            self._initial[signature] = made
        return self._initial[signature]

    def _changed(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, dict[int, Any]]:
        """The output, and by the number of a leaf of the variables what it becomes."""
        if train:
            _check_collections(self.entries(variables))
        # A raw key is folded where it is wrapped, which is here and not in a loop.
        rngs = jax.tree.map(_rng.wrapped_once, rngs)
        with _batchnorm.recording():
            y, changed = self.applied(variables, x, rngs, train)
        number = {
            path: i for i, (path, _) in enumerate(tree_leaves_with_path(variables))
        }
        return y, {
            number[path]: leaf
            for path, leaf in tree_leaves_with_path(changed)
            if path in number
        }

    def forward(self, train: bool) -> Work:
        """``(variables, x, rngs) -> (outputs, changed)``; nobody keeps what changed."""

        def call(variables: PyTree, x: PyTree, rngs: _rng.Rngs) -> Any:
            return self._changed(variables, x, rngs, train)

        def joins(results: Results) -> list[_join.Join]:
            try:
                return _join.of_outputs(self.axes.out_axes, results)
            except ValueError as error:
                _note_axes(error, self.axes)
                raise

        return Work(
            call,
            joins,
            (self.axes.in_axes, None),
            has_loss=False,
            modules=self,
            names=("x", "rngs"),
            writes=self._writes,
            discards=functools.partial(self._warn, train),
        )

    def loss(self, objective: Objective, train: bool, outputs: list[PyTree]) -> Work:
        """``(variables, x, targets, rngs) -> (loss, (aux, what is written))``.

        Args:
          objective: the loss.
          train: whether this is training; evaluation writes nothing.
          outputs: receives specs of what the loss is given, of each trace.
        """

        def loss(variables: PyTree, x: PyTree, targets: PyTree, rngs: Any) -> Any:
            y, changed = self._changed(variables, x, rngs, train)
            outputs.append(jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y))
            value, aux = objective.of_part(y, targets)
            return value, (aux, changed)

        def joins(results: Results) -> list[_join.Join]:
            return _join.of_aux(objective.aux_axes, results)

        return Work(
            loss,
            joins,
            (self.axes.in_axes, self.axes.target_axes, None),
            has_aux=True,
            reduction=objective.reduction,
            modules=self,
            names=("x", "targets", "rngs"),
            writes=self._writes,
            discards=None if train else functools.partial(self._warn, train),
        )

    def _warn(self, train: bool, traced: Traced, variables: PyTree) -> None:
        """Warns of what is written, where nobody is given it."""
        _discarded.check(traced, *self._writes(traced, variables), variables, train)

    def _writes(self, traced: Traced, variables: PyTree) -> tuple[int, list[Written]]:
        """What a call writes, by what it returns besides its output or the loss."""
        aux, changed = traced.aux
        paths = [path for path, _ in tree_leaves_with_path(variables)]
        written = [Written(i, paths[i], self.text(paths[i])) for i in sorted(changed)]
        return len(jax.tree.leaves(aux)), written


def _note_axes(error: ValueError, axes: Axes) -> None:
    """Notes where outputs may have their examples, if the input has them elsewhere."""
    if isinstance(axes.in_axes, int) and axes.in_axes and axes.out_axes == 0:
        error.add_note(
            f"in_axes={axes.in_axes} splits the input along axis {axes.in_axes}; where "
            f"the outputs have the examples there too, type out_axes={axes.in_axes}; "
            f"where the examples are rows of the input, leave in_axes= out"
        )


def _check_collections(entries: Sequence[PyTree]) -> None:
    """Refuses what Flax changes in a way that a pipeline does not know."""
    if any(_BY_GRADIENT in entry for entry in entries):
        raise ValueError(
            f"the variables hold the collection {_BY_GRADIENT}, as the fp8 operations "
            f"of flax.linen do, whose values a step replaces by their gradients; a "
            f"pipeline does not, and would leave them as they are: train without "
            f"dot_general_cls; evaluation works"
        )

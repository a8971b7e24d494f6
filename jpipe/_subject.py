"""What a pipeline is of: its programs, and where its variables are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import chex
import jax

from ._check._report import CheckReport
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._layers import _rng
from ._layers._layer import check_unchanged
from ._processes._elsewhere import is_here
from ._processes._group import agree_on_key
from ._run import _variables
from ._run._feed import Feed
from ._run._pipe import Pipe
from ._slices import _model_functions
from ._slices._built import Built
from ._slices._division import ByLayer, Division
from ._slices._initial import strong
from ._slices._model import Model
from ._slices._sliced import Checks, Sliced, Work
from ._train._gradients import Gradients
from .planning._describe import Known

PyTree = Any
UNKNOWN = (
    "the stages of a model are known once it was initialized or called; jpipe.plan "
    "decides them before"
)


class Subject(ABC):
    """A list of layers, or one model.

    Args:
      function: it as a function.
      division: in which stages it runs.
      checks: what is checked where something new is built.

    Attributes:
      function: it as a function.
      division: in which stages it runs.
      places: the devices, each once.
      by_layer: whether there is one entry per layer.
    """

    by_layer: bool

    def __init__(
        self,
        function: Model,
        division: Division | ByLayer,
        checks: Checks | None = None,
    ) -> None:
        self.function, self.division, self._checks = function, division, checks
        self.places = division.places
        self._forwards = {
            train: self._sliced(_model_functions.forward(function, train=train))
            for train in (False, True)
        }

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.division.num_microbatches

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        return self.division.count

    @cached_property
    def pipe(self) -> Pipe:
        """The stages.

        Raises:
          ValueError: before they are known.
        """
        if self.num_stages is None:
            raise ValueError(UNKNOWN)
        return self.division.pipe(self.num_stages)

    def _known_pipe(self) -> Pipe | None:
        return self.pipe if self.num_stages else None

    def feed(self) -> Feed:
        """Gives what this process has to know of mini-batches."""
        return Feed(self._known_pipe, self.function.is_list)

    @abstractmethod
    def known(self, last: Built | None) -> Known | None:
        """What is known of the pipeline; ``None`` before it is divided.

        Args:
          last: the last mini-batch with a loss.
        """

    @abstractmethod
    def check(self, variables: PyTree, *given: Any) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches."""

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
        self.function.look_again()
        for forward in self._forwards.values():
            forward.clear()

    def forward(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> Built:
        """The forward pass for such variables and such an input."""
        return self._forwards[train](variables, x, rngs)

    def gradients(self, objective: Objective, trainable: Trainable) -> Gradients:
        """The gradients of one objective.

        Raises:
          TypeError: if the loss takes what is trained.
        """
        self.look_again()
        outputs: list[PyTree] = []

        def marks(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(self.function.marks(variables, trainable))

        works = {
            train: _model_functions.loss(self.function, objective, outputs, train=train)
            for train in (False, True)
        }
        programs = {train: self._sliced(work, marks) for train, work in works.items()}
        given = objective, trainable, programs, outputs, self.function.axes.out_axes
        return Gradients(*given)

    def _sliced(self, work: Work, *marks: Any) -> Sliced:
        return Sliced(work, self.division, *marks, checks=self._checks)

    # --------------------------------------------------------------------- variables

    def init(
        self,
        key: chex.PRNGKey | None,
        x: PyTree,
        given: Sequence[PyTree] | None = None,
    ) -> PyTree:
        """Makes the variables, or of a list those of layers with ``None`` for them.

        Each leaf is made on one device, where equal draws share a compiled program, and
        moved at once: it has room for one array more, not for all.
        """
        _variables.check_concrete(jax.tree.leaves((key, x)))
        if key is not None:
            _rng.check_key(key)
        self.look_again()
        taken = given or [None] * len(self.function.layers)
        batch = self.function.sample(x, self.division)
        initial = self.function.initial(batch, [own or {} for own in taken], key)
        if key is None:
            if initial.draws:
                _rng.check_key(key)
            key = jax.random.key(0)  # which nobody reads
        specs = self.function.from_entries(initial.specs)
        locations, pipe = self.locations(specs, x), self.pipe
        if pipe.copies is not None:
            agree_on_key(key)
        pairs = zip(taken, initial.specs, strict=True)
        missing = [own is None for own, entry in pairs for _ in jax.tree.leaves(entry)]
        places = [pipe.devices[stage] for stage, _ in locations]
        wanted = [yes and is_here(at) for yes, at in zip(missing, places, strict=True)]
        first = next(filter(is_here, self.places), self.places[0])
        made = initial.leaves(key, _transfer.one_of(first), wanted)
        leaves, tree = jax.tree.flatten(specs)
        columns = zip(missing, made, leaves, places, locations, strict=True)
        variables = tree.unflatten(
            [
                _transfer.put_one(spec if leaf is None else leaf, place, sharding)
                if yes
                else spec
                for yes, leaf, spec, place, (_, sharding) in columns
            ]
        )
        pairs = zip(taken, self.function.entries(variables), strict=True)
        entries = [new if own is None else own for own, new in pairs]
        return self.place(self.function.from_entries(entries)) if given else variables

    @abstractmethod
    def _fitting(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Variables, checked; of a list each in the entry that `init` gives it to.

        Raises:
          ValueError: if they are not those of the model.
        """

    def take(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Copies of variables, which are checked, in place.

        Raises:
          ValueError: if they are not those of the model, or overwritten.
        """
        variables = self._fitting(key, variables, x)
        _variables.check_alive(jax.tree.leaves(variables))
        at = self.locations(variables, x)
        copies = _transfer.put_each(variables, self.pipe.devices, at, may_alias=False)
        return jax.tree.map(strong, copies)

    def place(self, variables: PyTree, x: PyTree = None) -> PyTree:
        """Variables in place."""
        function = self.function
        variables = function.from_entries(function.entries(variables))
        locations = self.locations(variables, x)
        return _transfer.put_each(variables, self.pipe.devices, locations)

    def locations(
        self, variables: PyTree, x: PyTree = None
    ) -> list[tuple[int, Sharding]]:
        """The owner stage of each leaf of the variables, and its sharding there."""
        self.function.entries(variables)
        # There are models that draw in evaluation.
        return self._forwards[False].locate(variables, (x, _rng.key_spec()))

    def modules(self, variables: PyTree) -> Any:
        """The layers with values: see `Pipeline.modules`."""
        check_unchanged(self.function.layers, self.function.label)
        entries = self.function.entries(variables)
        _variables.check_alive(jax.tree.leaves(variables))
        found = self.function.parent.modules(entries)
        return found if self.by_layer else found[0]

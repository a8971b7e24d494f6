"""One model as it is: what a pipeline of it computes, and where its variables are."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import chex
import jax
import jax.numpy as jnp

from ._check._report import CheckReport
from ._describe import Known, of_function
from ._functions import _microbatch
from ._functions._batch import Axes
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._layers import _rng
from ._layers._layer import Layer
from ._layers._stage import shapes
from ._processes._elsewhere import is_here
from ._processes._group import agree_on_key
from ._run import _variables
from ._run._feed import Feed
from ._run._pipe import Pipe
from ._slices._built import Built, Divided
from ._slices._division import Division
from ._slices._initial import Initial
from ._slices._model import Model
from ._slices._sliced import Sliced
from ._train._gradients import Gradients

PyTree = Any
UNKNOWN = (
    "the stages of a model are known once it was initialized or called; jpipe.plan "
    "decides them before"
)


class OneModel:
    """One model.

    Args:
      layer: the model.
      division: in which stages it is divided.
      axes: where the examples are.
      unpipelined: makes a list of it as one layer, which `check` runs.
    """

    by_layer = False

    def __init__(
        self,
        layer: Layer,
        division: Division,
        axes: Axes,
        unpipelined: Callable[[], Any],
    ) -> None:
        self._layer, self._division, self._axes = layer, division, axes
        self._model = Model(layer, axes, division.num_parts)
        self._unpipelined, self.places = unpipelined, division.places
        self._forwards = {
            train: Sliced(self._model.forward(train), division)
            for train in (False, True)
        }

    def __str__(self) -> str:
        return self._layer.name

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self._division.num_microbatches

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        cuts = self._division.cuts
        return len(cuts.positions) + 1 if cuts else self._division.num_stages

    @cached_property
    def pipe(self) -> Pipe:
        """The stages.

        Raises:
          ValueError: before they are known.
        """
        if self.num_stages is None:
            raise ValueError(UNKNOWN)
        return self._division.pipe(self.num_stages)

    def feed(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """Compares mini-batches, which all processes are given whole."""
        compared: list[Feed] = []

        def feed(
            x: PyTree, targets: PyTree = (), rngs: PyTree = ()
        ) -> tuple[PyTree, PyTree]:
            if not compared and self._division.cuts:
                compared.append(Feed(self.pipe))
            for own in compared:
                own((x, targets), rngs=rngs)
            return x, targets

        return feed

    def known(self, divided: Divided | None) -> Known | None:
        """What is known of the pipeline; ``None`` before it is divided.

        Args:
          divided: the last mini-batch with a loss.
        """
        last = (programs.last for programs in self._forwards.values())
        found = divided or next(filter(None, last), None)
        return of_function(found) if found else None

    # ---------------------------------------------------------------------- programs

    def look_again(self) -> None:
        """Traces the model anew from now on: see `LayerList.look_again`."""
        for forward in self._forwards.values():
            forward.build.clear()

    def forward(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> Built:
        """The forward pass for such variables and such an input."""
        return self._forwards[train].build(variables, x, rngs)

    def gradients(self, objective: Objective, trainable: Trainable) -> Gradients:
        """The gradients of one objective."""
        self.look_again()
        outputs: list[PyTree] = []

        def marks(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(self.marks(variables, trainable))

        works = {
            train: self._model.loss(objective, train, outputs)
            for train in (False, True)
        }
        programs = {
            train: Sliced(work, self._division, marks).build
            for train, work in works.items()
        }
        axis = self._axes.out_axes
        return Gradients(objective, trainable, programs, outputs, axis)

    # --------------------------------------------------------------------- variables

    def init(self, key: chex.PRNGKey | None, x: PyTree) -> PyTree:
        """Makes the variables, leaf by leaf."""
        if key is not None:
            _rng.check_key(key)
        key = jax.random.key(0) if key is None else key
        initial = Initial(self._model, key, self._part(x))
        specs, tree = jax.tree.flatten(initial.specs[0])
        locations = self.locations(initial.specs[0], x)
        devices = [self.pipe.devices[stage] for stage, _ in locations]
        if self.pipe.copies is not None:
            agree_on_key(key)
        made = initial.leaves(key, self._first, [*map(is_here, devices)])
        leaves = [
            _transfer.put_one(spec if leaf is None else leaf, device, sharding)
            for leaf, spec, device, (_, sharding) in zip(
                made, specs, devices, locations, strict=True
            )
        ]
        return tree.unflatten(leaves)

    def _part(self, x: PyTree) -> PyTree:
        """The input of the first micro-batch, as specs."""
        return self._forwards[False].part((x, None))[0]

    @cached_property
    def _first(self) -> Any:
        """A device of this process."""
        place = next(filter(is_here, self.places), self.places[0])
        return _transfer.one_of(place)

    def take(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Copies of variables, which are checked, in place."""
        del key
        self._check_given(variables, self._part(x))
        return jax.tree.map(jnp.copy, self.place(variables, x))

    def _check_given(self, variables: PyTree, x: PyTree) -> None:
        """Checks that given variables are those of the model, where it can make such.

        Raises:
          ValueError: with every leaf that is missing, surplus or of another shape.
        """
        given = _microbatch.specs(variables, "variables")
        try:
            (specs,) = Initial(self._model, _rng.key_spec(), x).specs
        except Exception:  # such as parameters that are made of data
            return
        message = (
            f"the variables are not those of this model for micro-batches of "
            f"{shapes(x)}; one of the two is wrong"
        )
        _variables.check({"variables": specs}, {"variables": given}, message)

    def place(self, variables: PyTree, x: PyTree = None) -> PyTree:
        """Variables in place."""
        locations = self.locations(variables, x)
        return _transfer.put_each(variables, self.pipe.devices, locations)

    def locations(
        self, variables: PyTree, x: PyTree = None
    ) -> list[tuple[int, Sharding]]:
        """The owner stage of each leaf of the variables, and its sharding there.

        Raises:
          ValueError: if it is not known, and there is no input.
        """
        if x is None and self._division.owner_stages is None:
            raise ValueError(
                "where the variables of a model stay is known once it is divided, "
                "which takes an input: type pipe.place(variables, x)"
            )
        # There are models that draw in evaluation.
        return self._forwards[False].locate(variables, (x, _rng.key_spec()))

    def marks(self, variables: PyTree, trainable: Trainable) -> PyTree:
        """Whether each leaf of the variables, or of their specs, is trained."""
        return trainable.marks([self._layer], (variables,))[0]

    def modules(self, variables: PyTree) -> Any:
        """The model with values: see `Pipeline.modules`."""
        return self._model.parent.modules([variables])[0]

    def check(self, variables: PyTree, *given: Any) -> CheckReport:
        """Checks the model as a list of one layer, on the first device."""
        report = self._unpipelined().check((variables,), *given)
        found = replace(report.layers[0], name=f"the model ({self._layer.name})")
        return replace(report, layers=(found,))

"""Whether variables and an input fit a list of layers, on abstract values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from ._functions import _microbatch
from ._functions._trainable import Trainable
from ._layers._stage import shapes
from ._run import _signature, _variables
from ._run._pipe import Pipe
from ._run._recent import Recent
from ._slices._built import Layout
from ._slices._division import ByLayer
from ._slices._initial import Initial
from ._slices._model import Model
from ._slices._sliced import Checks

PyTree = Any


def _kind(variables: PyTree) -> Any:
    leaves, tree = jax.tree.flatten(tuple(variables))
    return tree, _signature.shapes(leaves)


def state_of(specs: Mapping[str, PyTree], given: Any) -> dict[str, PyTree]:
    """The given collections that are no parameters, where the leaves are the same.

    A layer is not held to the shapes that its state has at the start: a cache has room
    for more tokens than the input has.
    """
    structure = jax.tree.structure
    return {
        name: given[name]
        for name, own in specs.items()
        if name != "params" and structure(given.get(name)) == structure(own)
    }


class Fitting(Checks):
    """What layers are given and make; checks are made before anything is compiled.

    Args:
      pipe: the stages.
      listed: the layers, as one function.
      division: the stages of it.

    Attributes:
      listed: likewise.
      layout: where the variables seen last are, for print; ``None`` before the first.
    """

    def __init__(self, pipe: Pipe, listed: Model, division: ByLayer) -> None:
        self._pipe, self.listed, self._division = pipe, listed, division
        self.layout: Layout | None = None
        # By the shapes of variables, an input that they fit, in words.
        self._inputs = Recent[Any, str]()

    def before(self, params: PyTree, args: Sequence[PyTree]) -> None:
        """Checks variables of another kind than before."""
        if _kind(params) not in self._inputs:
            self._fitting(params, args[0])
        self.note(params, args[0])

    def explain(self, params: PyTree, args: Sequence[PyTree]) -> None:
        """Says what is wrong with variables on which layers raised an error.

        Raises:
          ValueError: if they are not those of the model.
        """
        try:
            initial = self._made(args[0])
        except Exception:  # it is not for the variables
            return
        self._check(initial, params, args[0])

    def _made(self, x: PyTree, given: Sequence[PyTree] | None = None) -> Initial:
        return self.listed.initial(self.listed.sample(x, self._division), given)

    def _fitting(self, variables: Any, x: PyTree) -> Initial:
        """What the layers would make, as which variables of the caller are.

        Layers that cannot make such variables are given them as they are.

        Raises:
          ValueError: if they are not those of the model.
        """
        given = variables
        try:
            initial = self._made(x)
            given = [*map(state_of, initial.specs, variables)]
            return self._check(initial, variables, x)
        except Exception:
            with suppress(Exception):  # the first one says what is wrong
                return self._check(self._made(x, given), variables, x)
            raise

    def _check(self, initial: Initial, variables: Any, x: PyTree) -> Initial:
        """Checks that variables are like those which layers would make."""
        message = self._misfit(variables, x)
        parent = self.listed.parent
        _variables.check_layers(parent, initial.specs, variables, message)
        return initial

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

    def note(self, variables: Sequence[PyTree], x: PyTree) -> None:
        """Where such variables, which fit an input, are; kept for print."""
        if (kind := _kind(variables)) not in self._inputs:
            self._inputs[kind] = shapes(x)
        specs = _microbatch.specs(tuple(variables), "variables")
        stages = self._division.owners(specs)
        shardings = self.listed.shardings(self._pipe, specs, stages)
        marks = jax.tree.leaves(self.listed.marks(specs, Trainable()))
        known = stages, shardings, marks, True, self.listed.advice
        self.layout = Layout(self._pipe, specs, *known)

    def by_owner(self, variables: Any, x: PyTree) -> Sequence[PyTree]:
        """Checks variables, and gives each to the entry that `init` gives it to."""
        self.listed.entries(variables)
        initial = self._fitting(variables, x)
        own = self.listed.parent.like(initial.specs, variables)
        self.note(own, x)
        return own

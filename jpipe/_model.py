"""One model as it is: its stages follow from its trace."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import chex

from ._check._report import CheckReport
from ._fitting import state_of
from ._functions import _microbatch
from ._functions._batch import Axes
from ._instructions._sharding import Sharding
from ._layers._layer import LayerAdapter
from ._layers._stage import shapes
from ._run import _variables
from ._slices._built import Built
from ._slices._division import Division
from ._slices._model import Model
from ._subject import Subject
from .planning._describe import Known, of_function

PyTree = Any


class OneModel(Subject):
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
        layer: LayerAdapter,
        division: Division,
        axes: Axes,
        unpipelined: Callable[[], Any],
    ) -> None:
        self._layer, self._unpipelined = layer, unpipelined
        super().__init__(Model([layer], axes), division)

    def __str__(self) -> str:
        return self._layer.name

    def known(self, last: Built | None) -> Known | None:
        """What is known of the pipeline; ``None`` before it is divided.

        Args:
          last: the last mini-batch with a loss.
        """
        forwards = (programs.last for programs in self._forwards.values())
        found = last or next(filter(None, forwards), None)
        return of_function(found) if found else None

    def locations(
        self, variables: PyTree, x: PyTree = None
    ) -> list[tuple[int, Sharding]]:
        """The owner stage of each leaf of the variables, and its sharding there.

        Raises:
          ValueError: if it is not known, and there is no input.
        """
        if x is None and self.division.owners(variables) is None:
            raise ValueError(
                "where the variables of a model stay is known once it is divided, "
                "which takes an input: type pipe.place(variables, x)"
            )
        return super().locations(variables, x)

    def _fitting(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Variables, checked where the model can make such."""
        del key
        self.function.entries(variables)
        given = _microbatch.specs(variables, "variables")
        batch = self.function.sample(x, self.division)
        try:
            (specs,) = self.function.initial(batch).specs
        except Exception:  # such as parameters that are made of data
            return variables
        message = (
            f"the variables are not those of this model for micro-batches of "
            f"{shapes(batch.first[0])}; one of the two is wrong"
        )
        try:
            _variables.check({"variables": specs}, {"variables": given}, message)
        except ValueError:
            with suppress(Exception):  # the first one says what is wrong
                state = [state_of(specs, variables)]
                (specs,) = self.function.initial(batch, state).specs
                _variables.check({"variables": specs}, {"variables": given}, message)
                return variables
            raise
        return variables

    def check(self, variables: PyTree, *given: Any) -> CheckReport:
        """Checks the model as a list of one layer, on the first device."""
        self.function.entries(variables)
        report = self._unpipelined().check((variables,), *given)
        found = replace(report.layers[0], name=f"the model ({self._layer.name})")
        return replace(report, layers=(found,))

"""Checks that variables and an input fit a model, on abstract values.

Checks run before anything is compiled. Shapes that fit are remembered, so that
variables are checked once, and an error can name the input with which they were used.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from .._arguments import _microbatch, _signature, _variables
from .._arguments._cache import RecentCache
from .._layers._text import shape_text
from .._model._initial import Initial
from .._model._model import Model
from .._partition._partition import Partition

PyTree = Any


class VariableChecks:
    """The checks of the variables and inputs of a model, and the shapes that passed.

    Args:
      model: the model.
      partition: the stages in which it runs.

    Attributes:
      specs: specs of the variables of the last call; ``None`` before the first.
    """

    def __init__(self, model: Model, partition: Partition) -> None:
        self._model = model
        self._partition = partition
        self.specs: PyTree = None
        # signature of variables -> the input that they fit, in words
        self._inputs = RecentCache[Any, str]()

    def note(self, variables: PyTree, x: PyTree) -> None:
        """Remembers variables and an input that they fit."""
        self.specs = _microbatch.array_specs(variables, "variables")
        signature = self._signature(variables)
        if signature not in self._inputs:
            self._inputs[signature] = shape_text(x)

    def check_call(self, variables: PyTree, args: Sequence[PyTree]) -> None:
        """Checks variables of a list that were not seen before, before they are used.

        Variables of one model are not checked: that would trace its initialization.

        Raises:
          ValueError: if they are not those of the layers.
        """
        if not self._model.is_list:
            return
        if self._signature(variables) not in self._inputs:
            self._check(variables, args[0])
        self.note(variables, args[0])

    def explain(
        self, error: Exception, variables: PyTree, args: Sequence[PyTree]
    ) -> None:
        """Explains the error of a call by variables that do not fit its input.

        Raises:
          ValueError: if the variables fit another input, or no input of this model.
        """
        x = args[0]
        fitting_input = self._inputs.get(self._signature(variables))
        if fitting_input == shape_text(x):
            return
        if fitting_input is None and self._model.is_list:  # `check_call` compared them
            return
        try:
            initial = self._initial(x)
        except Exception:  # the layers refuse this input with any variables
            return
        expected = initial.specs
        message = self._misfit(variables, x)
        entries = self._model.entries(variables)
        if self._model.is_list or not _variables.lacks_params(variables):
            # Other collections may have room for more than this input, as a cache has.
            expected = [*map(_params_alone, expected)]
            variables = self._model.from_entries([*map(_params_alone, entries)])
        self._compare(expected, variables, message)

    def move_to_owners(self, variables: PyTree, x: PyTree) -> PyTree:
        """Checks variables; returns each in the entry in which `init` returns it.

        Raises:
          ValueError: if they are not those of the model.
        """
        entries = self._model.entries(variables)
        initial = self._check(variables, x)
        if initial is not None and self._model.is_list:
            entries = self._model.parent.move_to_owners(initial.specs, entries)
        variables = self._model.from_entries(entries)
        self.note(variables, x)
        return variables

    def _initial(
        self, x: PyTree, fixed_entries: Sequence[PyTree] | None = None
    ) -> Initial:
        """The initial variables for an input; fixed ones stay as they are."""
        batch = self._model.sample_batch(x, self._partition)
        return self._model.initial(batch, fixed_entries)

    def _check(self, variables: PyTree, x: PyTree) -> Initial | None:
        """Compares variables with those that the layers would make for an input.

        Layers that cannot make such variables take them as they are.

        Returns:
          The variables that the layers would make; ``None`` for one model that cannot
          make any, such as one whose parameters follow from data.

        Raises:
          ValueError: if the variables are not those of the model.
        """
        message = self._misfit(variables, x)
        entries = self._model.entries(variables)
        fixed_entries = entries
        initial = None
        try:
            initial = self._initial(x)
            fixed_entries = [*map(_matching_state, initial.specs, entries)]
            self._compare(initial.specs, variables, message)
        except Exception:
            with suppress(Exception):  # the first error says what is wrong
                with_fixed = self._initial(x, fixed_entries)
                self._compare(with_fixed.specs, variables, message)
                return with_fixed
            if initial is None and not self._model.is_list:
                return None
            raise
        return initial

    def _compare(
        self, expected: Sequence[PyTree], variables: PyTree, message: str
    ) -> None:
        """Checks that variables are like initial ones.

        Args:
          expected: specs of the initial variables of each layer.
          variables: the variables.
          message: the beginning of the error.
        """
        if self._model.is_list:
            parent = self._model.parent
            _variables.check_layers(parent, expected, variables, message)
        else:
            (expected_specs,) = expected
            specs = _microbatch.array_specs(variables, "variables")
            _variables.check_model_variables(
                {"variables": expected_specs}, {"variables": specs}, message
            )

    def _signature(self, variables: PyTree) -> Any:
        entries = self._model.entries(variables)
        leaves, tree = jax.tree.flatten(tuple(entries))
        return tree, _signature.shape_keys(leaves)

    def _misfit(self, variables: PyTree, x: PyTree) -> str:
        """The beginning of an error on variables and an input that do not fit."""
        fitting_input = self._inputs.get(self._signature(variables))
        if fitting_input in (None, shape_text(x)):
            return (
                f"the variables are not those of this model for x of {shape_text(x)}; "
                f"one of the two is wrong"
            )
        return (
            f"x is {shape_text(x)}, and the variables fit {fitting_input}, with which "
            f"they were made or used before; give such an x, and x before the targets"
        )


def _params_alone(entry: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The parameters of an entry, without other collections."""
    return {name: entry[name] for name in entry if name == "params"}


def _matching_state(specs: Mapping[str, PyTree], entry: Any) -> dict[str, PyTree]:
    """The collections of state of an entry that have the same leaves as initial ones.

    Their shapes may differ: a cache has room for more tokens than the input has.

    Args:
      specs: the initial collections of the layer.
      entry: the variables of the layer, as the caller has them.
    """
    structure = jax.tree.structure
    return {
        name: entry[name]
        for name, collection in specs.items()
        if name != "params" and structure(entry.get(name)) == structure(collection)
    }

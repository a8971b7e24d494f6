"""One model as a function of its variables and a micro-batch."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import chex
from flax import errors
from jax.tree_util import keystr

from .._functions._batch import Axes
from .._instructions._sharding import Sharding
from .._layers import _linen, _rng
from .._layers._advice import missing_inputs
from .._layers._layer import LayerAdapter, check_unchanged
from .._layers._parent import Parent
from .._layers._sequence import Made, called
from .._layers._stage import shapes
from .._run import _param_sharding, _variables
from .._run._pipe import Pipe
from ._modules import Modules

PyTree = Any


class Model(Modules):
    """A model.

    Args:
      layer: the model.
      axes: where the examples are.
    """

    called = "the model"
    advice = "variables = pipe.place(variables, x)"

    def __init__(self, layer: LayerAdapter, axes: Axes) -> None:
        super().__init__([layer], Parent([layer], is_list=False), axes)
        self._layer = layer

    def entries(self, variables: PyTree) -> Sequence[PyTree]:
        """The variables of each layer: of the one that there is.

        Raises:
          ValueError: if they have not the form of variables.
        """
        _variables.check_model(variables)
        return (variables,)

    def init(self, key: chex.PRNGKey, x: PyTree, given: Sequence[PyTree]) -> Made:
        """Makes the variables: see `Sequential.init`."""
        (entry,) = given

        def run(handles: Sequence[Any], _: Any) -> Any:
            return called(self._layer, handles[0], entry, key, x)

        with self._naming(x):
            (y, own), (made,) = self.parent.init(key, given, run)
        return Made(y, [made or own], ())

    def applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """The output for a micro-batch, and what changes of the variables."""
        check_unchanged(self.layers, self.called)
        try:
            keys = _rng.streams(rngs)
            run = functools.partial(self._call, x, keys, train)
            with self._naming(x):
                y, (changed,) = self.parent((variables,), rngs, train, run)
            return y, changed
        except Exception as error:
            _refuse_writes(error, self._layer.owner, variables, train)
            if _variables.lacks_params(variables):
                error.add_note(f"variables has no entry 'params'; {_variables.WRAPPED}")
            raise

    @contextmanager
    def _naming(self, x: PyTree) -> Iterator[None]:
        """Adds to any exception that the model raised it, and what to type."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"raised by the model ({self._layer.name}), whose input was "
                f"{shapes(x)}; x comes before the targets"
            )
            if names := missing_inputs(error, self._layer):
                others = ", ".join(f"{name}={name}" for name in names)
                error.add_note(
                    f"a model that takes several inputs is given all of them as one: "
                    f"x = jpipe.inputs(x, {others})"
                )
            raise

    def _call(self, x: PyTree, keys: Any, train: bool, handles: Sequence[Any]) -> Any:
        return self._layer.call(handles[0], x, keys, train)

    def shardings(
        self, pipe: Pipe, variables: PyTree, stages: Sequence[int]
    ) -> list[Sharding]:
        """Of each leaf of the variables, in its stage."""
        devices = [pipe.devices[stage] for stage in stages]
        return _param_sharding.of_tree(pipe, variables, devices, self._layer.owner)

    def text(self, path: Any) -> str:
        """How errors call what is written to a variable."""
        return keystr(path, simple=True, separator="/")


def _refuse_writes(
    error: Exception, owner: Any, variables: PyTree, train: bool
) -> None:
    """Says what to type where a model of linen writes in evaluation, as caches do.

    Args:
      error: what a call of it raised.
      owner: the model.
      variables: what it was given.
      train: whether this is training.

    Raises:
      ValueError: if the error is one of these.
    """
    if train or not _linen.is_module(owner):
        return
    if "cache" in variables or isinstance(error, errors.ModifyScopeVariableError):
        raise ValueError(
            "a model of linen writes its variables in evaluation, as attention with a "
            "cache does (decode=True); a pipeline finds in evaluation where they stay, "
            "and gives outputs alone. Give it the model with decode=False, which has "
            "the same parameters; decode by model.apply({**cache, "
            "**jax.device_put(variables, device)}, token, mutable=['cache']), or list "
            "its layers. A batch norm needs use_running_average=not train"
        ) from error

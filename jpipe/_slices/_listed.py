"""A list of layers as one function: a mark stands between two stages."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from .._functions._batch import Axes
from .._instructions._sharding import Sharding
from .._layers import _rng, _skip
from .._layers._sequence import Made, Sequential
from .._run import _param_sharding, _variables
from .._run._pipe import Pipe
from . import _marks
from ._modules import Modules
from ._stages import Stages

PyTree = Any


class Listed(Modules):
    """A list of layers.

    Args:
      pipe: the stages.
      axes: where the examples are.

    Attributes:
      routes: the skip connections between stages, of the last trace.
    """

    called = "layer {}"
    advice = "variables = pipe.place(variables)"
    is_local = True

    def __init__(self, pipe: Pipe, axes: Axes) -> None:
        self._pipe = pipe
        self._layers = Sequential(pipe.layers, pipe.stage_of_layer)
        self.routes: Sequence[_skip.Route] = ()
        super().__init__(pipe.layers, self._layers.parent, axes)

    def entries(self, variables: PyTree) -> Sequence[PyTree]:
        """The variables of each layer.

        Raises:
          ValueError: if there is not one entry for each.
        """
        _variables.check_length(variables, len(self.layers))
        return variables

    def of_entries(self, entries: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The inverse."""
        return tuple(entries)

    def init(self, key: chex.PRNGKey, x: PyTree, given: Sequence[PyTree]) -> Made:
        """Makes the variables: see `Sequential.init`."""
        made = self._layers.init(key, x, given)
        self.routes = made.routes
        return made

    def applied(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[PyTree, PyTree]:
        """The output for a micro-batch, and what changes of the variables."""
        made = self._layers(variables, x, rngs, train, _Ends(self._pipe))
        self.routes = made.routes
        return jax.tree.map(jnp.asarray, made.y), tuple(made.entries)

    def shardings(
        self, pipe: Pipe, variables: PyTree, stages: Sequence[int]
    ) -> list[Sharding]:
        """Of each leaf of the variables, in its stage."""
        del stages
        return _param_sharding.shardings(pipe, variables)

    def text(self, path: Any) -> str:
        """How errors call what is written to a variable."""
        layer, *names = path
        tail = jax.tree_util.keystr(tuple(names), simple=True, separator="/")
        name = self.layers[layer.idx].name
        return f"layer {layer.idx} ({name}) writes {tail}"

    def skips(self, stages: Stages) -> dict[Any, str]:
        """By each value that a skip connection brings to a stage, its name."""
        marked = _marks.marked(stages.first.closed)
        return {
            var: _skip.label(self.routes[number - 1].key)
            for var, (_, number) in marked.items()
            if number
        }


class _Ends:
    """Marks what leaves a stage: its output, and what it stashed for later ones."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        # Of what was stashed in an earlier stage, its number in the marks.
        self._stashed: dict[_skip.Key, int] = {}

    def __call__(self, layer: int, x: PyTree, skips: dict[_skip.Key, PyTree]) -> PyTree:
        stage = self._pipe.stages[self._pipe.stage_of_layer[layer]]
        if layer + 1 < stage.span.stop or stage is self._pipe.stages[-1]:
            return x
        new = [key for key in skips if key not in self._stashed]
        self._stashed |= {key: len(self._stashed) + i for i, key in enumerate(new, 1)}
        own = {self._stashed[key]: key for key in new}
        x = jax.tree.map(jnp.asarray, x)
        trees = {0: x} | {i: skips[key] for i, key in own.items()}
        marked = _marks.numbered(stage.index, trees)
        skips |= {key: marked[i] for i, key in own.items()}
        return marked[0]

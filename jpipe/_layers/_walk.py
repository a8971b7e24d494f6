"""A model met layer by layer on abstract values: what each is given and would make."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import chex
import jax

from . import _rng, _skip
from ._alike import origin
from ._initialize import init_with
from ._layer import Layer, zeros
from ._stage import StageFunction, naming

PyTree = Any


class Visit(NamedTuple):
    """One layer, as it was met on abstract values.

    Attributes:
      stage: the number of its stage.
      layer: the layer.
      x: its input, as `jax.ShapeDtypeStruct` leaves.
      skips: what it may pop, likewise.
      variables: its variables, likewise; ``{}`` if an earlier layer owns them.
    """

    stage: int
    layer: Layer
    x: PyTree
    skips: dict[_skip.Key, PyTree]
    variables: PyTree


def walk(
    stages: Sequence[StageFunction], key: chex.PRNGKey, spec: PyTree
) -> tuple[list[Visit], tuple[_skip.Route, ...]]:
    """Walks the model on abstract values only.

    Args:
      stages: all stages, in order.
      key: any key.
      spec: the input of the model, as `jax.ShapeDtypeStruct` leaves.

    Returns:
      What was met at each layer, and the routes of the skip connections.

    Raises:
      ValueError: if the skip connections do not fit, with every fault.
    """
    so_far = _Walk(key, spec)
    for stage in stages:
        for number, layer in enumerate(stage.layers, stage.first):
            with naming(stage.index, number, layer, so_far.spec):
                so_far.visit(stage.index, number, layer)
    return so_far.visits, _skip.routes(so_far.uses)


class _Outcome(NamedTuple):
    """What a layer would make: its variables and its output."""

    variables: PyTree
    y: PyTree


class _Walk:
    """How far the walk has come.

    Args:
      key: any key.
      spec: the input of the model.

    Attributes:
      spec: the input of the next layer.
      visits: the layers met.
      uses: what they did with the skip connections.
    """

    def __init__(self, key: chex.PRNGKey, spec: PyTree) -> None:
        self.spec = spec
        self.visits: list[Visit] = []
        self.uses: list[_skip.Use] = []
        self._key = key
        self._skips: dict[_skip.Key, PyTree] = {}
        # By module: layers with the same one share variables.
        self._owners: dict[int, PyTree] = {}
        # Equal layers on equal inputs are traced once.
        self._known: dict[Hashable, _Outcome] = {}

    def visit(self, stage: int, number: int, layer: Layer) -> None:
        """Goes through one layer."""
        before, frames = dict(self._skips), []
        shared = layer.identity in self._owners
        try:
            outcome = self._outcome(layer, frames)
        except Exception:
            self._note(stage, number, layer, frames)
            # After a guess at what an unknown name pops, an error says nothing.
            if any(use.frame.unknown for use in self.uses):
                _skip.routes(self.uses, complete=False)
            raise
        self._note(stage, number, layer, frames[-1:])
        own = {} if shared else outcome.variables
        self.visits.append(Visit(stage, layer, self.spec, before, own))
        self._owners.setdefault(layer.identity, outcome.variables)
        self.spec = outcome.y

    def _note(
        self, stage: int, number: int, layer: Layer, frames: list[_skip.Frame]
    ) -> None:
        self.uses += [_skip.Use(number, layer.name, stage, frame) for frame in frames]

    def _outcome(self, layer: Layer, frames: list[_skip.Frame]) -> _Outcome:
        # Tied layers go their own way: an earlier one owns their variables.
        alike = None if layer.identity in self._owners else origin(layer.source)
        if alike is None:
            return self._traced(layer, frames)
        leaves, tree = jax.tree.flatten(self.spec)
        key = alike, tree, tuple(leaves)
        if key in self._known:
            # Arrays of its own: what counts bytes tells them apart by identity.
            return jax.tree.map(copy.copy, self._known[key])
        outcome = self._traced(layer, frames)
        # One that stashes or pops is another each time.
        if not any(frame.stashed or frame.popped for frame in frames):
            self._known[key] = outcome
        return outcome

    def _traced(self, layer: Layer, frames: list[_skip.Frame]) -> _Outcome:
        spec, skips = self.spec, self._skips
        names, left = list(skips), []
        # Zeros are what an unknown name pops: something to go on with, to find the
        # other faults too.

        def init(key: chex.PRNGKey) -> PyTree:
            return init_with(layer, key, spec, skips, zeros(spec), frames)

        def apply(variables: PyTree, x: PyTree, key: chex.PRNGKey, popped: Any) -> Any:
            values = dict(zip(names, popped, strict=True))
            with _skip.applying(values, layer.namespace, guess=zeros(x)) as frame:
                frames.append(frame)
                y, _ = layer.apply(variables, x, _rng.layer_rngs(key, 0, 0), False)
            left.extend(values)
            return y, list(values.values())

        if layer.identity in self._owners:
            variables = self._owners[layer.identity]
            _check_shareable(layer, variables)
        else:
            variables = jax.eval_shape(init, self._key)
        popped = list(skips.values())
        y, values = jax.eval_shape(apply, variables, spec, self._key, popped)
        self._skips = dict(zip(left, values, strict=True))
        return _Outcome(variables, y)


def _check_shareable(layer: Layer, variables: PyTree) -> None:
    others = {name: value for name, value in variables.items() if name != "params"}
    if jax.tree.leaves(others):
        raise ValueError(
            f"{layer.name} is listed twice and has collections beside its parameters "
            f"({', '.join(variables)}): they cannot be shared; list two modules, or "
            f"wrap both uses in one"
        )

"""A stage: neighbouring layers as one pure function, with abstract shapes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from . import _batchnorm, _rng, _skip
from ._layer import Layer, init_with

PyTree = Any


@dataclass(frozen=True)
class StageFunction:
    """The layers of one stage, one after the other.

    Attributes:
      index: the number of the stage.
      first: the number of its first layer in the user's list.
      layers: its layers.
    """

    index: int
    first: int
    layers: tuple[Layer, ...]

    @property
    def span(self) -> slice:
        """Where its layers stand in a tuple with one entry per layer."""
        return slice(self.first, self.first + len(self.layers))

    def __call__(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        rngs: _rng.Rngs = None,
        microbatch: jax.Array | int = 0,
        train: bool = False,
        skips: dict[_skip.Key, PyTree] | None = None,
    ) -> tuple[PyTree, tuple[dict[str, PyTree], ...]]:
        """Applies the layers.

        Args:
          variables: one entry per layer of the stage.
          x: the input of its first layer.
          rngs: the keys of the step, or ``None``.
          microbatch: the number of the micro-batch.
          train: whether this is training.
          skips: what its layers may pop; in the end what they stashed for later stages.

        Returns:
          The output of the last layer, and the collections that each layer changed.
        """
        changed = []
        skips = {} if skips is None else skips
        for offset, (layer, entry) in enumerate(
            zip(self.layers, variables, strict=True)
        ):
            number = self.first + offset
            keys = _rng.layer_rngs(rngs, microbatch, number)
            _batchnorm.enter_layer(offset)
            with (
                naming(self.index, number, layer, x),
                jax.named_scope(layer.name),
                _skip.applying(skips, layer.namespace),
            ):
                x, change = layer.apply(entry, x, keys, train)
            changed.append(change)
        return x, tuple(changed)


def fuse(layers: Sequence[Layer], balance: Sequence[int]) -> tuple[StageFunction, ...]:
    """Groups neighbouring layers into stages of the given sizes."""
    stages = []
    first = 0
    for index, size in enumerate(balance):
        stages.append(StageFunction(index, first, tuple(layers[first : first + size])))
        first += size
    return tuple(stages)


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
    visits: list[Visit] = []
    first: dict[int, Visit] = {}  # by module: layers with the same one share variables
    uses: list[_skip.Use] = []
    skips: dict[_skip.Key, PyTree] = {}
    for stage in stages:
        for number, layer in enumerate(stage.layers, stage.first):
            frames: list[_skip.Frame] = []
            try:
                with naming(stage.index, number, layer, spec):
                    owner = first.get(layer.identity)
                    made = _visit(stage.index, layer, key, spec, skips, frames, owner)
            except Exception:
                uses += [_skip.Use(number, layer.name, stage.index, f) for f in frames]
                # After a guess at what an unknown name pops, an error says nothing.
                if any(use.frame.unknown for use in uses):
                    _skip.routes(uses, complete=False)
                raise
            visit, spec, skips = made
            visits.append(visit)
            first.setdefault(layer.identity, visit)
            uses.append(_skip.Use(number, layer.name, stage.index, frames[-1]))
    return visits, _skip.routes(uses)


def _visit(
    stage: int,
    layer: Layer,
    key: chex.PRNGKey,
    spec: PyTree,
    skips: dict[_skip.Key, PyTree],
    frames: list[_skip.Frame],
    owner: Visit | None,
) -> tuple[Visit, PyTree, dict[_skip.Key, PyTree]]:
    """One layer; also its output and what is left to be popped."""

    def init(key: chex.PRNGKey) -> PyTree:
        guess = _guess(spec)
        return init_with(layer, key, spec, skips, guess, frames)

    def apply(variables: PyTree, x: PyTree, key: chex.PRNGKey, skips: Any) -> Any:
        values = dict(zip(names, skips, strict=True))
        with _skip.applying(values, layer.namespace, guess=_guess(x)) as frame:
            frames.append(frame)
            y, _ = layer.apply(variables, x, _rng.layer_rngs(key, 0, 0), False)
        left.extend(values)
        return y, list(values.values())

    names, left = list(skips), []
    variables = jax.eval_shape(init, key) if owner is None else owner.variables
    if owner is not None and jax.tree.leaves(
        {name: value for name, value in variables.items() if name != "params"}
    ):
        raise ValueError(
            f"{layer.name} is listed twice and has collections beside its parameters "
            f"({', '.join(variables)}): they cannot be shared; list two modules, or "
            f"wrap both uses in one"
        )
    y, values = jax.eval_shape(apply, variables, spec, key, list(skips.values()))
    own = variables if owner is None else {}
    visit = Visit(stage, layer, spec, skips, own)
    return visit, y, dict(zip(left, values, strict=True))


def _guess(x: PyTree) -> PyTree:
    """Something to go on with where a name is unknown, to find the other faults too."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)


@contextmanager
def naming(stage: int, number: int, layer: Layer, x: PyTree) -> Iterator[None]:
    """Adds to any exception which layer raised it, where, and on what input."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by layer {number} ({layer.name}) of stage {stage}, "
            f"whose input was {shapes(x)}"
        )
        raise


def shapes(tree: PyTree) -> str:
    """A pytree as text: ``float32[8,16]`` in place of each array."""
    return str(jax.tree.map(_Shape, tree))


class _Shape:
    def __init__(self, leaf: Any) -> None:
        shape = ",".join(map(str, getattr(leaf, "shape", ())))
        self.text = f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]"

    def __repr__(self) -> str:
        return self.text

"""Layers, one after the other, as one function of their variables.

One model is a sequence of one layer, which is called as it would be without a pipeline:
its keys are not folded with the number of the layer, its operations have no name in
front, and it may return what no layer could give to a next one.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from .._jaxprs import _jaxpr
from .._messages import raise_all
from . import _rng, _skip
from ._adapter import LayerAdapter
from ._advice import advice, missing_inputs
from ._parent import Entries, Parent
from ._text import shape_text

PyTree = Any
# Is given the number of a layer, its output and what may be popped after it; gives
# these, or others in their place.
After = Callable[[int, PyTree, dict[_skip.Key, PyTree]], PyTree]


class SequenceOutputs(NamedTuple):
    """What layers make.

    Attributes:
      y: the output of the last one.
      entries: by layer the variables: all that it makes, or the collections that it
        may have changed.
      routes: the skip connections between stages.
    """

    y: PyTree
    entries: Sequence[PyTree]
    routes: tuple[_skip.SkipRoute, ...]


class Sequential:
    """Layers, each given what the one before returned.

    Args:
      layers: the layers.
      stages: the number of the stage of each, for errors and skip connections.
      numbers: what errors call them, if they are not all.
      is_list: whether they are a list; else they are one model.
    """

    def __init__(
        self,
        layers: Sequence[LayerAdapter],
        stages: Sequence[int],
        numbers: Sequence[int] | None = None,
        *,
        is_list: bool = True,
    ) -> None:
        self.layers = layers
        self.is_list = is_list
        self.parent = Parent(layers, is_list=is_list)
        self._stages = stages
        self._numbers = range(len(layers)) if numbers is None else numbers

    def init(
        self, key: chex.PRNGKey, x: PyTree, given: Sequence[Mapping[str, PyTree]]
    ) -> SequenceOutputs:
        """Makes variables.

        Args:
          key: the key.
          x: an input.
          given: by layer variables that are there already, and stay as they are.
        """
        entries = [*given]

        def run(handles: Sequence[Any], after_layer: Callable[[int], None]) -> Any:
            def call(i: int, x: PyTree) -> PyTree:
                layer_key = _rng.layer_key(key, i) if self.is_list else key
                y, entries[i] = _call_for_init(
                    self.layers[i], handles[i], entries[i], key=layer_key, x=x
                )
                after_layer(i)
                return y

            return self._through(x, call)

        with self._naming_model(x):
            (y, routes), linen_entries = self.parent.init(key, given, run)
        pairs = zip(linen_entries, entries, strict=True)
        return SequenceOutputs(
            y, [of_linen or entry for of_linen, entry in pairs], routes
        )

    def __call__(
        self,
        entries: Entries,
        x: PyTree,
        rngs: _rng.Rngs = None,
        train: bool = False,
        after: After | None = None,
    ) -> SequenceOutputs:
        """Applies the layers.

        Args:
          entries: the variables, by layer.
          x: the input.
          rngs: the keys of the micro-batch, or ``None``.
          train: whether this is training.
          after: is called after each layer of a list.
        """

        def run(handles: Sequence[Any]) -> Any:
            def call(i: int, x: PyTree) -> PyTree:
                keys = _rng.layer_rngs(rngs, i) if self.is_list else _rng.streams(rngs)
                return self.layers[i].call(handles[i], x, keys, train)

            return self._through(x, call, after)

        with self._naming_model(x):
            (y, routes), changed = self.parent(entries, rngs, train, run)
        return SequenceOutputs(y, changed, routes)

    def last(
        self,
        entries: Entries,
        x: PyTree,
        rngs: _rng.Rngs,
        train: bool,
        skips: dict[_skip.Key, PyTree],
    ) -> tuple[PyTree, Sequence[PyTree]]:
        """Applies the last layer alone.

        Args:
          entries: the variables, by layer.
          x: its input.
          rngs: the keys of the micro-batch, or ``None``.
          train: whether this is training.
          skips: what it may pop; in the end what may be popped after it.

        Returns:
          Its output, and by layer the collections that may have changed.
        """
        layer, at = self.layers[-1], len(self.layers) - 1

        def run(handles: Sequence[Any]) -> Any:
            own = _rng.layer_rngs(rngs, at)
            use = _skip.SkipLayer(self._numbers[at], layer.name, self._stages[at])
            scope = _skip.skip_scope(_skip.Skips(skips), use, layer.namespace)
            with self._naming(at, x), scope:
                return layer.call(handles[-1], x, own, train)

        return self.parent(entries, rngs, train, run)

    def _through(
        self,
        x: PyTree,
        call: Callable[[int, PyTree], PyTree],
        after: After | None = None,
    ) -> tuple[PyTree, tuple[_skip.SkipRoute, ...]]:
        """Goes through the layers.

        Raises:
          ValueError: if the skip connections do not fit.
        """
        if not self.is_list:
            return call(0, x), ()
        skips = _skip.Skips()
        for i, layer in enumerate(self.layers):
            use = _skip.SkipLayer(i, layer.name, self._stages[i])
            with self._naming(i, x), jax.named_scope(layer.name):
                with _skip.skip_scope(skips, use, layer.namespace):
                    x = call(i, x)
                _check_output(i, layer, x)
            if after is not None:
                x = after(i, x, skips.values)
        return jax.tree.map(jnp.asarray, x), skips.routes()

    def _naming_model(self, x: PyTree) -> AbstractContextManager[None]:
        """Names one model in any exception that is raised; layers name themselves."""
        return nullcontext() if self.is_list else _naming_model(self.layers[0], x)

    @contextmanager
    def _naming(self, number: int, x: PyTree) -> Iterator[None]:
        """Adds to any exception which layer raised it, where, and on what input."""
        layer = self.layers[number]
        try:
            yield
        except Exception as error:
            error.add_note(
                f"raised by layer {self._numbers[number]} ({layer.name}) of stage "
                f"{self._stages[number]}, whose input was {shape_text(x)}"
            )
            if text := advice(error, layer, x):
                error.add_note(text)
            if (first := self.parent.first(number)) < number:
                error.add_note(
                    f"its parameters are those of layer {self._numbers[first]} "
                    f"({self.layers[first].name}), as both hold one module; where each "
                    f"is to have its own, make a module for each, as "
                    f"[nn.Dense(8) for _ in range(2)] does, and [nn.Dense(8)] * 2 does "
                    f"not"
                )
            raise


@contextmanager
def _naming_model(layer: LayerAdapter, x: PyTree) -> Iterator[None]:
    """Adds to any exception that a model raised its name, and what to type."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by the model ({layer.name}), whose input was {shape_text(x)}; x "
            f"comes before the targets"
        )
        if names := missing_inputs(error, layer):
            inputs = ", ".join(f"{name}={name}" for name in names)
            error.add_note(
                f"a model that takes several inputs is given all of them as one: "
                f"x = jpipe.inputs(x, {inputs})"
            )
        raise


def _call_for_init(
    layer: LayerAdapter,
    handle: Any,
    entry: PyTree,
    *,
    key: chex.PRNGKey,
    x: PyTree,
) -> tuple[PyTree, PyTree]:
    """Calls a layer as its variables are made; returns its output and its entry."""
    if layer.init is not None and not entry:
        specs = jax.tree.map(lambda a: _jaxpr.spec(jax.typeof(a)), x)
        entry = layer.init(key, specs)
        handle = entry
    return layer.call(handle, x, _rng.streams(key), False), entry


def _check_output(number: int, layer: LayerAdapter, y: PyTree) -> None:
    """Checks that a layer returned arrays: nothing else goes from stage to stage."""
    if y is None:
        raise TypeError(
            f"layer {number} ({layer.name}) returned None; it must return what the "
            f"next layer is given, also after jpipe.stash(name, x)"
        )
    faults = []
    # JAX warns of a generator among leaves, which says less than we do.
    found = jax.tree_util.tree_leaves_with_path(
        y, is_leaf=lambda node: isinstance(node, Iterator)
    )
    for path, leaf in found:
        try:
            jax.typeof(leaf)
        except TypeError:
            kind = f"{reprlib.repr(leaf)}, a {type(leaf).__name__}"
            faults.append(f"output{jax.tree_util.keystr(path)} is {kind}")
    raise_all(
        f"layer {number} ({layer.name}) must return a pytree of arrays; list a "
        f"function after it that returns arrays in tuples, lists or dicts, or register "
        f"the class of what it returns with jax.tree_util.register_dataclass",
        faults,
        error=TypeError,
    )

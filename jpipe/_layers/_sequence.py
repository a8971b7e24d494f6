"""Layers, one after the other, as one function of their variables.

    (variables of layer 0, 1, ..., x, keys)  ->  (y, variables that changed)

One model is a sequence of one layer, which is called as it would be without a pipeline:
its keys are not folded with the index of the layer, its operations have no name in
front, and it may return values that no layer could pass to a next one.
"""

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax.errors import FlaxError

from .._jaxprs import _jaxpr
from .._messages import raise_all
from . import _rng, _switches
from ._adapter import LayerAdapter
from ._advice import advice, layer_advice, missing_inputs
from ._parent import Entries, Parent
from ._skip import Passed, Skips, skip_scope
from ._text import shape_text

PyTree = Any
# ``(index of a layer, what it passes to later ones) -> what they take in its place``.
AfterLayer = Callable[[int, Passed], Passed]


class SequenceOutputs(NamedTuple):
    """The results of a sequence of layers.

    Attributes:
      y: the output of the last layer.
      entries: one entry per layer: its initial variables, or the collections that it
        may have changed.
    """

    y: PyTree
    entries: Sequence[PyTree]


class Sequential:
    """Layers, the output of each of which is the input of the next.

    Args:
      layers: the layers.
      stage_of_layer: the index of the stage of each, for errors.
      indices: the indices of the layers among those that the user listed; default: they
        are all layers.
      is_list: True if they are a list; else they are one model.

    Attributes:
      layers: likewise.
      is_list: likewise.
      parent: their modules.
    """

    def __init__(
        self,
        layers: Sequence[LayerAdapter],
        stage_of_layer: Sequence[int],
        *,
        indices: Sequence[int] | None = None,
        is_list: bool = True,
    ) -> None:
        self.layers = layers
        self.is_list = is_list
        self.parent = Parent(layers, is_list=is_list)
        self._stage_of_layer = stage_of_layer
        self._indices = range(len(layers)) if indices is None else indices

    def init(
        self,
        key: chex.PRNGKey,
        x: PyTree,
        fixed_entries: Sequence[Mapping[str, PyTree]],
    ) -> SequenceOutputs:
        """Makes variables.

        Args:
          key: the key.
          x: an input.
          fixed_entries: the variables that stay as they are, one entry per layer.
        """
        entries = [*fixed_entries]

        def run(handles: Sequence[Any], after_layer: Callable[[int], None]) -> Any:
            def call(i: int, x: PyTree) -> PyTree:
                layer_key = _rng.layer_key(key, i) if self.is_list else key
                y, entries[i] = _call_for_init(
                    self.layers[i], handles[i], entries[i], key=layer_key, x=x
                )
                after_layer(i)
                return y

            return self._call_all(x, call)

        with self._explain_model_errors(x, train=False):
            y, linen_entries = self.parent.init(key, fixed_entries, run)
        for i, linen_entry in enumerate(linen_entries):
            if linen_entry:
                entries[i] = linen_entry
        return SequenceOutputs(y, entries)

    def __call__(
        self,
        entries: Entries,
        x: PyTree,
        rngs: _rng.Rngs = None,
        *,
        train: bool = False,
        mutable: Collection[str] = (),
        created: Collection[str] = (),
        after_layer: AfterLayer | None = None,
    ) -> SequenceOutputs:
        """Applies the layers.

        Args:
          entries: the variables, one entry per layer.
          x: the input.
          rngs: the keys of the micro-batch, or ``None``.
          train: True in training.
          mutable: the collections that may change: see `Parent.__call__`.
          created: the collections that are made anew.
          after_layer: the function that is called after each layer of a list.
        """

        def run(handles: Sequence[Any]) -> Any:
            def call(i: int, x: PyTree) -> PyTree:
                keys = _rng.layer_rngs(rngs, i) if self.is_list else _rng.streams(rngs)
                return self.layers[i].call(handles[i], x, keys, train=train)

            return self._call_all(x, call, after_layer)

        with self._explain_model_errors(x, train=train):
            y, changed = self.parent(
                entries, rngs, run, train=train, mutable=mutable, created=created
            )
        return SequenceOutputs(y, changed)

    def call_last(
        self,
        entries: Entries,
        passed: Passed,
        *,
        rngs: _rng.Rngs,
        train: bool,
    ) -> tuple[Passed, Sequence[PyTree]]:
        """Applies the last layer alone: see `Pipeline.check`.

        The others are there for the variables that it shares with them.

        Args:
          entries: the variables, one entry per layer.
          passed: the values that the layer before it passes.
          rngs: the keys of the micro-batch, or ``None``.
          train: True in training.

        Returns:
          The values that it passes, and for each layer the collections that may have
          changed.
        """
        last = len(self.layers) - 1
        layer = self.layers[last]

        def run(handles: Sequence[Any]) -> Any:
            index = self._indices[last]
            keys = _rng.layer_rngs(rngs, index)
            skips = Skips(passed.stashed.copy())
            scope = skip_scope(skips, f"layer {index} ({layer.name})")
            with self._explain_layer_errors(last, passed.x), scope:
                y = layer.call(handles[last], passed.x, keys, train=train)
            return Passed(y, skips.values)

        return self.parent(entries, rngs, run, train=train)

    def _call_all(
        self,
        x: PyTree,
        call: Callable[[int, PyTree], PyTree],
        after_layer: AfterLayer | None = None,
    ) -> PyTree:
        """Calls the layers one after the other.

        Args:
          x: the input.
          call: ``(index of a layer, its input) -> its output``.
          after_layer: the function that is called after each layer of a list.

        Returns:
          The output of the last layer.

        Raises:
          ValueError: if the skip connections do not fit.
        """
        if not self.is_list:
            return call(0, x)
        skips = Skips()
        for i, layer in enumerate(self.layers):
            with self._explain_layer_errors(i, x), jax.named_scope(layer.name):
                with skip_scope(skips, f"layer {i} ({layer.name})"):
                    x = call(i, x)
                _check_output(i, layer, x)
            if after_layer is not None:
                x, skips.values = after_layer(i, Passed(x, skips.values))
        skips.check_popped()
        return jax.tree.map(jnp.asarray, x)

    @contextmanager
    def _explain_model_errors(self, x: PyTree, *, train: bool) -> Iterator[None]:
        """Notes in any exception the model that raised it; of a list, layers do."""
        try:
            yield
        except Exception as error:
            if not self.is_list:
                _note_model(error, self.layers[0], x, train=train)
            raise

    @contextmanager
    def _explain_layer_errors(self, i: int, x: PyTree) -> Iterator[None]:
        """Notes in any exception which layer raised it, where, and on which input."""
        layer = self.layers[i]
        try:
            yield
        except Exception as error:
            error.add_note(
                f"raised by layer {self._indices[i]} ({layer.name}) of stage "
                f"{self._stage_of_layer[i]}, whose input was {shape_text(x)}"
            )
            if text := layer_advice(error, layer, x):
                error.add_note(text)
            if (first := self.parent.first(i)) < i:
                error.add_note(
                    f"its parameters are those of layer {self._indices[first]} "
                    f"({self.layers[first].name}), as both hold one module; where each "
                    f"is to have its own, make a module for each, as "
                    f"[nn.Dense(8) for _ in range(2)] does, and [nn.Dense(8)] * 2 does "
                    f"not"
                )
            raise


def _note_model(
    error: Exception, layer: LayerAdapter, x: PyTree, *, train: bool
) -> None:
    """Notes in an exception the name of the model that raised it, and advice."""
    error.add_note(
        f"raised by the model ({layer.name}), whose input was {shape_text(x)}; x "
        f"comes before the targets"
    )
    opposed = _switches.opposed_switches(x, train=train)
    if opposed and isinstance(error, FlaxError):
        error.add_note(_switches.advice_on(opposed, train=train))
    elif text := advice(error):
        error.add_note(text)
    if names := missing_inputs(error, layer):
        inputs = ", ".join(f"{name}={name}" for name in names)
        error.add_note(
            f"a model that takes several inputs is given all of them as one: "
            f"x = jpipe.inputs(x, {inputs})"
        )


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
        specs = jax.tree.map(lambda array: _jaxpr.spec(jax.typeof(array)), x)
        entry = layer.init(key, specs)
        handle = entry
    return layer.call(handle, x, _rng.streams(key), train=False), entry


def _check_output(i: int, layer: LayerAdapter, y: PyTree) -> None:
    """Checks that a layer returned arrays: nothing else goes from stage to stage."""
    if y is None:
        raise TypeError(
            f"layer {i} ({layer.name}) returned None; it must return what the "
            f"next layer is given, also after jpipe.stash(name, x)"
        )
    faults = []
    # JAX warns of a generator among leaves, which says less than we do.
    leaves = jax.tree_util.tree_leaves_with_path(
        y, is_leaf=lambda node: isinstance(node, Iterator)
    )
    for path, leaf in leaves:
        try:
            jax.typeof(leaf)
        except TypeError:
            faults.append(
                f"output{jax.tree_util.keystr(path)} is {reprlib.repr(leaf)}, a "
                f"{type(leaf).__name__}"
            )
    raise_all(
        f"layer {i} ({layer.name}) must return a pytree of arrays; list a "
        f"function after it that returns arrays in tuples, lists or dicts, or register "
        f"the class of what it returns with jax.tree_util.register_dataclass",
        faults,
        error=TypeError,
    )

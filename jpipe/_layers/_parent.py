"""Modules of Flax bound to their variables together: what they share is one value.

Those of linen stand in one parent, those of nnx in one `flax.nnx.split`, so that it is
Flax that finds what several layers hold. The variables are given by layer: a variable
is in the entry of the first layer that has its module; of a module that is listed
several times, in that of the first which makes it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import DenyList

from . import _batch_norm, _linen, _nnx, _nnx_values, _rng
from ._adapter import LayerAdapter
from ._slots import Slot, Slots, path_in_layer, slot_names
from ._variable_paths import Names, flatten_variables, nest_variables

PyTree = Any
Entries = Sequence[Mapping[str, PyTree]]
# Of each layer what is called: a bound module of linen, a module of nnx, or what else
# has variables its entry.
Handles = Sequence[Any]


class Parent:
    """The modules of layers.

    Args:
      layers: all of them.
      is_list: whether they are a list; else one layer, with its module's own names.

    Attributes:
      is_list: likewise.
    """

    def __init__(self, layers: Sequence[LayerAdapter], is_list: bool = True) -> None:
        self._layers, self.is_list = layers, is_list
        owners = [layer.owner for layer in layers]
        ids = [*map(id, owners)]
        # Of each layer the first one with the same module.
        self._first = [ids.index(own) for own in ids]
        self._linen = [i for i, own in enumerate(owners) if _linen.is_module(own)]
        self._nnx = [i for i, own in enumerate(owners) if _nnx.is_module(own)]
        self._root = self._tree = owners[0]
        # By layer the names that lead to its variables, under the parent.
        self._prefix: dict[int, Names] = dict.fromkeys([*self._linen, *self._nnx], ())
        if is_list:
            slots = [Slot(own) if _linen.is_module(own) else None for own in owners]
            self._root = Slots(tuple(slots))
            firsts = [*dict.fromkeys(self._first[i] for i in self._nnx)]
            self._tree = nnx.List(owners[i] for i in firsts)
            for i in self._nnx:
                self._prefix[i] = (firsts.index(self._first[i]),)
            for i in self._linen:
                self._prefix[i] = slot_names(self._first[i])

    def first(self, layer: int) -> int:
        """The first layer with the same module, if it has one."""
        return self._first[layer] if layer in self._prefix else layer

    def __len__(self) -> int:
        return len(self._layers)

    # ---------------------------------------------------------------------- variables

    def _names(self, layer: int, names: Names) -> Names:
        """Returns the path under the parent of a variable of a layer."""
        collection, *inner = names
        return collection, *self._prefix[layer], *inner

    def _under(self, layers: Sequence[int], entries: Entries) -> dict[str, PyTree]:
        """Returns the variables of some layers as one tree under the parent."""
        leaves: dict[Names, PyTree] = {}
        for layer in layers:
            for path, value in flatten_variables(entries[layer]).items():
                leaves[self._names(layer, path)] = value
        return nest_variables(leaves)

    def _by_layer(
        self, layers: Sequence[int], tree: Mapping[str, PyTree], entries: Entries
    ) -> dict[int, dict[str, PyTree]]:
        """Splits a tree under the parent into one entry per layer: undoes `_under`.

        Args:
          layers: the layers.
          tree: the tree, which may lack variables.
          entries: the variables of all layers.
        """
        leaves = flatten_variables(tree)
        split: dict[int, dict[str, PyTree]] = {}
        for layer in layers:
            entry: dict[Names, PyTree] = {}
            for path in flatten_variables(entries[layer]):
                parent_path = self._names(layer, path)
                if parent_path in leaves:
                    entry[path] = leaves[parent_path]
            split[layer] = nest_variables(entry)
        return split

    def like(self, specs: Entries, entries: Entries) -> list[Mapping[str, PyTree]]:
        """Moves checked variables into the entries in which they are among specs."""
        leaves = flatten_variables(self._under([*self._prefix], entries))
        moved: list[Mapping[str, PyTree]] = []
        for layer, expected in enumerate(specs):
            if layer not in self._prefix:
                moved.append(entries[layer])
                continue
            paths = {
                path: self._names(layer, path) for path in flatten_variables(expected)
            }
            moved.append(
                nest_variables({path: leaves[at] for path, at in paths.items()})
            )
        return moved

    def same(self, layer: int, names: Names) -> Names:
        """What is equal for one variable in the entries of several layers."""
        return self._names(layer, names) if layer in self._prefix else (layer, *names)

    def nnx_values(self, given: Entries) -> list[dict[str, PyTree]]:
        """The variables that modules of nnx hold, the arrays themselves, by layer.

        Args:
          given: by layer variables that are there already; where those of a module are
            in the entry of a later layer, the first has none.
        """
        there = [i for i, own in enumerate(given) if own]
        later = {self._first[i] for i in there} - {*there}
        tree = _nnx_values.values(self._tree) if self._nnx else {}
        return [
            _within(tree, self._prefix[i])
            if i in self._nnx and i == self._first[i] and i not in later
            else {}
            for i in range(len(self._layers))
        ]

    def modules(self, entries: Entries) -> list[Any]:
        """Modules with values; what is none as it was listed."""
        bound = None
        if self._linen:
            bound = self._root.bind(self._under(self._linen, entries))
        merged = self._merged(entries)
        owners = [layer.owner for layer in self._layers]
        return [
            self._handle(i, bound, merged, owners) for i in range(len(self._layers))
        ]

    # -------------------------------------------------------------------------- calls

    def _merged(self, entries: Entries) -> Any:
        if not self._nnx:
            return None
        merged = _nnx_values.merge(self._tree, self._under(self._nnx, entries))
        _batch_norm.set_norm_paths(merged)
        return merged

    def _handle(
        self, layer: int, bound: Any, merged: Any, others: Sequence[Any]
    ) -> Any:
        if layer in self._linen:
            return bound.layer[layer].module if self.is_list else bound
        if layer in self._nnx:
            return merged[self._prefix[layer][0]] if self.is_list else merged
        return others[layer]

    def __call__(
        self,
        entries: Entries,
        rngs: _rng.Rngs,
        train: bool,
        run: Callable[[Handles], Any],
    ) -> tuple[Any, list[dict[str, PyTree]]]:
        """Runs what calls the modules.

        Args:
          entries: the variables.
          rngs: the keys of the micro-batch: one key, or keys by stream name, or
            ``None``.
          train: whether this is training; else nothing that linen holds changes.
          run: is given the handles.

        Returns:
          What this returns, and by layer the collections that may have changed.
        """
        merged = self._merged(entries)
        before = self._under(self._linen, entries)
        mutable = [name for name in before if name != "params"] if train else []

        def whole(bound: Any) -> Any:
            layers = range(len(self._layers))
            return run([self._handle(i, bound, merged, entries) for i in layers])

        after: Mapping[str, PyTree] = {}
        if not self._linen:
            result = whole(None)
        else:
            given = linen.apply(whole, self._root, mutable=mutable)
            try:
                result, after = given(before, rngs=_rng.linen_streams(rngs))
            except (TypeError, ValueError) as error:
                if "perturbations" in before:
                    error.add_note(
                        f"variables have perturbations, which have a value for each "
                        f"example and are not split; {_linen.NOT_SOWN_ADVICE}"
                    )
                raise
            after = _in_shape(before, after)
        changed = self._by_layer(self._linen, after, entries)
        if merged is not None:
            values = _in_shape(
                self._under(self._nnx, entries), _nnx_values.values(merged)
            )
            changed |= self._by_layer(self._nnx, values, entries)
        return result, [changed.get(i, {}) for i in range(len(self._layers))]

    def init(
        self,
        key: chex.PRNGKey,
        given: Entries,
        run: Callable[[Handles, Callable[[int], None]], Any],
    ) -> tuple[Any, list[dict[str, PyTree]]]:
        """Runs what makes the variables.

        Args:
          key: the key.
          given: by layer variables that are there already.
          run: is given the handles, and what to call after each layer.

        Returns:
          What this returns, and by layer the variables of linen.
        """
        count = range(len(self._layers))
        merged = self._merged(
            [{**a, **b} for a, b in zip(self.nnx_values(given), given, strict=True)]
        )
        # By the first layer of a module and the names of a variable, who has it.
        maker = {
            (self._first[i], names): i
            for i in self._linen
            for names in flatten_variables(given[i])
        }
        several = {first for i, first in enumerate(self._first) if i != first}

        def whole(bound: Any) -> Any:
            for collection, own in self._under(self._linen, given).items():
                for name, value in own.items():
                    bound.scope.put_variable(collection, name, value)
            handles = [self._handle(i, bound, merged, given) for i in count]

            def made(layer: int) -> None:
                first = self._first[layer]
                if layer in self._linen and first in several:
                    for names in flatten_variables(handles[layer].variables):
                        maker.setdefault((first, names), layer)

            return run(handles, made)

        if not self._linen:
            return whole(None), [{} for _ in count]
        make = linen.init_with_output(
            whole, self._root, mutable=DenyList("intermediates")
        )
        with _linen.without_sown():
            result, variables = make(_linen.init_keys(key))
        found: list[dict[Names, PyTree]] = [{} for _ in count]
        for first in dict.fromkeys(self._first[i] for i in self._linen):
            for names, value in flatten_variables(
                _within(variables, self._prefix[first])
            ).items():
                found[maker.get((first, names), first)][names] = value
        return result, [*map(nest_variables, found)]


def _within(tree: Mapping[str, PyTree], prefix: Names) -> dict[str, PyTree]:
    """What stands in each collection behind some names."""
    found = {}
    for collection, own in tree.items():
        for name in prefix:
            own = own.get(name, {})
        if own:
            found[collection] = own
    return found


def _in_shape(
    before: Mapping[str, PyTree], after: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """The variables after a call, in the shapes that they had before it.

    A statistic that is made of shape ``(d,)`` may be written as ``(1, 1, d)``, as by
    ``keepdims=True``: to what it is broadcast with, the two are the same.

    Raises:
      ValueError: with what it made, or what it made something else of.
    """
    was, now = flatten_variables(before), flatten_variables(after)
    kept = {
        names: _like(was[names], x) if names in was else x for names, x in now.items()
    }
    shapes_before, shapes_after = (
        {names: jax.tree.map(np.shape, x) for names, x in tree.items()}
        for tree in (was, kept)
    )
    faults = [
        f"{'/'.join(map(str, (names[0], *path_in_layer(names[1:]))))} was "
        f"{shapes_before.get(names, 'not there')} and became {shape}"
        for names, shape in shapes_after.items()
        if shapes_before.get(names) != shape
    ]
    if faults:
        raise ValueError(
            f"a call changes which variables there are, or their shapes: "
            f"{'; '.join(faults)}. A pipeline keeps arrays in the structure that they "
            f"were made in, in init or __init__; {_linen.NOT_SOWN_ADVICE}"
        )
    return nest_variables(kept)


def _like(old: PyTree, new: PyTree) -> PyTree:
    """New values in the shapes of old ones, where these differ in leading ones."""

    def reshaped(old: Any, new: Any) -> Any:
        shapes = np.shape(old), np.shape(new)
        is_like = len({*map(_without_leading_ones, shapes)}) == 1
        is_other = shapes[0] != shapes[1]
        return jnp.reshape(new, shapes[0]) if is_like and is_other else new

    is_like = jax.tree.structure(old) == jax.tree.structure(new)
    return jax.tree.map(reshaped, old, new) if is_like else new


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))

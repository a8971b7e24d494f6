"""Modules of Flax bound to their variables together: what they share is one value.

    layers     [Dense a, norm b, Dense a, nnx c, jnp.sin]
    linen      one parent module:    layer_0/module = a,  layer_1/module = b
    nnx        one flax.nnx.split:   [0] = c
    entries    ({a}, {b}, {}, {c}, {})

Linen modules stand in one parent and nnx modules in one list, so that it is Flax that
finds which submodules layers share. The variables have one entry per layer: a variable
is in the entry of the first layer that has its module; if a module is listed several
times, in that of the first of these layers whose call makes the variable.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import DenyList
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from . import _batch_norm, _linen, _nnx, _nnx_values, _rng
from ._adapter import LayerAdapter
from ._linen_parent import LinenChild, LinenParent, module_path, path_in_layer
from ._variable_paths import Names

PyTree = Any
Entries = Sequence[Mapping[str, PyTree]]
# The object that is called for each layer: a bound module of linen, a module of nnx,
# or for a layer without a module its entry.
Handles = Sequence[Any]


class Parent:
    """The modules of layers.

    Args:
      layers: all of them.
      is_list: True if they are a list; else they are one layer, whose variables have
        the names of its module.

    Attributes:
      is_list: likewise.
    """

    def __init__(self, layers: Sequence[LayerAdapter], *, is_list: bool = True) -> None:
        self.is_list = is_list
        self._owners = [layer.owner for layer in layers]
        # layer -> the first layer with the same owner
        owner_ids = [id(owner) for owner in self._owners]
        self._first = [owner_ids.index(owner_id) for owner_id in owner_ids]
        self._linen: list[int] = []
        self._nnx: list[int] = []
        for i, owner in enumerate(self._owners):
            if _linen.is_module(owner):
                self._linen.append(i)
            elif _nnx.is_module(owner):
                self._nnx.append(i)

        # The parent of all linen modules, and the list of all nnx modules; or the one
        # module itself. layer -> the names that lead to its variables in these.
        self._linen_parent: Any = self._owners[0]
        self._nnx_parent: Any = self._owners[0]
        self._prefix: dict[int, Names] = dict.fromkeys([*self._linen, *self._nnx], ())
        if is_list:
            self._set_parents()

    def _set_parents(self) -> None:
        """Puts the modules of a list under their parents."""
        children = tuple(
            LinenChild(owner) if _linen.is_module(owner) else None
            for owner in self._owners
        )
        self._linen_parent = LinenParent(children)
        for i in self._linen:
            self._prefix[i] = module_path(self._first[i])

        first_layers = list(dict.fromkeys(self._first[i] for i in self._nnx))
        self._nnx_parent = nnx.List(self._owners[i] for i in first_layers)
        for i in self._nnx:
            self._prefix[i] = (first_layers.index(self._first[i]),)

    def first(self, layer: int) -> int:
        """The first layer with the same module, if it has one."""
        return self._first[layer] if layer in self._prefix else layer

    def __len__(self) -> int:
        return len(self._owners)

    # ---------------------------------------------------------------------- variables

    def parent_path(self, layer: int, path: Names) -> Names:
        """The path of a variable under the parents, from its path in an entry.

        It is equal for one variable in the entries of several layers.
        """
        if layer not in self._prefix:
            return layer, *path
        collection, *names = path
        return collection, *self._prefix[layer], *names

    def _parent_tree(
        self, layers: Sequence[int], entries: Entries
    ) -> dict[str, PyTree]:
        """The variables of some layers as one tree under their parent."""
        leaves: dict[Names, PyTree] = {}
        for layer in layers:
            for path, value in flatten_mapping(entries[layer]).items():
                leaves[self.parent_path(layer, path)] = value
        return unflatten_mapping(leaves)

    def _split_tree(
        self, layers: Sequence[int], tree: Mapping[str, PyTree], entries: Entries
    ) -> dict[int, dict[str, PyTree]]:
        """Splits a tree under the parent by layers: undoes `_parent_tree`.

        Args:
          layers: the layers.
          tree: the tree, which may lack variables.
          entries: the variables of all layers.

        Returns:
          layer -> its entry.
        """
        leaves = flatten_mapping(tree)
        split: dict[int, dict[str, PyTree]] = {}
        for layer in layers:
            entry: dict[Names, PyTree] = {}
            for path in flatten_mapping(entries[layer]):
                parent_path = self.parent_path(layer, path)
                if parent_path in leaves:
                    entry[path] = leaves[parent_path]
            split[layer] = unflatten_mapping(entry)
        return split

    def move_to_owners(
        self, specs: Entries, entries: Entries
    ) -> list[Mapping[str, PyTree]]:
        """Moves checked variables into the entries in which they are among specs."""
        leaves = flatten_mapping(self._parent_tree([*self._prefix], entries))
        moved: list[Mapping[str, PyTree]] = []
        for layer, expected in enumerate(specs):
            if layer not in self._prefix:
                moved.append(entries[layer])
                continue
            entry = {
                path: leaves[self.parent_path(layer, path)]
                for path in flatten_mapping(expected)
            }
            moved.append(unflatten_mapping(entry))
        return moved

    def held_entries(self, fixed_entries: Entries) -> list[dict[str, PyTree]]:
        """The variables that modules of nnx hold, the arrays themselves, by layer.

        Args:
          fixed_entries: the variables that stay as they are, one entry per layer; if
            those of a module are in the entry of a later layer, the first has none.
        """
        filled = {i for i, entry in enumerate(fixed_entries) if entry}
        moved_from = {self._first[i] for i in filled} - filled
        tree = _nnx_values.values(self._nnx_parent) if self._nnx else {}
        entries: list[dict[str, PyTree]] = [{} for _ in self._owners]
        for i in self._nnx:
            if i == self._first[i] and i not in moved_from:
                entries[i] = _subtree(tree, self._prefix[i])
        return entries

    def modules(self, entries: Entries) -> list[Any]:
        """The modules with values, one per layer; other layers as they were listed."""
        bound = None
        if self._linen:
            variables = self._parent_tree(self._linen, entries)
            bound = self._linen_parent.bind(variables)
        return self._handles(bound, self._merged_nnx(entries), self._owners)

    # -------------------------------------------------------------------------- calls

    def _merged_nnx(self, entries: Entries) -> Any:
        """New modules of nnx with the variables as values; ``None``: there are none."""
        if not self._nnx:
            return None
        variables = self._parent_tree(self._nnx, entries)
        merged = _nnx_values.merge(self._nnx_parent, variables)
        _batch_norm.set_norm_paths(merged)
        return merged

    def _handles(self, bound: Any, merged: Any, defaults: Sequence[Any]) -> list[Any]:
        """The handles of all layers.

        Args:
          bound: the bound parent of linen modules.
          merged: the list of nnx modules.
          defaults: the handle of each layer that has no module.
        """
        handles = list(defaults)
        for i in self._linen:
            handles[i] = bound.layer[i].module if self.is_list else bound
        for i in self._nnx:
            handles[i] = merged[self._prefix[i][0]] if self.is_list else merged
        return handles

    def __call__(
        self,
        entries: Entries,
        rngs: _rng.Rngs,
        run: Callable[[Handles], Any],
        *,
        train: bool,
        mutable: Collection[str] = (),
        created: Collection[str] = (),
    ) -> tuple[Any, list[dict[str, PyTree]]]:
        """Runs a function that calls the modules.

        Args:
          entries: the variables.
          rngs: the keys of the micro-batch: one key, or keys by stream name, or
            ``None``.
          run: ``handles -> result``.
          train: True in training, in which all collections of linen but parameters
            may change.
          mutable: the collections of linen that may change in evaluation.
          created: the collections that linen makes anew, as in an initialization.

        Returns:
          The result, and for each layer the collections that may have changed.
        """
        merged = self._merged_nnx(entries)
        variables = self._parent_tree(self._linen, entries)
        changing = [
            name
            for name in variables
            if name in mutable or (train and name != "params")
        ]
        variables = {name: variables[name] for name in variables if name not in created}

        def run_bound(bound: Any) -> Any:
            return run(self._handles(bound, merged, entries))

        changed: dict[int, dict[str, PyTree]] = {}
        if not self._linen:
            result = run_bound(None)
        else:
            apply = linen.apply(run_bound, self._linen_parent, mutable=changing)
            try:
                with _linen.tie_created(created):
                    result, updates = apply(variables, rngs=_rng.linen_streams(rngs))
            except (TypeError, ValueError) as error:
                if "perturbations" in variables:
                    error.add_note(
                        f"variables have perturbations, which have a value for each "
                        f"example and are not split; {_linen.NOT_SOWN_ADVICE}"
                    )
                raise
            old_updates = {
                name: updates[name] for name in updates if name not in created
            }
            updates = {**updates, **_in_old_shapes(variables, old_updates)}
            changed |= self._split_tree(self._linen, updates, entries)

        if merged is not None:
            updates = _in_old_shapes(
                self._parent_tree(self._nnx, entries), _nnx_values.values(merged)
            )
            changed |= self._split_tree(self._nnx, updates, entries)
        return result, [changed.get(i, {}) for i in range(len(self))]

    def init(
        self,
        key: chex.PRNGKey,
        fixed_entries: Entries,
        run: Callable[[Handles, Callable[[int], None]], Any],
    ) -> tuple[Any, list[dict[str, PyTree]]]:
        """Runs a function that calls the modules, whose variables are made.

        Args:
          key: the key.
          fixed_entries: the variables that stay as they are, one entry per layer.
          run: ``(handles, after_layer) -> result``; it calls ``after_layer`` with the
            index of a layer after its call.

        Returns:
          The result, and for each layer the variables of linen.
        """
        held_entries = self.held_entries(fixed_entries)
        nnx_entries = [
            {**held_entry, **fixed_entry}
            for held_entry, fixed_entry in zip(held_entries, fixed_entries, strict=True)
        ]
        merged = self._merged_nnx(nnx_entries)
        shared = {first for i, first in enumerate(self._first) if i != first}
        # (first layer of a module, path) -> the layer in whose entry the variable is
        entry_layer: dict[tuple[int, Names], int] = {}
        for i in self._linen:
            for path in flatten_mapping(fixed_entries[i]):
                entry_layer[self._first[i], path] = i

        def run_bound(bound: Any) -> Any:
            fixed_tree = self._parent_tree(self._linen, fixed_entries)
            for collection, tree in fixed_tree.items():
                for name, value in tree.items():
                    bound.scope.put_variable(collection, name, value)
            handles = self._handles(bound, merged, fixed_entries)

            def after_layer(layer: int) -> None:
                first = self._first[layer]
                if layer in self._linen and first in shared:
                    for path in flatten_mapping(handles[layer].variables):
                        entry_layer.setdefault((first, path), layer)

            return run(handles, after_layer)

        if not self._linen:
            return run_bound(None), [{} for _ in self._owners]
        init = linen.init_with_output(
            run_bound, self._linen_parent, mutable=DenyList("intermediates")
        )
        with _linen.without_sown():
            result, variables = init(_linen.init_keys(key))

        entries: list[dict[Names, PyTree]] = [{} for _ in self._owners]
        for first in dict.fromkeys(self._first[i] for i in self._linen):
            module_variables = _subtree(variables, self._prefix[first])
            for path, value in flatten_mapping(module_variables).items():
                entries[entry_layer.get((first, path), first)][path] = value
        return result, [unflatten_mapping(entry) for entry in entries]


def _subtree(tree: Mapping[str, PyTree], prefix: Names) -> dict[str, PyTree]:
    """The part of each collection that some names lead to; empty ones are left out."""
    parts: dict[str, PyTree] = {}
    for collection, part in tree.items():
        for name in prefix:
            part = part.get(name, {})
        if part:
            parts[collection] = part
    return parts


def _in_old_shapes(
    variables: Mapping[str, PyTree], updates: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """The variables after a call, in the shapes that they had before it.

    A call may write a statistic of shape ``(d,)`` as ``(1, 1, d)``, as with
    ``keepdims=True``: where it is broadcast, the two are the same.

    Args:
      variables: the variables before the call.
      updates: the variables that the call may have changed.

    Raises:
      ValueError: with each variable that is new, or has another shape.
    """
    old = flatten_mapping(variables)
    new: dict[Names, PyTree] = {}
    for path, value in flatten_mapping(updates).items():
        new[path] = _without_new_axes(old[path], value) if path in old else value

    old_shapes = {path: jax.tree.map(np.shape, value) for path, value in old.items()}
    faults: list[str] = []
    for path, value in new.items():
        shape = jax.tree.map(np.shape, value)
        if old_shapes.get(path) != shape:
            names = (path[0], *path_in_layer(path[1:]))
            faults.append(
                f"{'/'.join(map(str, names))} was {old_shapes.get(path, 'not there')} "
                f"and became {shape}"
            )
    if faults:
        raise ValueError(
            f"a call changes which variables there are, or their shapes: "
            f"{'; '.join(faults)}. A pipeline keeps arrays in the structure that they "
            f"were made in, in init or __init__; {_linen.NOT_SOWN_ADVICE}"
        )
    return unflatten_mapping(new)


def _without_new_axes(old: PyTree, new: PyTree) -> PyTree:
    """New values in the shapes of old ones, up to leading axes of length one."""

    def reshape(old: Any, new: Any) -> Any:
        old_shape = np.shape(old)
        new_shape = np.shape(new)
        if old_shape == new_shape:
            return new
        if _without_leading_ones(old_shape) != _without_leading_ones(new_shape):
            return new
        return jnp.reshape(new, old_shape)

    has_same_structure = jax.tree.structure(old) == jax.tree.structure(new)
    return jax.tree.map(reshape, old, new) if has_same_structure else new


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))

"""The axis of the examples in the leaves of state, such as caches.

    init of n examples:   key [n, 8, 2, 4]    index []
    init of 2n examples:  key [2n, 8, 2, 4]   index []       axis 0, and none

Modules of linen tell: the axis is the one that grows with the input. A module of nnx
holds its state before it has seen an input, so its user names the axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from .._arguments import _microbatch
from .._arguments._batch import Batch
from .._arguments._mutable import Mutable
from .._layers import _rng
from .._messages import raise_all
from ._model import Model

PyTree = Any
Path = tuple[Any, ...]
# It is not an axis, and not known.
UNKNOWN = object()


def axes_of_init(model: Model, batch: Batch) -> dict[Path, Any]:
    """The axis along which each variable that modules of linen make has examples.

    Args:
      model: the model.
      batch: a mini-batch whose first argument is an input.

    Returns:
      The path of each leaf -> its axis; ``None`` if it has none. Nothing, if the model
      takes no other number of examples.

    Raises:
      Exception: an error of the model, if such an input does not initialize it.
    """
    size = batch.num_examples
    once = _initial_shapes(model, batch, size)
    try:
        twice = _initial_shapes(model, batch, 2 * size)
    except Exception:  # a module of nnx holds a cache for so many examples
        return {}
    return {
        path: _growing_axis(shape, twice.get(path, ()), size)
        for path, shape in once.items()
    }


def _initial_shapes(
    model: Model, batch: Batch, size: int
) -> dict[Path, tuple[int, ...]]:
    """The shapes of the variables that are made for an input of so many examples."""
    x, *_ = batch.microbatch_specs(size)
    specs = jax.eval_shape(model.make_variables, _rng.key_spec(), x)
    return {path: leaf.shape for path, leaf in tree_leaves_with_path(specs)}


def _growing_axis(once: Sequence[int], twice: Sequence[int], size: int) -> Any:
    """The axis that is as long as there are examples, in both shapes."""
    if tuple(once) == tuple(twice):
        return None
    if len(once) == len(twice):
        pairs = enumerate(zip(once, twice, strict=True))
        axes = [axis for axis, (first, second) in pairs if first != second]
        if len(axes) == 1 and (once[axes[0]], twice[axes[0]]) == (size, 2 * size):
            return axes[0]
    return UNKNOWN


def find_axes(
    model: Model, variables: PyTree, batch: Batch, mutable: Mutable
) -> list[int | None]:
    """The axis of the examples in each variable of collections that a call changes.

    Args:
      model: the model.
      variables: specs of the variables.
      batch: the mini-batch, whose first argument is the input.
      mutable: the collections.

    Returns:
      The axis of each leaf of the variables; ``None``: it has no examples, or is in
      another collection.

    Raises:
      ValueError: if an axis is not known, or has another length.
    """
    axes = dict[Path, Any]()
    advice = ""
    if mutable.axes is not None:
        axes = _typed_axes(model, variables, mutable.axes)
    elif jax.tree.leaves(model.collections(variables, mutable.names)):
        try:
            axes = axes_of_init(model, batch)
        except Exception as error:  # such as a prompt and the mask of a whole text
            advice = f"\nThe initialization with this input says: {error}"

    axes_of_leaves = list[int | None]()
    unknown = list[str]()
    other_lengths = list[str]()
    for path, leaf in tree_leaves_with_path(variables):
        if model.collection(path) not in mutable.names:
            axes_of_leaves.append(None)
            continue
        axis: Any = axes.get(path, UNKNOWN)
        # A leaf without that axis, such as a counter, has no examples along it.
        is_axis = axis is not None and axis is not UNKNOWN
        if not leaf.ndim or (is_axis and not -leaf.ndim <= axis < leaf.ndim):
            axis = None
        text = f"variables{keystr(path)} of shape {leaf.shape}"
        if axis is UNKNOWN:
            unknown.append(text)
            axis = None
        elif axis is not None and leaf.shape[axis] != batch.num_examples:
            other_lengths.append(f"{text}, axis {axis}")
        axes_of_leaves.append(axis)
    raise_all(
        f"the axis of the examples in state that is split into micro-batches is not "
        f"known, as no initialization makes it; type it, as in "
        f"mutable={dict.fromkeys(mutable.names, 0)}, or num_microbatches=1",
        unknown,
        advice=advice,
    )
    raise_all(
        f"x has {batch.num_examples} examples, and state needs a row for each; make it "
        f"for as many, or type the axis of the examples, as in "
        f"mutable={dict.fromkeys(mutable.names, 0)}",
        other_lengths,
    )
    return axes_of_leaves


def _typed_axes(
    model: Model, variables: PyTree, axes: Mapping[str, Any]
) -> dict[Path, int | None]:
    """The axis of each leaf, from those that the user typed for collections."""
    axes_of_entries = list[PyTree]()
    for entry in model.entries(variables):
        axes_of_entry = dict[str, PyTree]()
        for name in entry:
            leaf_axes = _microbatch.leaf_axes(
                axes.get(name), entry[name], f"variables[{name!r}]", "mutable"
            )
            structure = jax.tree.structure(entry[name])
            axes_of_entry[name] = structure.unflatten(leaf_axes)
        axes_of_entries.append(axes_of_entry)
    tree = model.from_entries(axes_of_entries)
    leaves = tree_leaves_with_path(tree, is_leaf=lambda node: node is None)
    return dict(leaves)

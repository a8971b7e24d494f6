"""Checks the arguments of a call, and describes its mini-batch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._layers import _rng
from .._layers._inputs import Inputs
from . import _microbatch
from ._batch import Batch
from ._microbatch import BatchArgument
from ._static import StaticArgument

PyTree = Any


# ------------------------------------------------------- the call of a loss function


def argument_names(
    count: int, argnums: Sequence[int], names: Sequence[str]
) -> list[str]:
    """The names of the arguments besides the parameters, for errors.

    The last is the name of all arguments that a loss function takes by name.

    Args:
      count: the number of these arguments by position.
      argnums: the positions of the parameters.
      names: the names of the first arguments, parameters among them.
    """
    unnamed = [f"argument {i}" for i in range(len(names), count + len(argnums))]
    all_names = [*names, *unnamed][: count + len(argnums)]
    return [name for i, name in enumerate(all_names) if i not in argnums] + ["keywords"]


def axes_of_call(
    in_axes: Any, args: Sequence[PyTree], keywords: Mapping[str, PyTree]
) -> tuple[Any, ...]:
    """The axes of the examples, in the form of ``(*args, keywords)``.

    A single value is for all arguments. A tuple has one for each argument by position,
    and arguments by name are split along axis 0, as by `jax.vmap`; `inputs` gives axes
    by name too.

    Raises:
      ValueError: if there are axes of other arguments.
    """
    if not isinstance(in_axes, tuple | Inputs):
        return *[in_axes] * len(args), dict.fromkeys(keywords, in_axes)
    named_axes = dict[str, Any]()
    if isinstance(in_axes, Inputs):
        axes, named_axes = in_axes.call
        axes += [0] * (len(args) - len(axes))
    else:
        axes = list(in_axes)
    if len(axes) != len(args):
        raise ValueError(
            f"in_axes={in_axes!r} has {len(axes)} entries for {len(args)} arguments "
            f"after params; give one for each, or one for all"
        )
    if unknown := named_axes.keys() - keywords.keys():
        raise ValueError(
            f"in_axes names {', '.join(sorted(unknown))}, and the arguments by name "
            f"are: {', '.join(keywords) or 'none'}"
        )
    return *axes, {**dict.fromkeys(keywords, 0), **named_axes}


def as_arrays(
    in_axes: Any,
    args: Sequence[PyTree],
    keywords: Mapping[str, PyTree],
    names: Sequence[str],
) -> tuple[PyTree, ...]:
    """``(*args, keywords)`` with arrays for leaves.

    An argument without any array is static, as in `inputs`: its values are a part of
    the structure. A Python number whose axis is ``None`` is an array.

    Args:
      in_axes: the axes of the examples.
      args: the arguments by position.
      keywords: the arguments by name.
      names: the names of the arguments by position, for errors.
    """
    trees = (*args, dict(keywords))
    if all(map(_is_array, jax.tree.leaves(trees))):
        return trees
    *axes, named_axes = axes_of_call(in_axes, args, keywords)
    array_args = map(_as_arrays, args, axes, names)
    array_keywords = {
        name: _as_arrays(tree, named_axes[name], name)
        for name, tree in keywords.items()
    }
    return *array_args, array_keywords


def _as_arrays(tree: PyTree, axes: Any, name: str) -> PyTree:
    """One argument: see `as_arrays`."""
    is_static = not any(map(_is_array, jax.tree.leaves(tree)))
    note = f"{name} holds no array, so that it is fixed and has to be hashable"

    def convert(leaf: Any, axis: Any) -> Any:
        if _is_array(leaf):
            return leaf
        if axis is None and type(leaf) in (int, float, complex):
            return jnp.asarray(leaf)
        return StaticArgument.of(leaf, note) if is_static else leaf

    leaf_axes = _microbatch.broadcast_axes(axes, tree, name, "in_axes")
    return jax.tree.map(convert, tree, leaf_axes)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


# ------------------------------------------------------------------ any mini-batch


def describe_arguments(
    args: Sequence[PyTree],
    in_axes: Sequence[Any],
    names: Sequence[str],
    *,
    of_function: bool = False,
) -> list[BatchArgument]:
    """The specs of arguments, with the axis of the examples in each leaf; not in keys.

    Args:
      args: the arguments, in arrays or specs.
      in_axes: the axes of the examples in each argument.
      names: the names of the arguments, for errors.
      of_function: True if a loss function takes them, and not a model.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if axes do not fit an argument.
    """
    specs_by_arg = [
        _microbatch.array_specs(arg, name, of_function=of_function)
        for arg, name in zip(args, names, strict=True)
    ]
    arguments = []
    for name, axes, specs in zip(names, in_axes, specs_by_arg, strict=True):
        leaves = jax.tree.leaves(specs)
        option = "target_axes" if name == "targets" else "in_axes"
        # An argument without leaves takes whatever axes there are.
        leaf_axes = _microbatch.leaf_axes(axes if leaves else 0, specs, name, option)
        split_axes = [
            None if _rng.is_single_key(leaf) else axis
            for leaf, axis in zip(leaves, leaf_axes, strict=True)
        ]
        arguments.append(BatchArgument(name, specs, split_axes))
    return arguments


def batch(
    args: Sequence[PyTree],
    in_axes: Sequence[Any],
    names: Sequence[str],
    *,
    num_microbatches: int,
    num_shards: int,
    allows_unsplit: bool = False,
    axes_advice: str = _microbatch.MODEL_AXES_ADVICE,
) -> Batch:
    """Checks a mini-batch.

    Args:
      args: its arguments, in arrays or specs.
      in_axes: the axes of the examples in each argument.
      names: the names of the arguments, for errors.
      num_microbatches: the number of micro-batches.
      num_shards: the number of shards over which examples are spread.
      allows_unsplit: True to take a mini-batch that cannot be split, such as a single
        example, as one micro-batch.
      axes_advice: advice on how to type the axes, for errors.
    """
    of_function = axes_advice is _microbatch.FUNCTION_AXES_ADVICE
    arguments = describe_arguments(args, in_axes, names, of_function=of_function)
    specs = tuple(argument.specs for argument in arguments)
    axes = (argument.axes for argument in arguments)
    flat_axes = list(itertools.chain.from_iterable(axes))
    unsplit = Batch(specs, names, axes=[None] * len(flat_axes), sizes=(1,))
    if allows_unsplit and all(axis is None for axis in flat_axes):
        return unsplit
    min_examples = 1 if allows_unsplit else num_microbatches
    try:
        size = _microbatch.count_examples(arguments, min_examples, axes_advice)
    except ValueError:
        if num_microbatches * num_shards == 1:  # which splits nothing
            return unsplit
        raise
    if allows_unsplit and (size < num_microbatches * num_shards or size % num_shards):
        return Batch(specs, names, axes=flat_axes, sizes=(size,))
    shard = _microbatch.examples_per_shard(size, num_microbatches, num_shards)
    sizes = _microbatch.microbatch_sizes(shard, num_microbatches)
    return Batch(specs, names, axes=flat_axes, sizes=sizes, num_shards=num_shards)

"""What a function that is divided is given, checked."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._functions import _microbatch
from .._functions._batch import Batch
from .._layers._inputs import Inputs
from .._layers._stage import shapes
from .._placed._static import Static
from . import _program

PyTree = Any
# The name of the arguments that a loss function is given by name, for errors.
KEYWORDS = "keywords"
_AXES = (
    "in_axes= is a value for all arguments after params, or a tuple with one for each: "
    "None for what each micro-batch is given whole, such as a number, a table or "
    "running statistics"
)


# ------------------------------------------------------- the call of a loss function


def argument_names(count: int, argnums: Sequence[int] = (0,)) -> list[str]:
    """The names of the arguments besides the parameters, for errors.

    Args:
      count: how many there are by position.
      argnums: the positions of the parameters.
    """
    positions = (i for i in range(count + len(argnums)) if i not in argnums)
    return [*(f"argument {i}" for i in positions), KEYWORDS]


def axes_of_call(
    in_axes: Any, args: Sequence[PyTree], keywords: Mapping[str, PyTree]
) -> tuple[Any, ...]:
    """The axes of the examples, in the form of ``(*args, keywords)``.

    A value is for all. A tuple has one for each argument by position, and those by
    name are split along axis 0, as by `jax.vmap`; `inputs` gives axes by name too.

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
    argnums: Sequence[int],
) -> tuple[PyTree, ...]:
    """``(*args, keywords)`` with arrays for leaves.

    An argument without any array is fixed, as in `inputs`: its values are a part of
    the structure. A Python number whose axis is ``None`` is an array.

    Args:
      in_axes: where the examples are.
      args: the arguments by position.
      keywords: those by name.
      argnums: the positions of the parameters.
    """
    trees = *args, dict(keywords)
    if all(map(_is_array, jax.tree.leaves(trees))):
        return trees
    *axes, named_axes = axes_of_call(in_axes, args, keywords)
    names = argument_names(len(args), argnums)
    return (
        *map(_as_arrays, args, axes, names),
        {
            name: _as_arrays(tree, named_axes[name], name)
            for name, tree in keywords.items()
        },
    )


def _as_arrays(tree: PyTree, axes: Any, name: str) -> PyTree:
    """One argument: see `as_arrays`."""
    is_fixed = not any(map(_is_array, jax.tree.leaves(tree)))
    note = f"{name} holds no array, so that it is fixed and has to be hashable"

    def convert(leaf: Any, axis: Any) -> Any:
        if _is_array(leaf):
            return leaf
        if axis is None and type(leaf) in (int, float, complex):
            return jnp.asarray(leaf)
        return Static.of(leaf, note) if is_fixed else leaf

    full = _microbatch.full_axes(axes, tree, name, "in_axes")
    return jax.tree.map(convert, tree, full)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def note_order(error: Exception, params: PyTree, args: Sequence[PyTree]) -> None:
    """Notes that parameters come first, where one array stands for them."""
    is_one = jax.tree.structure(params) == jax.tree.structure(0)
    if is_one and any(len(jax.tree.leaves(tree)) > 1 for tree in args[:-1]):
        error.add_note(
            f"params come first, as in grad_fn(params, x); they are {shapes(params)}"
        )


# ------------------------------------------------------------------ any mini-batch


def axes_of(
    in_axes: Sequence[Any], given: Sequence[PyTree], names: Sequence[str]
) -> list[list[int | None]]:
    """Where the examples are in each leaf of each argument; keys have none."""
    found = []
    for name, axes, tree in zip(names, in_axes, given, strict=True):
        leaves = jax.tree.leaves(tree)
        option = "target_axes" if name == "targets" else "in_axes"
        own = axes if leaves else 0  # of nothing, whatever they would be
        leaf_axes = _microbatch.flat_axes(own, tree, name, option)
        found.append(
            [
                None if _program.is_single_key(leaf) else axis
                for leaf, axis in zip(leaves, leaf_axes, strict=True)
            ]
        )
    return found


def batch_size(
    given: Sequence[PyTree],
    axes: Sequence[Sequence[int | None]],
    count: int,
    names: Sequence[str],
) -> int:
    """How many examples there are, at least as many as micro-batches."""
    parts = [*zip(names, given, axes, strict=True)]
    advice = {"advice": _AXES} if KEYWORDS in names else {}
    return _microbatch.batch_size(parts, count, **advice)


def batch(
    args: Sequence[PyTree],
    in_axes: Sequence[Any],
    names: Sequence[str],
    num_microbatches: int,
    num_shards: int,
    few: bool = False,
) -> Batch:
    """A mini-batch, checked.

    Args:
      args: all that is given of it, in arrays or specs.
      in_axes: where the examples are in each.
      names: what errors call them.
      num_microbatches: M.
      num_shards: over how many shards examples are spread.
      few: whether it is one micro-batch where it cannot be split, as a single example.
    """
    given = tuple(map(_microbatch.specs, args, names))
    axes = axes_of(in_axes, given, names)
    flat = [axis for own in axes for axis in own]
    whole = Batch(given, [None] * len(flat), (1,))
    if few and all(axis is None for axis in flat):
        return whole
    try:
        size = batch_size(given, axes, 1 if few else num_microbatches, names)
    except ValueError:
        if num_microbatches * num_shards == 1:  # which splits nothing
            return whole
        raise
    if few and (size < num_microbatches * num_shards or size % num_shards):
        return Batch(given, flat, (size,))
    shard = _microbatch.shard(size, num_microbatches, num_shards)
    return Batch(given, flat, _microbatch.sizes(shard, num_microbatches), num_shards)

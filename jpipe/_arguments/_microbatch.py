"""The axes and sizes of mini-batches, and how they are split in micro-batches."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .._layers._inputs import Inputs, leaf_name
from .._messages import raise_all
from ..schedules._formats import format_type
from ._stacked import Stacked

PyTree = Any
RAW_KEY = "give jax.random.key(0) for jax.random.PRNGKey(0), or type None in in_axes="
# The advice on how to type the axes of the examples.
MODEL_AXES_ADVICE = (
    "in_axes= gives where the examples are in the inputs, target_axes= of a pipeline "
    "where they are in the targets: "
    "one number or a tree of them, with None for what each micro-batch is given as it "
    "is, as in target_axes={'labels': 0, 'scale': None}"
)
FUNCTION_AXES_ADVICE = (
    "in_axes= is a value for all arguments after params, or a tuple with one for each: "
    "None for what each micro-batch is given whole, such as a number, a table or "
    "running statistics"
)


def microbatch_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes that differ by at most one and sum to the batch: 10 in 4 is 3, 3, 2, 2."""
    quotient, remainder = divmod(batch_size, num_microbatches)
    return tuple(quotient + int(i < remainder) for i in range(num_microbatches))


def array_specs(tree: PyTree, name: str, *, of_function: bool = False) -> PyTree:
    """The shapes, dtypes and weak types of a pytree of arrays.

    Args:
      tree: JAX or NumPy arrays, or `jax.ShapeDtypeStruct` leaves.
      name: the tree in messages.
      of_function: True if it is an argument of a loss function.

    Returns:
      The tree with `jax.ShapeDtypeStruct` leaves, of the dtypes that JAX will use.

    Raises:
      TypeError: with the path of every leaf that is not an array.
    """
    faults: list[str] = []
    not_arrays: list[Any] = []

    def spec(path: Any, leaf: Any) -> Any:
        try:
            if not hasattr(leaf, "shape"):
                raise TypeError
            # Wherever the user has it, a stage reads it from the memory of its device.
            aval = leaf if isinstance(leaf, Stacked) else jax.typeof(leaf)
            weak = aval.weak_type
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
        except TypeError:
            faults.append(f"{leaf_name(name, path)} is {_describe(leaf)}")
            not_arrays.append(leaf)
            return None

    tree_specs = jax.tree_util.tree_map_with_path(spec, tree)
    advice = "convert with jnp.asarray, text to numbers first, such as tokens"
    classes = type(tree).__mro__
    is_of_equinox = any(cls.__module__.startswith("equinox.") for cls in classes)
    if is_of_equinox or any(map(callable, not_arrays)):
        advice = (
            "of a model of Equinox give its arrays: params, static = eqx.partition("
            "model, eqx.is_inexact_array), and eqx.combine(params, static) in the "
            "function that takes params"
        )
    elif of_function and any(isinstance(leaf, int | float) for leaf in not_arrays):
        advice = (
            "a number that each micro-batch is given, as among running statistics, has "
            "None in in_axes=, and so may its whole argument"
        )
    is_list = isinstance(tree, list | tuple) and len(faults) > 1
    if is_list and all(isinstance(leaf, int | float) for leaf in jax.tree.leaves(tree)):
        faults = [f"{name} is {format_type(tree)} of {len(faults)} numbers"]
    raise_all(f"every leaf must be an array; {advice}", faults, error=TypeError)
    return tree_specs


def _describe(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    end = f": {leaf!r}" if dtype is None else f" of dtype {dtype}"
    return f"{format_type(leaf)}{end}"


def broadcast_axes(axes: Any, tree: PyTree, tree_name: str, axes_name: str) -> PyTree:
    """The tree with axes for leaves; the arguments are those of `leaf_axes`.

    Raises:
      ValueError: if ``axes`` is not a prefix of the tree.
    """
    try:
        return jax.tree.broadcast(axes, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(
            f"{axes_name}={axes!r} is not a prefix of {tree_name}, whose structure is "
            f"{jax.tree.structure(tree)}: {error}"
        ) from None


def leaf_axes(
    axes: Any,
    tree: PyTree,
    tree_name: str,
    axes_name: str,
    reductions: Sequence[Any] = (),
) -> list[Any]:
    """One axis per leaf, from a prefix of the tree as `jax.vmap` takes it.

    Args:
      axes: an int, ``None``, or a pytree of these that is a prefix of ``tree``.
      tree: the tree.
      tree_name: the tree in messages.
      axes_name: the argument ``axes`` in messages.
      reductions: values that may stand in place of an axis.

    Returns:
      The axes of the leaves in order.

    Raises:
      ValueError: if ``axes`` does not fit the tree.
    """
    if isinstance(axes, Inputs) and isinstance(tree, Inputs):
        axes, tree = axes.prefix_of(tree)
    axes_tree = broadcast_axes(axes, tree, tree_name, axes_name)
    # `None` in the tree is not a leaf and has no axis; in the axes it is one.
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
    node_axes = jax.tree.leaves(axes_tree, is_leaf=lambda node: node is None)
    pairs = zip(node_axes, nodes, strict=True)
    leaf_axes = [axis for axis, node in pairs if hasattr(node, "shape")]

    _check_are_axes(leaf_axes, axes_name, reductions)
    return leaf_axes


def check_axes(axes_name: str, axes: Any, reductions: Sequence[Any] = ()) -> None:
    """Checks the axes that an option names, of whatever tree: see `leaf_axes`.

    Raises:
      ValueError: if one is no axis.
    """
    tree = axes.call if isinstance(axes, Inputs) else axes
    _check_are_axes(jax.tree.leaves(tree), axes_name, reductions)


def _check_are_axes(
    axes: Sequence[Any], axes_name: str, reductions: Sequence[Any]
) -> None:
    for axis in axes:
        if axis is None or any(axis is reduction for reduction in reductions):
            continue
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            nor = "".join(f" nor {reduction!r}" for reduction in reductions)
            raise ValueError(f"{axes_name}: {axis!r} is neither an axis nor None{nor}")


class BatchArgument(NamedTuple):
    """An argument of a call that holds a part of the mini-batch.

    Attributes:
      name: its name in messages.
      specs: its tree, with specs for leaves.
      axes: the axis of the examples in each leaf; ``None``: it is not split.
    """

    name: str
    specs: PyTree
    axes: Sequence[int | None]


def count_examples(
    arguments: Sequence[BatchArgument],
    num_microbatches: int,
    advice: str = MODEL_AXES_ADVICE,
) -> int:
    """The number of examples of a mini-batch, on which all split leaves must agree.

    Args:
      arguments: the arguments that hold the mini-batch.
      num_microbatches: the number of micro-batches, of an example at least.
      advice: advice on how to type the axes.

    Raises:
      ValueError: if leaves disagree or lack the axis, or there are fewer examples than
        micro-batches.
    """
    # name of a leaf -> its number of examples
    leaf_sizes: dict[str, int] = {}
    # name of a leaf -> that number in words
    descriptions: dict[str, str] = {}
    faults: list[str] = []
    hints: list[str] = []
    for name, leaf, axis in _batched_leaves(arguments):
        if not -leaf.ndim <= axis < leaf.ndim:
            faults.append(f"{name} of shape {leaf.shape} has no axis {axis}")
            continue
        leaf_sizes[name] = leaf.shape[axis]
        descriptions[name] = f"{name}: {leaf.shape[axis]}, along axis {axis}"
        if is_like_raw_key(leaf):
            hints.append(f"\nis {name} a raw key? {RAW_KEY}")
    raise_all("cannot split the batch", faults, advice=f"\n{advice}")

    if not leaf_sizes:
        raise ValueError(
            f"cannot split the batch: no leaf has a batch axis (in_axes is None, or "
            f"the trees have no leaves); num_microbatches=1 splits nothing\n{advice}"
        )
    if len(set(leaf_sizes.values())) > 1:
        hints = hints or _hint_on_lists(arguments, leaf_sizes.values())
        advice = "".join([*hints, f"\n{advice}"])
        raise_all("leaves differ in batch size", descriptions.values(), advice=advice)
    name, size = next(iter(leaf_sizes.items()))
    if size < num_microbatches:
        raise ValueError(
            f"{name} has {size} examples, fewer than "
            f"num_microbatches={num_microbatches}; give at least one example per "
            f"micro-batch and device along 'data', or take fewer micro-batches: a "
            f"pipeline with another num_microbatches= takes the same parameters"
            f"{''.join(hints)}"
        )
    return size


def _batched_leaves(
    arguments: Sequence[BatchArgument],
) -> Iterator[tuple[str, Any, int]]:
    """Yields the name, the spec and the axis of each leaf that has a batch axis."""
    for argument in arguments:
        leaves = jax.tree_util.tree_leaves_with_path(argument.specs)
        for (path, leaf), axis in zip(leaves, argument.axes, strict=True):
            if axis is not None:
                yield leaf_name(argument.name, path), leaf, axis


def is_like_raw_key(leaf: Any) -> bool:
    """True if a leaf may be a key of `jax.random.PRNGKey`."""
    return leaf.shape == (2,) and leaf.dtype == jax.numpy.uint32


def _hint_on_lists(
    arguments: Sequence[BatchArgument], sizes: Collection[int]
) -> list[str]:
    """Advice on the first argument that is a list of as many arrays as examples."""
    for name, specs, _ in arguments:
        is_list = isinstance(specs, list | tuple) and len(specs) in sizes
        if not is_list or not all(hasattr(leaf, "shape") for leaf in specs):
            continue
        if len({leaf.shape for leaf in specs}) == 1:
            return [
                f"\n{name} is {format_type(specs)} of {len(specs)} arrays of one "
                f"shape; are these the examples? np.stack({name}) is one array of them"
            ]
    return []


def examples_per_shard(size: int, num_microbatches: int, num_shards: int) -> int:
    """The number of examples of a mini-batch on each shard.

    Raises:
      ValueError: if shards would differ, or have fewer examples than micro-batches.
    """
    remainder = size % num_shards
    min_size = num_microbatches * num_shards
    if not remainder and size >= min_size:
        return size // num_shards
    nearest_size = size - remainder if size > min_size else min_size
    raise ValueError(
        f"a batch of {size} examples over {num_shards} devices along the axis 'data', "
        f"in num_microbatches={num_microbatches}; needs a multiple of {num_shards}, "
        f"{min_size} at least, such as {nearest_size}"
    )


def microbatch_specs(
    leaves: Sequence[jax.ShapeDtypeStruct], axes: Sequence[int | None], size: int
) -> list[jax.ShapeDtypeStruct]:
    """Specs of the leaves of a micro-batch of so many examples."""

    def resize(leaf: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        if axis is None:
            return leaf
        shape = list(leaf.shape)
        shape[axis] = size
        weak = leaf.weak_type
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=weak)

    return [resize(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]


class SizeGroup(NamedTuple):
    """Micro-batches of one size.

    Attributes:
      start: the index of their first example.
      number: the number of micro-batches.
      size: the number of examples of each.
    """

    start: int
    number: int
    size: int


def group_by_size(microbatch_sizes: Sequence[int]) -> list[SizeGroup]:
    """Micro-batches by their sizes, the larger ones first."""
    size_groups: list[SizeGroup] = []
    start = 0
    for size, number in Counter(microbatch_sizes).items():
        size_groups.append(SizeGroup(start=start, number=number, size=size))
        start += number * size
    return size_groups


def splitter(
    axes: Sequence[int], *, size: int, number: int, stacked: bool = False
) -> Callable[..., list[jax.Array]]:
    """The function ``(start, *leaves) -> leaves of micro-batches``.

    The leaves of a micro-batch are followed by those of the next one.

    Args:
      axes: the batch axes of the leaves.
      size: the number of examples of a micro-batch.
      number: the number of micro-batches.
      stacked: True if leaves have micro-batches along a new first axis; then ``start``
        is the index of the first micro-batch, else that of its first example.
    """

    def slice_leaf(leaf: jax.Array, axis: int, start: Any) -> jax.Array:
        if stacked:
            return jax.lax.dynamic_index_in_dim(leaf, start, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)

    def split(start: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        step = 1 if stacked else size
        starts = [start + m * step for m in range(number)]
        microbatch_leaves: list[jax.Array] = []
        for microbatch_start in starts:
            for leaf, axis in zip(leaves, axes, strict=True):
                microbatch_leaves.append(slice_leaf(leaf, axis, microbatch_start))
        return microbatch_leaves

    return split

"""Mini-batches cut in micro-batches, and put together again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._jaxprs import _jaxpr
from .._layers._inputs import Inputs, called
from .._messages import raise_all

PyTree = Any
Axes = Any
RAW_KEY = "give jax.random.key(0) for jax.random.PRNGKey(0), or type None in in_axes="
_AXES = (
    "in_axes= gives where the examples are in the inputs, target_axes= of a pipeline "
    "where they are in the targets: "
    "one number or a tree of them, with None for what each micro-batch is given as it "
    "is, as in target_axes={'labels': 0, 'scale': None}"
)


def sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes that differ by at most one and sum to the batch: 10 in 4 is 3, 3, 2, 2."""
    quotient, rest = divmod(batch_size, num_microbatches)
    return tuple(quotient + (i < rest) for i in range(num_microbatches))


def specs(tree: PyTree, what: str) -> PyTree:
    """The shapes and dtypes of a pytree of arrays, and which are weakly typed.

    Args:
      tree: JAX or NumPy arrays, or `jax.ShapeDtypeStruct` leaves.
      what: how errors call the tree.

    Returns:
      The tree with `jax.ShapeDtypeStruct` leaves, of the dtypes that JAX will use.

    Raises:
      TypeError: with the path of every leaf that is not an array.
    """
    faults, others = [], []

    def spec(path: Any, leaf: Any) -> Any:
        try:
            if not hasattr(leaf, "shape"):
                raise TypeError
            if isinstance(leaf, jax.ShapeDtypeStruct):
                dtype = jax.dtypes.canonicalize_dtype(
                    leaf.dtype, allow_extended_dtype=True
                )
                weak = leaf.weak_type
                return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)
            return _jaxpr.spec(jax.typeof(leaf))
        except TypeError:
            faults.append(f"{called(what, path)} is {_describe(leaf)}")
            others.append(leaf)
            return None

    result = jax.tree_util.tree_map_with_path(spec, tree)
    advice = "convert with jnp.asarray, text to numbers first, such as tokens"
    classes = type(tree).__mro__
    is_of_equinox = any(cls.__module__.startswith("equinox.") for cls in classes)
    if is_of_equinox or any(map(callable, others)):
        advice = (
            "of a model of Equinox give its arrays: params, static = eqx.partition("
            "model, eqx.is_inexact_array), and eqx.combine(params, static) in the "
            "function that takes params"
        )
    raise_all(f"every leaf must be an array; {advice}", faults, error=TypeError)
    return result


def _describe(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    kind = type(leaf).__name__
    return f"a {kind} of dtype {dtype}" if dtype is not None else f"a {kind}: {leaf!r}"


def full_axes(axes: Axes, tree: PyTree, what: str, name: str) -> PyTree:
    """The tree with axes for leaves; the arguments are those of `flat_axes`.

    Raises:
      ValueError: if ``axes`` is not a prefix of the tree.
    """
    try:
        return jax.tree.broadcast(axes, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(
            f"{name}={axes!r} is not a prefix of {what}, whose structure is "
            f"{jax.tree.structure(tree)}: {error}"
        ) from None


def flat_axes(
    axes: Axes, tree: PyTree, what: str, name: str, reductions: Sequence[Any] = ()
) -> list[Any]:
    """One axis per leaf, from a prefix of the tree as `jax.vmap` takes it.

    Args:
      axes: an int, ``None``, or a pytree of these that is a prefix of ``tree``.
      tree: the tree.
      what: how errors call the tree.
      name: how errors call the argument that ``axes`` is.
      reductions: what may stand in place of an axis.

    Returns:
      The axes of the leaves in order.

    Raises:
      ValueError: if ``axes`` does not fit the tree.
    """
    if isinstance(axes, Inputs) and isinstance(tree, Inputs):
        axes, tree = axes.prefix_of(tree)
    full = full_axes(axes, tree, what, name)
    # `None` in the tree is not a leaf and has no axis; in the axes it is one.
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
    found = jax.tree.leaves(full, is_leaf=lambda node: node is None)
    pairs = zip(found, nodes, strict=True)
    flat = [axis for axis, node in pairs if hasattr(node, "shape")]
    for axis in flat:
        if axis is None or any(axis is one for one in reductions):
            continue
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            others = "".join(f" nor {one!r}" for one in reductions)
            raise ValueError(f"{name}: {axis!r} is neither an axis nor None{others}")
    return flat


def batch_size(
    parts: Sequence[tuple[str, PyTree, Sequence[int | None]]],
    num_microbatches: int,
    advice: str = _AXES,
) -> int:
    """The size of the mini-batch, on which all split leaves must agree.

    Args:
      parts: for each tree how errors call it, its specs and the axes of its leaves.
      num_microbatches: M.
      advice: how the axes are given.

    Returns:
      The number of examples.

    Raises:
      ValueError: if leaves disagree, lack the axis, or there are fewer than M.
    """
    found: dict[str, int] = {}
    lines: dict[str, str] = {}
    faults, hints = [], []
    for what, tree, axes in parts:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        for (path, leaf), axis in zip(flat, axes, strict=True):
            if axis is None:
                continue
            label = called(what, path)
            if not -leaf.ndim <= axis < leaf.ndim:
                faults.append(f"{label} of shape {leaf.shape} has no axis {axis}")
            else:
                found[label] = leaf.shape[axis]
                lines[label] = f"{label}: {leaf.shape[axis]}, along axis {axis}"
                if is_like_raw_key(leaf):
                    hints.append(f"\nis {label} a raw key? {RAW_KEY}")
    raise_all("cannot split the batch", faults, advice=f"\n{advice}")
    if not found:
        raise ValueError(
            f"cannot split the batch: no leaf has a batch axis (in_axes is None, or "
            f"the trees have no leaves); num_microbatches=1 splits nothing\n{advice}"
        )
    if len(set(found.values())) > 1:
        hints = hints or _several_rows(parts, min(found.values()))
        advice = "".join([*hints, f"\n{advice}"])
        raise_all("leaves differ in batch size", lines.values(), advice=advice)
    size = next(iter(found.values()))
    if size < num_microbatches:
        raise ValueError(
            f"{next(iter(found))} has {size} examples, fewer than "
            f"num_microbatches={num_microbatches}; give at least one example per "
            f"micro-batch and device along 'data', or take fewer micro-batches: a "
            f"pipeline with another num_microbatches= takes the same parameters"
            f"{''.join(hints)}"
        )
    return size


def is_like_raw_key(leaf: Any) -> bool:
    """Whether a leaf may be a key of `jax.random.PRNGKey`."""
    return leaf.shape == (2,) and leaf.dtype == jax.numpy.uint32


def _several_rows(
    parts: Sequence[tuple[str, PyTree, Sequence[int | None]]], size: int
) -> list[str]:
    """Advice on a leaf that has several rows for each example."""
    for what, tree, axes in parts:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        for (path, leaf), axis in zip(flat, axes, strict=True):
            rows = leaf.shape[0] if axis == 0 else 0
            if size and rows > size and rows % size == 0:
                shape = size, rows // size, *leaf.shape[1:]
                label = called(what, path)
                return [
                    f"\n{label} has {rows // size} rows for each of {size} examples? "
                    f"Its .reshape{shape} is split like these"
                ]
    return []


def shard(size: int, num_microbatches: int, num_shards: int) -> int:
    """The examples of a mini-batch that each shard has.

    Raises:
      ValueError: if shards would differ, or have fewer than micro-batches.
    """
    rest = size % num_shards
    if not rest and size >= num_microbatches * num_shards:
        return size // num_shards
    need = num_microbatches * num_shards
    fits = size - rest if size > need else need
    raise ValueError(
        f"a batch of {size} examples over {num_shards} devices along the axis 'data', "
        f"in num_microbatches={num_microbatches}; needs a multiple of {num_shards}, "
        f"{need} at least, such as {fits}"
    )


def part_specs(
    leaves: Sequence[jax.ShapeDtypeStruct], axes: Sequence[int | None], size: int
) -> list[jax.ShapeDtypeStruct]:
    """The leaves of one micro-batch of the given size."""

    def part(leaf: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        if axis is None:
            return leaf
        shape = list(leaf.shape)
        shape[axis] = size
        weak = leaf.weak_type
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=weak)

    return [part(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]


class Group(NamedTuple):
    """Micro-batches of one size.

    Attributes:
      start: the first of their examples.
      number: how many there are.
      size: the examples of each.
    """

    start: int
    number: int
    size: int


def groups(parts: Sequence[int]) -> list[Group]:
    """Micro-batches by their sizes, the larger ones first."""
    found, start = [], 0
    for size in dict.fromkeys(parts):
        count = list(parts).count(size)
        found.append(Group(start, count, size))
        start += count * size
    return found


def splitter(
    axes: Sequence[int], size: int, number: int, stacked: bool = False
) -> Callable[..., list[jax.Array]]:
    """``(start, *leaves) -> parts``: those of some micro-batches, one after the other.

    Args:
      axes: the batch axes of the leaves.
      size: the examples of a micro-batch.
      number: how many micro-batches.
      stacked: whether the leaves have an entry for each micro-batch, on a new first
        axis; then ``start`` is the number of the first, not that of its example.
    """

    def part(leaf: jax.Array, axis: int, start: Any) -> jax.Array:
        if stacked:
            return jax.lax.dynamic_index_in_dim(leaf, start, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)

    def split(start: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        step = 1 if stacked else size
        starts = [start + m * step for m in range(number)]
        pairs = list(zip(leaves, axes, strict=True))
        return [part(leaf, axis, at) for at in starts for leaf, axis in pairs]

    return split

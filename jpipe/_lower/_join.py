"""Joins the results of micro-batches to those of the mini-batch, leaf by leaf.

    (leaf of micro-batch 0, leaf of micro-batch 1, ...) -> leaf of the mini-batch

Each leaf is joined by itself, and its join depends on what it follows from:

* A leaf that follows from an example differs between micro-batches. Its values are
  concatenated on the axis of the examples, stacked (aux), or reduced: see `REDUCTIONS`.
  There is no single value for it, so that ``out_axes=None`` is refused, as by
  `jax.vmap`.
* A leaf that follows from no example is what one device returns. Its shape there is
  that of a trace of the whole mini-batch: a codebook of shape ``(2, 3)`` keeps it, and
  ``jnp.zeros((len(x), 3))`` has a row for each example.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend import core

from .._arguments import _microbatch
from .._jaxprs._jaxpr import is_inexact
from .._layers._text import shape_text
from .._messages import raise_all
from .._trace._accumulation import accumulate, extend_mean, sum_spec
from ._microbatch_outputs import MicrobatchOutputs

PyTree = Any
# values of all micro-batches -> the value of the mini-batch
Run = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Reduction:
    """A reduction of the values of micro-batches, typed in place of an axis.

    Attributes:
      name: its name in `jpipe`.
      choose_run: ``(leaf, examples of each micro-batch) -> its function``.
      takes: ``leaf -> True`` if outputs of its dtype can be reduced.
      advice: the end of the error for other outputs.
      takes_other_aux: True if it gives aux of other dtypes a value, too.
      reduces_constants: True if it reduces what follows from no example, which is
        what one device returns otherwise.
      checked_as: the reductions of micro-batches, ``"mean"``, ``"sum"`` or ``"each"``,
        with which a check compares all examples at once.
    """

    name: str
    choose_run: Callable[[Any, Sequence[int]], Run]
    takes: Callable[[Any], bool]
    advice: str
    takes_other_aux: bool
    reduces_constants: bool
    checked_as: tuple[str, ...]

    def __repr__(self) -> str:
        return f"jpipe.{self.name}"


def _is_number(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.number))


def _choose_mean(leaf: Any, sizes: Sequence[int]) -> Run:
    if not is_inexact(leaf):
        return _last
    shares = [size / sum(sizes) for size in sizes]
    return functools.partial(mean, shares=shares)


def _choose_sum(leaf: Any, sizes: Sequence[int]) -> Run:
    del leaf, sizes
    return _sum


MEAN: Any = Reduction(
    name="MEAN",
    choose_run=_choose_mean,
    takes=is_inexact,
    advice="is for floating dtypes; of a count type jpipe.SUM, else x.astype(float)",
    takes_other_aux=True,
    reduces_constants=True,
    checked_as=("mean",),
)
SUM: Any = Reduction(
    name="SUM",
    choose_run=_choose_sum,
    takes=_is_number,
    advice="is for numbers; type x.astype(int)",
    takes_other_aux=False,
    reduces_constants=False,
    checked_as=("sum", "each"),
)
REDUCTIONS = (MEAN, SUM)


@dataclass(frozen=True)
class Join:
    """The join of one leaf.

    Attributes:
      leaf_index: the index of the leaf among the results besides the loss.
      run: ``values of all micro-batches -> value of the mini-batch``.
      param_index: the index of the parameter whose new value it is; ``None``: it is an
        output, or aux.
    """

    leaf_index: int
    run: Run
    param_index: int | None = None


def join_aux(axes: Any, results: MicrobatchOutputs) -> list[Join]:
    """The join of each leaf of aux.

    Args:
      axes: a prefix of aux: an axis, a reduction, or ``None`` for a new axis.
      results: the results of micro-batches.

    Raises:
      ValueError: if aux of micro-batches cannot be joined.
    """
    leaf_axes = _leaf_axes(axes, results, label="aux", name="aux_axes")
    _check_dtypes(leaf_axes, results, label="aux", name="aux_axes")
    _check_aux(leaf_axes, results)
    runs = list[Run | None]()
    for i, axis in enumerate(leaf_axes):
        run = jnp.stack if axis is None else _choose_run(i, axis, results)
        # Several rows to an example, such as one for each token.
        if run is None and _is_axis(axis) and results.joins_to_whole(i, axis):
            run = _concatenate_along(axis)
        runs.append(run)
    return _make_joins(
        runs,
        results,
        title=f"aux of a micro-batch of {results.sizes[0]} cannot be joined on "
        f"aux_axes={axes!r}; return the examples on that axis, or type aux_axes= with "
        f"None for what each micro-batch returns, jpipe.MEAN for a mean over the "
        f"examples, jpipe.SUM for a sum or a count, as in aux_axes=(0, jpipe.MEAN)",
        label="aux",
    )


def join_outputs(axes: Any, results: MicrobatchOutputs) -> list[Join]:
    """The join of each leaf of outputs.

    Args:
      axes: a prefix of outputs: an axis, a reduction, or ``None`` for what follows
        from no example.
      results: the results of micro-batches.

    Raises:
      ValueError: if outputs of micro-batches cannot be joined.
    """
    leaf_axes = _leaf_axes(axes, results, label="outputs", name="out_axes")
    _check_dtypes(leaf_axes, results, label="outputs", name="out_axes")
    varying = list[str]()  # leaves that have no single value
    for (path, leaf), axis, follows in zip(
        results.leaves, leaf_axes, results.depends_on_examples, strict=True
    ):
        if axis is None and follows and len(results.sizes) > 1:
            varying.append(_describe_shape("outputs", path, leaf))
    raise_all(
        "out_axes=None is for what follows from no example, as in jax.vmap; of these "
        "outputs each micro-batch makes another. Type jpipe.MEAN for a mean over the "
        "examples, jpipe.SUM for a sum or a count, or the axis of the examples, as in "
        "out_axes=(0, jpipe.MEAN); for all else, such as a maximum, return it for each "
        "example, or type num_microbatches=1",
        varying,
    )
    return _make_joins(
        [_choose_run(i, axis, results) for i, axis in enumerate(leaf_axes)],
        results,
        title=f"outputs of a micro-batch of {results.sizes[0]} cannot be joined on "
        f"out_axes={axes!r}; return the examples on that axis, or type "
        f"num_microbatches=1, or out_axes=, with jpipe.MEAN for a mean over the "
        f"examples, jpipe.SUM for a sum or a count, as in out_axes=(0, jpipe.MEAN)",
        label="outputs",
    )


def join_once(num_leaves: int) -> list[Join]:
    """The join of leaves that are computed once for the whole mini-batch."""
    return [Join(i, _first) for i in range(num_leaves)]


def join_marked(column: Sequence[Any], axis: Any, sizes: Sequence[int]) -> jax.Array:
    """Joins the arrays of a mark: see `_whole_batch`.

    Args:
      column: the arrays of all micro-batches.
      axis: the axis of the examples, or a reduction; ``None``: all are the same.
      sizes: the number of examples in each micro-batch.

    Raises:
      TypeError: if the axis is none of these, or the arrays cannot be reduced.
    """
    if axis is None:
        return column[0]
    if isinstance(axis, Reduction):
        if not axis.takes(column[0]):
            raise TypeError(
                f"jpipe.whole_batch: {shape_text(column[0])}: {axis} {axis.advice}"
            )
        return axis.choose_run(column[0], sizes)(column)
    if not isinstance(axis, int):
        raise TypeError(
            f"jpipe.whole_batch: axis={axis!r}; needs the number of an axis, "
            f"jpipe.MEAN or jpipe.SUM"
        )
    return jnp.concatenate(column, axis)


def join_state(
    results: MicrobatchOutputs, names: Sequence[str], specs: Sequence[Any]
) -> list[Join]:
    """The join of each leaf of state that micro-batches change.

    Args:
      results: the results of micro-batches.
      names: the names of the parameters.
      specs: the specs of the parameters.

    Raises:
      ValueError: with the leaves that have no axis of examples and follow from them, or
        become of another dtype.
    """
    joins = list[Join]()
    without_axis = list[str]()
    other_dtypes = list[str]()
    for state_input, axis in zip(
        results.traced.state_inputs, results.state_axes, strict=True
    ):
        param_index, _, leaf_index = state_input
        name = names[param_index]
        dtype = specs[param_index].dtype
        new_dtype = results.traced.aux_vars[leaf_index].aval.dtype
        run = _first if axis is None else _concatenate_along(axis)
        if len(results.sizes) == 1:
            run = _first
        elif axis is None and results.aux_depends_on_examples[leaf_index]:
            without_axis.append(f"{name} of shape {specs[param_index].shape}")
        if new_dtype != dtype:
            other_dtypes.append(f"{name} of {dtype} becomes {new_dtype}")
        joins.append(Join(leaf_index, run, param_index))
    raise_all(
        "state that follows from examples and has no row for each is another in each "
        "micro-batch: type its axis, as in mutable={'cache': 0}, or num_microbatches=1",
        without_axis,
    )
    raise_all(
        "a call changes the dtype of state, which a pipeline keeps: write what is cast "
        "to it",
        other_dtypes,
    )
    return joins


def _leaf_axes(
    axes: Any, results: MicrobatchOutputs, *, label: str, name: str
) -> list[Any]:
    """An axis, a reduction or ``None`` for each leaf.

    Args:
      axes: the value of ``out_axes`` or ``aux_axes``.
      results: the results of micro-batches.
      label: the word for the results in errors.
      name: the name of the argument that `axes` is.

    Raises:
      ValueError: if they do not fit, or micro-batches return other trees.
    """
    if jax.tree.structure(results.first) != jax.tree.structure(results.last):
        raise ValueError(
            f"the sizes {tuple(results.sizes)} of micro-batches differ and so does "
            f"what is in {label}: {shape_text(results.first)} and "
            f"{shape_text(results.last)}; return the same for each, or give a batch "
            f"that num_microbatches divides"
        )
    return _microbatch.leaf_axes(axes, results.first, label, name, REDUCTIONS)


def _check_dtypes(
    axes: Sequence[Any], results: MicrobatchOutputs, *, label: str, name: str
) -> None:
    """Checks that reductions take the dtypes of their leaves.

    Raises:
      ValueError: with the leaves that the first reduction does not take.
    """
    for reduction in REDUCTIONS:
        if label == "aux" and reduction.takes_other_aux:
            continue
        faults = [
            _describe_dtype(label, path, leaf)
            for (path, leaf), axis, follows in zip(
                results.leaves, axes, results.depends_on_examples, strict=True
            )
            if axis is reduction
            and not reduction.takes(leaf)
            and (follows or not reduction.reduces_constants)
        ]
        raise_all(f"{name}={reduction} {reduction.advice}", faults)


def _make_joins(
    runs: Sequence[Run | None], results: MicrobatchOutputs, *, title: str, label: str
) -> list[Join]:
    """Makes the joins of all leaves.

    Raises:
      ValueError: with the title, and every leaf that cannot be joined.
    """
    joins = list[Join]()
    faults = list[str]()
    for i, ((path, leaf), run) in enumerate(zip(results.leaves, runs, strict=True)):
        if run is None:
            faults.append(_describe_shape(label, path, leaf))
        else:
            joins.append(Join(i, run))
    raise_all(title, faults)
    return joins


def _choose_run(i: int, axis: Any, results: MicrobatchOutputs) -> Run | None:
    """Chooses the function that joins the values of a leaf; ``None`` if there is none.

    Args:
      i: the index of the leaf.
      axis: an axis or a reduction; ``None`` if the leaf follows from no example.
      results: the results of micro-batches.
    """
    if len(results.sizes) == 1:
        return _first
    _, leaf = results.leaves[i]
    first, last = results.shapes_of(i)
    follows = results.depends_on_examples[i]
    reduction = _as_reduction(axis)
    if reduction and (follows or reduction.reduces_constants):
        return reduction.choose_run(leaf, results.sizes) if first == last else None
    if not follows:
        return _choose_run_without_examples(i, axis, results)
    can_concatenate = results.has_row_per_example(i, axis) and (
        _without_axis(first, axis) == _without_axis(last, axis)
    )
    return _concatenate_along(axis) if can_concatenate else None


def _choose_run_without_examples(
    i: int, axis: Any, results: MicrobatchOutputs
) -> Run | None:
    """Chooses the function that joins a leaf without examples as one device returns it.

    Args:
      i: the index of the leaf.
      axis: its axis in ``out_axes`` or ``aux_axes``.
      results: the results of micro-batches.

    Returns:
      The function; ``None`` if the leaf cannot be made from micro-batches.
    """
    if results.is_input(i):
        return _first
    if closed := results.constant_jaxpr(i):
        return lambda values: core.jaxpr_as_fun(closed)()[0]
    if results.has_fixed_shape(i):
        return _first
    can_concatenate = _is_axis(axis) and results.joins_to_whole(i, axis)
    return _concatenate_along(axis) if can_concatenate else None


def _check_aux(axes: Sequence[Any], results: MicrobatchOutputs) -> None:
    """Checks that aux of all micro-batches, of two sizes maybe, can be joined.

    Raises:
      ValueError: with every leaf that lacks the axis or differs elsewhere.
    """
    if len(results.sizes) == 1:
        return
    lacking = list[str]()
    ragged = list[str]()
    for i, ((path, leaf), axis) in enumerate(zip(results.leaves, axes, strict=True)):
        label = f"aux{jax.tree_util.keystr(path)}"
        first, last = results.shapes_of(i)
        is_axis = _is_axis(axis)
        if is_axis and not results.depends_on_examples[i]:
            continue
        if is_axis and not -leaf.ndim <= axis < leaf.ndim:
            lacking.append(f"{label} of shape {first} has no axis {axis}")
            continue
        joined_axis = axis if is_axis else None
        if _without_axis(first, joined_axis) != _without_axis(last, joined_axis):
            axis_text = f", joined on axis {axis}" if is_axis else ""
            ragged.append(f"{label}{axis_text}: {first} and {last}")
    if lacking:
        raise ValueError("cannot join aux on aux_axes: " + "; ".join(lacking))
    if ragged:
        raise ValueError(
            f"the sizes {tuple(results.sizes)} of micro-batches differ and so do the "
            f"shapes of aux: {'; '.join(ragged)}; return sums or means, name in "
            f"aux_axes= the axis of the examples, or give a batch that "
            f"num_microbatches divides"
        )


def _is_axis(axis: Any) -> TypeGuard[int]:
    return axis is not None and _as_reduction(axis) is None


def _as_reduction(axis: Any) -> Reduction | None:
    return axis if isinstance(axis, Reduction) else None


def _describe_shape(label: str, path: Any, leaf: Any) -> str:
    return f"{label}{jax.tree_util.keystr(path)} has shape {leaf.shape}"


def _describe_dtype(label: str, path: Any, leaf: Any) -> str:
    return f"{label}{jax.tree_util.keystr(path)} is {leaf.dtype}"


def _without_axis(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """A shape without one axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis:][1:])


def _concatenate_along(axis: int) -> Run:
    """The function that concatenates values on an axis."""
    return lambda values: jnp.concatenate(values, axis)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


def _sum(values: Sequence[Any]) -> Any:
    """The sum of values, in single precision where they are of half."""
    spec = sum_spec(values[0])
    terms = [[value.astype(spec.dtype)] for value in values]
    (total,) = functools.reduce(accumulate, terms)
    return total.astype(values[0].dtype)


def mean(values: Sequence[jax.Array], shares: Sequence[float]) -> jax.Array:
    """The mean over the examples; that of equal values is that value to the bit."""
    mean_so_far = values[0]
    share_so_far = shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        share_so_far += share
        weight_dtype = jnp.result_type(mean_so_far, jnp.float32)
        weight = jnp.asarray(share / share_so_far, weight_dtype)
        mean_so_far = extend_mean(mean_so_far, value, weight)
    return mean_so_far

"""Whether the loss of a mini-batch is what its micro-batches make of it.

Micro-batches give the loss of the mini-batch where it is a mean over examples, a sum,
or a quotient of sums. A loss that is none of these, such as a mean over the tokens of a
mask, would train another model, and nothing would show it. So it is run once before the
stages are compiled: on random outputs and the first real targets, together and in two
parts.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._jaxprs import _flow
from ._batch import Batch
from ._objective import Objective

PyTree = Any
_ADVICE = (
    "for a sum over examples type reduction='sum'; for a mean by a mask or by weights "
    "return (total, weight) and type reduction='weighted'; for the mean of what each "
    "micro-batch gives by itself type reduction='microbatch_mean'; num_microbatches=1 "
    "computes any loss"
)
# What passed, by its reduction and the text of its program: it is not run again.
_passed: dict[tuple[str, bytes], None] = {}
_MOST_PASSED = 256
# What is evaluated at once has at most so many elements.
_MOST = 2**26
# Two numbers that differ by less are the same but for rounding; by a weight such as
# mask.sum() + 1e-2 they differ a little, and are meant to.
_TOLERANCE = {"mean": 1e-4, "sum": 1e-4, "weighted": 1e-2}
# Logits, and probabilities: so many numbers of each, which are repeated.
_PERIOD = 65521


def check(
    objective: Objective,
    outputs: PyTree,
    targets: PyTree,
    target_axes: Sequence[int | None],
    batch: Batch,
    axis: int,
) -> str:
    """Checks a loss by running it.

    Args:
      objective: the loss.
      outputs: specs of what it receives for the first micro-batch.
      targets: the targets of the mini-batch, as they were given.
      target_axes: where the examples are in each of them.
      batch: the mini-batch.
      axis: where the examples are in an output of one array.

    Returns:
      Why it was not checked; empty if it was.

    Raises:
      ValueError: if it is not of its ``reduction``, with both numbers.
    """
    if objective.reduction == "microbatch_mean":
        return "each micro-batch counts by itself"
    leaves = jax.tree.leaves(targets)
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves) or any(
        isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves
    ):
        return "its targets are not arrays of this process"
    sizes = _sizes(outputs, batch)
    if not sizes:
        return f"its outputs have more than {_MOST:,} elements"
    count = sum(sizes)
    specs, axes = _whole(outputs, batch.sizes[0], count, axis)
    try:
        losses = _losses(objective, axes, target_axes, sizes)
        traced = jax.jit(losses).trace(specs, targets)
        if traced.jaxpr.effects:
            return "it has effects"
        lowered = traced.lower()
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        known = objective.reduction, text
        if known in _passed:
            return ""
        run = lowered.compile(compiler_options=_compat.quick_to_compile())
        found = [jax.device_get(run(y, targets)) for y in _random(specs, axes)]
        dtypes = _flow.dtypes(traced.jaxpr)
        floating = [x for x in dtypes if jnp.issubdtype(x, jnp.floating)]
        eps = max(float(jnp.finfo(dtype).eps) for dtype in floating)
    except Exception as error:
        return (
            f"it raises {type(error).__name__} for {count} examples of random outputs"
        )
    if not (seen := [one for one in found if _is_finite(one)]):
        return "it gives no finite number for random outputs"
    for whole, *parts in seen:
        with np.errstate(all="ignore"):
            _compare(objective.reduction, whole, parts, sizes, eps)
    _passed[known] = None
    if len(_passed) > _MOST_PASSED:
        del _passed[next(iter(_passed))]
    return ""


def _is_finite(losses: PyTree) -> bool:
    # A total and its weight may be of dtypes that NumPy has no common one for.
    return all(np.isfinite(float(x)) for x in jax.tree.leaves(losses))


def _losses(
    objective: Objective,
    axes: Sequence[int | None],
    target_axes: Sequence[int | None],
    sizes: tuple[int, int],
) -> Callable[[PyTree, PyTree], Any]:
    """``(outputs, targets)`` to the losses of all examples and of two parts."""

    def part(tree: PyTree, axes: Sequence[int | None], start: int, stop: int) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            x if a is None else jax.lax.slice_in_dim(x, start, stop, axis=a)
            for x, a in zip(leaves, axes, strict=True)
        )

    def run(y: PyTree, targets: PyTree) -> Any:
        ends = [(0, sum(sizes)), (0, sizes[0]), (sizes[0], sum(sizes))]
        return [
            objective.parts(part(y, axes, *end), part(targets, target_axes, *end))
            for end in ends
        ]

    return run


def _sizes(outputs: PyTree, batch: Batch) -> tuple[int, int] | None:
    """How many examples two parts have; ``None`` if two examples are too many."""
    size, total = batch.sizes[0], sum(batch.sizes) * batch.num_shards
    elements = sum(leaf.size for leaf in jax.tree.leaves(outputs)) // size + 1
    if (most := _MOST // elements) < 2:
        return None
    first = max(1, min(size, most // 3))
    second = min(2 * first, total - first, most - first)
    return first, second if second != first else max(1, first // 2)


def _whole(
    outputs: PyTree, size: int, count: int, axis: int
) -> tuple[PyTree, list[int | None]]:
    """Specs of the outputs of more examples, and where the examples are in each."""
    leaves, structure = jax.tree.flatten(outputs)
    specs, axes = [], []
    for leaf in leaves:
        fitting = [a for a, length in enumerate(leaf.shape) if length == size]
        chosen = axis % leaf.ndim if leaf.ndim else None
        at = chosen if chosen in fitting else (*fitting, None)[0]
        shape = tuple(count if a == at else n for a, n in enumerate(leaf.shape))
        specs.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
        axes.append(at)
    return structure.unflatten(specs), axes


def _random(specs: PyTree, axes: Sequence[int | None]) -> Iterator[PyTree]:
    """Random outputs as logits, then as probabilities.

    They are smaller for the first example than for the last. So losses of examples
    differ, however many elements they are means of.
    """
    rng = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(specs)

    def drawn(values: Any, leaf: jax.ShapeDtypeStruct, axis: int | None) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.resize(values > np.median(values), leaf.shape).astype(leaf.dtype)
        y = np.resize(values.astype(leaf.dtype), leaf.shape)
        if axis is None:
            return y
        shape = [n if a == axis else 1 for a, n in enumerate(leaf.shape)]
        return y * np.linspace(0.2, 1, shape[axis]).reshape(shape).astype(leaf.dtype)

    for draw in (lambda: 3 * rng.standard_normal(_PERIOD), lambda: rng.random(_PERIOD)):
        made = [drawn(draw(), *pair) for pair in zip(leaves, axes, strict=True)]
        yield structure.unflatten(made)


def _compare(
    reduction: str, whole: Any, parts: Sequence[Any], sizes: Sequence[int], eps: float
) -> None:
    """Compares the loss of all examples with that of two parts."""
    together: Any = np.asarray(whole, np.float64)
    losses: Any = np.asarray(parts, np.float64)
    if reduction == "weighted":
        size = np.abs(losses[:, 0]).max() / max(np.abs(together[1]), 1e-30)
        together, combined = together[0] / together[1], np.divide(*losses.sum(0))
    else:
        weights = np.asarray(sizes) / sum(sizes) if reduction == "mean" else 1.0
        size, combined = np.abs(losses).max(), (losses * weights).sum()
    if not np.isfinite([together, combined]).all():
        return
    tolerance = max(_TOLERANCE[reduction], 8 * eps)
    if abs(together - combined) <= tolerance * max(abs(together), size):
        return
    raise ValueError(
        f"reduction={reduction!r}: loss_fn is {together:.6g} for {sum(sizes)} examples "
        f"but {combined:.6g} as combined of two parts of {sizes[0]} and {sizes[1]} "
        f"(random outputs, the first of these targets), so micro-batches would train "
        f"another loss; {_ADVICE}"
    )

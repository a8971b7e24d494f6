"""A loss, run with all examples at once and in micro-batches.

Micro-batches give the loss of the mini-batch where it is a mean over examples, a sum,
or a quotient of sums. A loss that is none of these, such as a mean over the tokens of a
mask, would train another model, and nothing would show it.
"""

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._functions._batch import Batch
from .._functions._objective import Objective, as_weight
from .._jaxprs import _constraints, _flow
from . import _compare
from ._compare import Difference, floating
from ._function import (
    Function,
    Way,
    differentiated,
    first_line,
    host,
    in_parts,
    part,
    with_own,
)
from ._report import CheckResult

PyTree = Any
ADVICE = (
    "for a sum over examples type reduction='sum'; for a mean by a mask or by weights "
    "return (total, weight) and type reduction='weighted'; for the mean of what each "
    "micro-batch gives by itself type reduction='microbatch_mean'; num_microbatches=1 "
    "computes any loss"
)
# The texts of programs of losses that passed: they are not run again.
_passed: set[bytes] = set()
# What is evaluated at once has at most so many elements.
_MOST = 2**26
# Two numbers that differ by less are the same but for rounding; by a weight such as
# mask.sum() + 1e-2 they differ a little, and are meant to.
_TOLERANCE = {"mean": 1e-4, "sum": 1e-4, "weighted": 1e-2}
# Logits, and probabilities: so many numbers of each, which are repeated.
_PERIOD = 65521


def _terms(
    objective: Objective, axes: Sequence[int | None], sizes: Sequence[int]
) -> Callable[..., list[jax.Array]]:
    """``(outputs, targets)`` to what each micro-batch adds to the loss.

    A third argument is what each has by itself of the outputs: see `with_own`.

    Args:
      objective: the loss.
      axes: where the examples are in outputs and targets.
      sizes: how many each micro-batch has.
    """

    def of_part(outputs: PyTree, targets: PyTree) -> Any:
        with jax.default_matmul_precision("highest"):
            value, _ = objective.of_part(outputs, targets)
        return value

    def run(
        outputs: PyTree, targets: PyTree, own: Sequence[Any] = ()
    ) -> list[jax.Array]:
        each = in_parts(lambda *given: given, axes, sizes)(outputs, targets)
        values = [of_part(with_own(y, own, i), t) for i, (y, t) in enumerate(each)]
        if objective.reduction == "sum":
            return values
        if objective.reduction == "mean":
            shares = [n / sum(sizes) for n in sizes]
            return [value * share for value, share in zip(values, shares, strict=True)]
        weight = sum(as_weight(weight, total) for total, weight in values)
        weight = jax.lax.stop_gradient(weight)
        return [total / weight for total, _ in values]

    return run


def compared(
    function: Function,
    given: tuple[PyTree, PyTree],
    axes: Sequence[int | None],
    sizes: Sequence[int],
    tolerance: float | None,
    of_all: float = 0.0,
) -> tuple[Any, tuple[Difference, ...]]:
    """A loss of all examples, and where it or its gradient is another in micro-batches.

    Args:
      function: the loss.
      given: by what it is differentiated, and what is fixed.
      axes: where the examples are in what it is differentiated by.
      sizes: how many each micro-batch has.
      tolerance: how far numbers may be apart; ``None``: as far as rounding explains.
      of_all: so much of the largest gradient counts at least.
    """
    ones = [np.ones((), leaf.dtype) for leaf in function.projected]
    whole, parts = function(*given, ones)
    limit = function.limit if tolerance is None else tolerance
    values = whole.results, parts.results, [None]
    found = [_compare.compare("outputs", *values, sizes, limit)]
    if whole.gradient is not None:
        least = of_all * _compare.size(whole.gradient)
        gradients = whole.gradient, parts.gradient, floating(given[0], axes)
        found.append(_compare.compare("gradients", *gradients, sizes, limit, least))
    return whole.results, tuple(filter(None, found))


def check(
    objective: Objective,
    outputs: PyTree,
    targets: PyTree,
    axes: tuple[Sequence[int | None], Sequence[int | None]],
    sizes: Sequence[int],
    tolerance: float | None,
    own: Sequence[Any],
) -> CheckResult:
    """What is found of a loss of the outputs of a model.

    Args:
      objective: the loss.
      outputs: the outputs for all examples.
      targets: their targets.
      axes: where the examples are in each of these.
      sizes: how many examples each micro-batch has.
      tolerance: how far numbers may be apart; ``None``: as far as rounding explains.
      own: what each micro-batch has by itself of the outputs: see `with_own`.
    """
    name = f"loss_fn with reduction={objective.reduction!r}"
    if objective.reduction == "microbatch_mean":
        return CheckResult(name, notes=("not compared: each micro-batch by itself",))
    targets, count = jax.tree.map(host, targets), sum(sizes)
    given = outputs, (targets, own)

    def loss(sizes: Sequence[int], order: slice | None = None) -> Way:
        terms = _terms(objective, [*axes[0], *axes[1]], sizes)

        def run(outputs: PyTree, fixed: PyTree) -> jax.Array:
            targets, own = fixed
            each = () if order is None else jax.tree.map(lambda x: x[order], own)
            return functools.reduce(operator.add, terms(outputs, targets, each))

        return differentiated(run)

    try:
        # The examples of one micro-batch may count by chance as all do.
        for order in (slice(None), slice(None, None, -1)):
            divided = loss(sizes[order], order)
            function = Function(loss([count]), divided, *given)
            whole, found = compared(function, given, axes[0], sizes[order], tolerance)
            if found:
                break
    except Exception as error:
        both = outputs, targets
        y, few = part(both, [*axes[0], *axes[1]], 0, sizes[0], count)
        first = with_own(y, own, 0), (few, own)
        if not _runs_on_some(loss([count]), given, first):
            raise  # what is wrong with any examples
        return CheckResult(name, notes=(f"not compared: {first_line(error)}",))
    notes = [f"{whole:.6g}"]
    if function.error:
        notes.append(f"without its gradient: {function.error}")
    what = ("outputs",) if function.error else ("outputs", "gradients")
    return CheckResult(name, found, what, tuple(notes), ADVICE)


def _runs_on_some(function: Callable[..., Any], *given: tuple[Any, ...]) -> bool:
    """Whether a function can be traced with some of several arguments."""
    for args in given:
        with contextlib.suppress(Exception):
            jax.eval_shape(function, *args)
            return True
    return False


def probe(
    objective: Objective,
    outputs: PyTree,
    targets: PyTree,
    target_axes: Sequence[int | None],
    batch: Batch,
    axis: int,
) -> str:
    """Runs a loss before anything is compiled, on random outputs and real targets.

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
    ways = [_terms(objective, [*axes, *target_axes], n) for n in ([count], sizes)]
    total = sum(batch.sizes) * batch.num_shards

    def losses(outputs: PyTree, targets: PyTree) -> list[list[jax.Array]]:
        own = part(targets, target_axes, 0, count, total)
        return [terms(outputs, own) for terms in ways]

    try:
        both = jax.jit(_constraints.without(losses))
        traced = both.trace(specs, targets)
        if traced.jaxpr.effects:
            return "it has effects"
        lowered = traced.lower()
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        if text in _passed:
            return ""
        run = lowered.compile(compiler_options=_compat.quick_to_compile())
        found = [jax.tree.map(float, run(y, targets)) for y in _random(specs, axes)]
        eps = _compare.tolerance(_flow.dtypes(traced.jaxpr))
    except Exception as error:
        return (
            f"it raises {type(error).__name__} for {count} examples of random outputs"
        )
    finite = [
        (one, parts) for (one,), parts in found if np.isfinite([one, *parts]).all()
    ]
    if not finite:
        return "it gives no finite number for random outputs"
    limit = max(_TOLERANCE[objective.reduction], eps)
    for one, parts in finite:
        combined = sum(parts)
        if abs(one - combined) > limit * max(map(abs, [one, *parts])):
            raise ValueError(
                f"reduction={objective.reduction!r}: loss_fn is {one:.6g} for {count} "
                f"examples but {combined:.6g} as combined of two parts of {sizes[0]} "
                f"and {sizes[1]} (random outputs, the first of these targets), so "
                f"micro-batches would train another loss; {ADVICE}"
            )
    _passed.add(text)
    return ""


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

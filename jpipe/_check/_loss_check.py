"""A loss, run with all examples at once and in micro-batches.

Micro-batches give the loss of the mini-batch where it is a mean over examples, a sum,
or a quotient of sums. A loss that is none of these, such as a mean over the tokens of a
mask, would train another model, and nothing would show it.
"""

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._arguments._batch import Batch
from .._arguments._objective import Objective, as_loss_weight
from .._jaxprs import _dataflow, _sharding_constraints
from .._jaxprs._jaxpr import is_inexact
from .._layers._text import shape_text
from ._comparison import Difference, axis_of, compare, floating_axes
from ._comparison import tolerance as rounding_tolerance
from ._report import CheckResult
from ._split_function import (
    SplitFunction,
    differentiated,
    first_line,
    join_examples,
    slice_examples,
    split_examples,
    to_host,
    with_values_of,
)

PyTree = Any
ADVICE = (
    "for a sum over examples type reduction='sum'; for a mean by a mask or by weights "
    "return (total, weight) and type reduction='weighted'; for the mean of what each "
    "micro-batch gives by itself type reduction='microbatch_mean'; any loss at all, of "
    "the whole mini-batch at once, is reduction='batch', or behind jpipe.whole_batch"
)
# digest of the program of a loss -> the program: other targets are not compiled again
_compiled: dict[bytes, Any] = {}
_MAX_COMPILED = 64
# The outputs that a loss is run on have at most this number of elements.
_MAX_ELEMENTS = 2**26
# reduction -> relative difference of two numbers that are equal but for rounding; a
# weight such as mask.sum() + 1e-2 causes a small difference that is intended.
_TOLERANCE = {"mean": 1e-4, "sum": 1e-4, "weighted": 1e-2}
# This number of logits, or of probabilities, is drawn, and repeated.
_PERIOD = 65521


def _terms(
    objective: Objective, axes: Sequence[int | None], sizes: Sequence[int]
) -> Callable[..., list[jax.Array]]:
    """``(outputs, targets, microbatch_values) -> terms``; their sum is the loss.

    There is one term for each micro-batch. For ``microbatch_values`` see
    `with_values_of`; by default there are none.

    Args:
      objective: the loss.
      axes: the axis of the examples in each leaf of outputs and targets.
      sizes: the number of examples of each micro-batch.
    """

    def value_of(outputs: PyTree, targets: PyTree) -> Any:
        with jax.default_matmul_precision("highest"):
            value, _ = objective.of_part(outputs, targets)
        return value

    def compute_terms(
        outputs: PyTree, targets: PyTree, microbatch_values: Sequence[Any] = ()
    ) -> list[jax.Array]:
        values = [
            value_of(with_values_of(part_outputs, microbatch_values, i), part_targets)
            for i, (part_outputs, part_targets) in enumerate(
                split_examples((outputs, targets), axes, sizes)
            )
        ]
        if objective.reduction == "sum":
            return values
        if objective.reduction == "mean":
            shares = [n / sum(sizes) for n in sizes]
            return [value * share for value, share in zip(values, shares, strict=True)]
        divisor = sum(as_loss_weight(weight, total) for total, weight in values)
        divisor = jax.lax.stop_gradient(divisor)
        return [total / divisor for total, _ in values]

    return compute_terms


def check_loss(
    objective: Objective,
    outputs: PyTree,
    targets: PyTree,
    *,
    output_axes: Sequence[int | None],
    target_axes: Sequence[int | None],
    sizes: Sequence[int],
    tolerance: float | None,
    microbatch_values: Sequence[Any],
) -> CheckResult:
    """Checks a loss of the outputs of a model.

    Args:
      objective: the loss.
      outputs: the outputs for all examples.
      targets: their targets.
      output_axes: the axis of the examples in each leaf of the outputs.
      target_axes: the axis of the examples in each leaf of the targets.
      sizes: the number of examples of each micro-batch.
      tolerance: the largest difference that passes; ``None``: that of rounding.
      microbatch_values: the outputs that each micro-batch has by itself: see
        `with_values_of`.
    """
    name = f"loss_fn with reduction={objective.reduction!r}"
    if objective.reduction == "microbatch_mean":
        return CheckResult(name, notes=("not compared: each micro-batch by itself",))
    if objective.reduction == "batch":
        return CheckResult(name, notes=("not compared: it runs once, on all examples",))
    axes = [*output_axes, *target_axes]
    count = sum(sizes)
    nondiff_args = jax.tree.map(to_host, targets), microbatch_values

    def at_once(outputs: PyTree, nondiff_args: PyTree) -> jax.Array:
        targets, _ = nondiff_args
        (term,) = _terms(objective, axes, [count])(outputs, targets)
        return term

    def in_microbatches(order: slice) -> Callable[[PyTree, PyTree], jax.Array]:
        def loss(outputs: PyTree, nondiff_args: PyTree) -> jax.Array:
            targets, microbatch_values = nondiff_args
            values = jax.tree.map(lambda x: x[order], microbatch_values)
            terms = _terms(objective, axes, sizes[order])(outputs, targets, values)
            return functools.reduce(operator.add, terms)

        return loss

    try:
        # The examples of one micro-batch may count by chance as all do.
        for order in (slice(None), slice(None, None, -1)):
            function = SplitFunction(
                differentiated(at_once),
                differentiated(in_microbatches(order)),
                outputs,
                nondiff_args,
            )
            value, differences = _compare_loss(
                function,
                outputs,
                nondiff_args,
                output_axes=output_axes,
                sizes=sizes[order],
                tolerance=tolerance,
            )
            if differences:
                break
    except Exception as error:
        some_outputs, some_targets = slice_examples(
            (outputs, targets), axes, start=0, stop=sizes[0], count=count
        )
        first_outputs = with_values_of(some_outputs, microbatch_values, 0)
        takes_all = _can_trace(at_once, outputs, nondiff_args)
        if not takes_all and not _can_trace(at_once, first_outputs, (some_targets, ())):
            raise  # the loss takes no outputs at all
        return CheckResult(name, notes=(f"not compared: {first_line(error)}",))

    notes = [f"{value:.6g}"]
    compared = ["outputs"]
    if function.error:
        notes.append(f"without its gradient: {function.error}")
    else:
        compared.append("gradients")
    return CheckResult(name, differences, tuple(compared), tuple(notes), ADVICE)


def _compare_loss(
    function: SplitFunction,
    outputs: PyTree,
    nondiff_args: PyTree,
    *,
    output_axes: Sequence[int | None],
    sizes: Sequence[int],
    tolerance: float | None,
) -> tuple[Any, tuple[Difference, ...]]:
    """The loss of all examples, and the differences of it and its gradient.

    Args:
      function: the loss.
      outputs: the outputs for all examples.
      nondiff_args: the other arguments of the function.
      output_axes: the axis of the examples in each leaf of the outputs.
      sizes: the number of examples of each micro-batch.
      tolerance: the largest difference that passes; ``None``: that of rounding.
    """
    cotangents = [np.ones((), leaf.dtype) for leaf in function.outputs]
    at_once, in_microbatches = function.run(outputs, nondiff_args, cotangents)
    limit = function.limit if tolerance is None else tolerance
    differences = [
        compare(
            "outputs",
            at_once=at_once.results,
            in_microbatches=in_microbatches.results,
            axes=[None],
            sizes=sizes,
            limit=limit,
        )
    ]
    if at_once.gradient is not None:
        differences.append(
            compare(
                "gradients",
                at_once=at_once.gradient,
                in_microbatches=in_microbatches.gradient,
                axes=floating_axes(outputs, output_axes),
                sizes=sizes,
                limit=limit,
            )
        )
    return at_once.results, tuple(filter(None, differences))


def _can_trace(function: Callable[..., Any], *args: Any) -> bool:
    """True if a function can be traced with some arguments."""
    try:
        jax.eval_shape(function, *args)
    except Exception:
        return False
    return True


def probe(
    objective: Objective,
    outputs: PyTree,
    targets: PyTree,
    *,
    target_axes: Sequence[int | None],
    batch: Batch,
    trace_outputs: Callable[[int], PyTree],
) -> str:
    """Runs a loss before anything is compiled, on random outputs and real targets.

    The targets are those of the first examples and of the last ones, since padding is
    where a mini-batch ends. The loss is compared, and its gradient by the outputs.

    Args:
      objective: the loss.
      outputs: specs of the outputs of the first micro-batch.
      targets: the targets of the mini-batch, as the user gave them.
      target_axes: the axis of the examples in each leaf of the targets.
      batch: the mini-batch.
      trace_outputs: ``number of examples -> specs of their outputs``.

    Returns:
      The reason why it was not checked; empty if it was.

    Raises:
      ValueError: if it is not of its ``reduction``, with both numbers.
    """
    if objective.reduction == "batch":
        return ""  # it runs once, whatever it is
    if objective.reduction == "microbatch_mean":
        return "each micro-batch counts by itself"
    if not all(map(_is_local_array, jax.tree.leaves(targets))):
        return "its targets are not arrays of this process"
    sizes = _sizes(outputs, batch)
    if not sizes:
        return f"its outputs have more than {_MAX_ELEMENTS:,} elements"
    count = sum(sizes)
    size = batch.sizes[0]
    try:
        outputs_of_double = trace_outputs(2 * size)
    except Exception as error:
        return f"the model raises {type(error).__name__} for {2 * size} examples"
    if jax.tree.structure(outputs_of_double) != jax.tree.structure(outputs):
        return "its outputs have another structure for more examples"
    # The axis of the examples is the one that is longer for twice as many.
    axes = [*map(axis_of, *map(jax.tree.leaves, (outputs, outputs_of_double)))]
    specs = _resize_specs(outputs, axes, size=size, count=count)
    if specs is None:
        return "its outputs do not have as many rows for each example"
    at_once = _terms(objective, [*axes, *target_axes], [count])
    in_microbatches = _terms(objective, [*axes, *target_axes], sizes)

    def compare_parts(outputs: PyTree, targets: PyTree) -> tuple[list[Any], ...]:
        num_examples = batch.num_examples
        first_examples = (0, sizes[0])
        last_examples = (num_examples - sizes[1], num_examples)
        parts = [
            slice_examples(
                targets, target_axes, start=start, stop=stop, count=num_examples
            )
            for start, stop in (first_examples, last_examples)
        ]
        some_targets = join_examples(parts, target_axes)
        loss, grads = _differentiate(at_once, outputs, some_targets)
        terms, term_grads = _differentiate(in_microbatches, outputs, some_targets)
        largest = list[jax.Array]()
        differences = list[jax.Array]()
        for *pair, axis in zip(grads, term_grads, axes, strict=True):
            if axis is not None and is_inexact(pair[0]):
                whole, part = slice_examples(
                    pair, [axis, axis], start=0, stop=sizes[0], count=count
                )
                largest.append(jnp.max(jnp.abs(whole), initial=0))
                differences.append(jnp.max(jnp.abs(whole - part), initial=0))
        return [*loss, *terms], largest, differences

    try:
        function = _sharding_constraints.without_constraints(compare_parts)
        traced = jax.jit(function).trace(specs, targets)
        if traced.jaxpr.effects:
            return "it has effects"
        lowered = traced.lower()
        compiled = _compile(lowered)
        results = [
            jax.tree.map(float, compiled(y, targets))
            for y in _random_outputs(specs, axes)
        ]
        rounding = rounding_tolerance(_dataflow.all_dtypes(traced.jaxpr))
    except Exception as error:
        return (
            f"it raises {type(error).__name__} for {count} examples of random outputs"
        )
    limit = max(_TOLERANCE[objective.reduction], rounding)
    is_finite = False
    for (loss, *terms), largest, differences in results:
        if not np.isfinite(loss):
            continue
        is_finite = True
        combined = sum(terms)
        fault = ""
        scale = max(largest, default=0.0)
        # A loss may be the rounding error of a sum of terms that cancel each other.
        allowed = limit * max(map(abs, [loss, *terms])) + rounding * scale * count
        # A part whose loss is no number differs from all examples, whose loss is one.
        if not abs(loss - combined) <= allowed:
            fault = f"{combined:.6g}"
        difference = max(differences, default=0.0)
        if not fault and np.isfinite(scale) and not difference <= limit * scale:
            fault = (
                f"its gradient, of numbers up to {scale:.6g}, differs by "
                f"{difference:.6g}"
            )
        if fault:
            raise ValueError(
                f"reduction={objective.reduction!r}: loss_fn is {loss:.6g} for "
                f"{count} examples but {fault} as combined of two parts of "
                f"{sizes[0]} and {sizes[1]} (random outputs {shape_text(specs)}, "
                f"targets of the first and the last examples of "
                f"{shape_text(targets)}), so micro-batches would train another loss; "
                f"{ADVICE}"
            )
    return "" if is_finite else "it gives no finite number for random outputs"


def _differentiate(
    compute_terms: Callable[..., list[jax.Array]], outputs: PyTree, targets: PyTree
) -> tuple[list[jax.Array], list[Any]]:
    """The terms of a loss, and the gradient of the first by each leaf of the outputs.

    One term is enough, since all are of one function; each takes time to compile.
    """

    def first_term(outputs: PyTree) -> tuple[jax.Array, list[jax.Array]]:
        terms = compute_terms(outputs, targets)
        return terms[0], terms

    gradient, terms = jax.grad(first_term, has_aux=True, allow_int=True)(outputs)
    return terms, jax.tree.leaves(gradient)


def _compile(lowered: Any) -> Any:
    """Compiles the program of a loss, unless one of the same text is there."""
    digest = hashlib.sha256(lowered.as_text().encode()).digest()
    if digest not in _compiled:
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        options = _compat.quick_to_compile()
        _compiled[digest] = lowered.compile(compiler_options=options)
    return _compiled[digest]


def _is_local_array(leaf: Any) -> bool:
    """True if a leaf is an array whose values this process has."""
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable
    return isinstance(leaf, np.ndarray)


def _sizes(outputs: PyTree, batch: Batch) -> tuple[int, int] | None:
    """The sizes of two micro-batches; ``None``: two examples have too many elements."""
    size = batch.sizes[0]
    elements = sum(leaf.size for leaf in jax.tree.leaves(outputs)) // size + 1
    max_examples = _MAX_ELEMENTS // elements
    if max_examples < 2:
        return None
    first = max(1, min(size, max_examples // 3))
    second = min(2 * first, batch.num_examples - first, max_examples - first)
    if second == first:
        second = max(1, first // 2)
    return first, second


def _resize_specs(
    outputs: PyTree, axes: Sequence[int | None], *, size: int, count: int
) -> PyTree | None:
    """Specs of the outputs of more examples; ``None`` where these share rows.

    Args:
      outputs: specs of the outputs of ``size`` examples.
      axes: the axis of the examples in each of them.
      size: the number of these examples.
      count: the number of examples in the specs.
    """
    leaves, structure = jax.tree.flatten(outputs)
    specs: list[jax.ShapeDtypeStruct] = []
    for leaf, axis in zip(leaves, axes, strict=True):
        shape = [*leaf.shape]
        if axis is not None:
            rows_per_example, remainder = divmod(shape[axis], size)
            if remainder:
                return None
            shape[axis] = rows_per_example * count
        specs.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
    return structure.unflatten(specs)


def _random_outputs(specs: PyTree, axes: Sequence[int | None]) -> Iterator[PyTree]:
    """Random outputs as logits, then as probabilities.

    They are smaller for the first example than for the last. So losses of examples
    differ, however many elements they are means of.
    """
    rng = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(specs)

    def fill(values: Any, leaf: jax.ShapeDtypeStruct, axis: int | None) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.resize(values > np.median(values), leaf.shape).astype(leaf.dtype)
        y = np.resize(values.astype(leaf.dtype), leaf.shape)
        if axis is None:
            return y
        shape = [n if i == axis else 1 for i, n in enumerate(leaf.shape)]
        return y * np.linspace(0.2, 1, shape[axis]).reshape(shape).astype(leaf.dtype)

    def draw_logits() -> Any:
        return 3 * rng.standard_normal(_PERIOD)

    def draw_probabilities() -> Any:
        return rng.random(_PERIOD)

    for draw in (draw_logits, draw_probabilities):
        arrays = [
            fill(draw(), leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        yield structure.unflatten(arrays)

"""Whether a loss is what its reduction says: else micro-batches make another of it."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._jaxprs import _jaxpr
from .._jaxprs._reduced import EACH, OTHER, SAME, UNKNOWN, WHOLE, Differs, Made, results
from . import _microbatch
from ._batch import Batch
from ._objective import Objective

PyTree = Any
# The loss is traced with the examples of a micro-batch and so many times as many, which
# can be taken in the same groups; where it has one, not with one: all axes of length
# one would be alike.
_GROWTH = 3
_FEW = 4


class Given(NamedTuple):
    """What a loss is given of the first micro-batch.

    Attributes:
      outputs: specs of it.
      axis: the axis of the examples, where it is one array.
      met: specs of what the layers make of so many examples; it may raise anything.
    """

    outputs: PyTree
    axis: int
    met: Callable[[int], PyTree]


def check(objective: Objective, given: Given, batch: Batch) -> None:
    """Checks that the loss of a mini-batch is what its micro-batches make of it.

    Only what is certain is refused: of a loss that takes no other number of examples,
    say, nothing is known.

    Args:
      objective: the loss, and how micro-batches combine.
      given: what it is given.
      batch: the mini-batch.

    Raises:
      ValueError: if it is not.
    """
    made = _made(objective, given, batch)
    fault = _fault(objective.reduction, made) if made else None
    if fault:
        raise ValueError(
            f"loss_fn {fault}; with reduction={objective.reduction!r} its "
            f"{len(batch.sizes) * batch.num_shards} micro-batches would make another "
            f"loss than the mini-batch. {_ADVICE}"
        )


_ADVICE = (
    "A mean over the examples needs nothing; for a sum over them type "
    "reduction='sum'; for a quotient of two sums, such as a mean of what is not "
    "masked, reduction='weighted', and return (total, weight). For any other loss, "
    "such as one that compares examples with one another, take num_microbatches=1; "
    "or, where that of each micro-batch by itself is meant, say so: return "
    "(size * loss, size) with reduction='weighted', where size is its number of "
    "examples"
)


def _fault(reduction: str, made: list[Made]) -> str | None:
    """What a loss is that is not what its reduction says; None where it may be."""
    if any(one.kind not in (SAME, WHOLE, OTHER) for one in made):
        return None
    loss, *weights = made
    if weights:
        (weight,) = weights
        degrees = loss.degree, weight.degree
        if OTHER in (loss.kind, weight.kind) or None in degrees:
            return None
        if loss.degree == weight.degree:
            return None
        return f"returns {_told(loss)}, and as its weight {_told(weight)}"
    if loss.kind == OTHER:
        return loss.why
    needed = 1 if reduction == "sum" else 0
    if loss.kind == SAME or loss.degree in (None, needed):
        return None
    return f"returns {_told(loss)}"


def _told(made: Made) -> str:
    if made.kind == SAME:
        names = {0: "a constant", 1: "the number of examples"}
    else:
        names = {0: "a mean over the examples", 1: "a sum over the examples"}
    power = f"what grows as the number of examples to the power {made.degree}"
    return names.get(made.degree or 0, power)


def _made(objective: Objective, given: Given, batch: Batch) -> list[Made] | None:
    """How the loss, and the weight, follow from the examples; None if nobody knows."""
    size = batch.sizes[0]
    few = size if size > 1 else _FEW
    try:
        outputs = [_sized(given, size, count) for count in (few, _GROWTH * few)]
        one, other = (
            _jaxpr.trace(objective.parts, some, batch.part(count)[1]["targets"])[0]
            for some, count in zip(outputs, (few, _GROWTH * few), strict=True)
        )
        pairs = zip(*map(jax.tree.leaves, outputs), strict=True)
        made = [_lying(leaf.shape, many.shape) for leaf, many in pairs]
    except Exception:  # whatever a loss does that takes no other number of examples
        return None
    made += [Made(SAME if axis is None else EACH) for axis in batch.target_axes]
    with contextlib.suppress(Differs):
        return results(one, other, made, _GROWTH)
    return None


def _lying(shape: tuple[int, ...], many: tuple[int, ...]) -> Made:
    """How an output is: along the examples, if one axis is longer with many."""
    longer = sum(m != n for m, n in zip(shape, many, strict=True))
    return Made((SAME, EACH)[longer] if longer < 2 else UNKNOWN)


def _sized(given: Given, size: int, count: int) -> PyTree:
    """The outputs of so many examples.

    One array is of the examples. Beside it a layer may return what is not, such as a
    table of words, and the length of an axis does not tell.
    """
    if count == size:
        return given.outputs
    leaves, tree = jax.tree.flatten(given.outputs)
    if len(leaves) != 1:
        return jax.tree.map(_shaped, given.outputs, given.met(count))
    axis = _axis(leaves[0], given.axis, size)
    each = 1 if axis is None else leaves[0].shape[axis] // size
    return tree.unflatten(_microbatch.part_specs(leaves, [axis], each * count))


def _shaped(leaf: jax.ShapeDtypeStruct, like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, leaf.dtype, weak_type=leaf.weak_type)


def _axis(leaf: jax.ShapeDtypeStruct, axis: int, size: int) -> int | None:
    """Along which axis an output has the examples; tokens may be merged with them."""
    fits = -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] % size == 0
    if fits and leaf.shape[axis]:
        return axis
    exactly = [i for i, length in enumerate(leaf.shape) if length == size]
    return exactly[0] if len(exactly) == 1 else None

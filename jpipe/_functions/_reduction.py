"""Whether a loss is what its reduction says: else micro-batches make another of it."""

import contextlib
from typing import Any

import jax

from .._jaxprs import _jaxpr
from .._jaxprs._reduced import EACH, OTHER, SAME, WHOLE, Differs, Made, results
from . import _microbatch
from ._batch import Batch
from ._objective import Objective

PyTree = Any
# The loss is traced with the examples of a micro-batch and so many times as many, which
# can be taken in the same groups; where it has one, not with one: all axes of length
# one would be alike.
_GROWTH = 3
_FEW = 4


def check(objective: Objective, outputs: PyTree, out_axis: int, batch: Batch) -> None:
    """Checks that the loss of a mini-batch is what its micro-batches make of it.

    Only what is certain is refused: of a loss that takes no other number of examples,
    say, nothing is known.

    Args:
      objective: the loss, and how micro-batches combine.
      outputs: specs of what it is given of the first micro-batch.
      out_axis: the axis of the examples in them.
      batch: the mini-batch.

    Raises:
      ValueError: if it is not.
    """
    made = _made(objective, outputs, out_axis, batch)
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


def _made(
    objective: Objective, outputs: PyTree, out_axis: int, batch: Batch
) -> list[Made] | None:
    """How the loss, and the weight, follow from the examples; None if nobody knows."""
    size = batch.sizes[0]
    few = size if size > 1 else _FEW
    leaves, tree = jax.tree.flatten(outputs)
    axes = [_axis(leaf, out_axis, size) for leaf in leaves]
    try:
        one, other = (
            _jaxpr.trace(
                objective.parts,
                jax.tree.unflatten(tree, _sized(leaves, axes, size, count)),
                batch.part(count)[1]["targets"],
            )[0]
            for count in (few, _GROWTH * few)
        )
    except Exception:  # whatever a loss does that takes no other number of examples
        return None
    along = [axis is not None for axis in [*axes, *batch.target_axes]]
    given = [Made(EACH if of_examples else SAME) for of_examples in along]
    with contextlib.suppress(Differs):
        return results(one, other, given, _GROWTH)
    return None


def _axis(leaf: jax.ShapeDtypeStruct, axis: int, size: int) -> int | None:
    """Along which axis an output has the examples; tokens may be merged with them."""
    fits = -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] % size == 0
    if fits and leaf.shape[axis]:
        return axis
    exactly = [i for i, length in enumerate(leaf.shape) if length == size]
    return exactly[0] if len(exactly) == 1 else None


def _sized(
    leaves: list[Any], axes: list[int | None], size: int, count: int
) -> list[jax.ShapeDtypeStruct]:
    """The outputs of so many examples."""
    found = []
    for leaf, axis in zip(leaves, axes, strict=True):
        each = 1 if axis is None else leaf.shape[axis] // size
        found += _microbatch.part_specs([leaf], [axis], each * count)
    return found

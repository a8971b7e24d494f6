"""Whether a loss is what its reduction says: else micro-batches make another of it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr
from .._layers._followed import Outputs, two, whole
from .._mixing import _backward
from .._mixing._made import (
    EACH,
    FOLLOWS,
    GROWS,
    LITTLE,
    OTHER,
    SAME,
    SHIFTS,
    UNCLEAR,
    UNKNOWN,
    UNSURE,
    VAGUE,
    WHOLE,
    Made,
    taken_in,
)
from .._mixing._measured import UNTRIED, Result, is_small, magnitude, measured
from .._mixing._ordered import SOME
from .._mixing._pairs import Differs, Numbers
from .._mixing._results import reported, results
from . import _microbatch
from ._batch import Batch
from ._objective import Objective

PyTree = Any


class Given(NamedTuple):
    """What a loss is given of the first micro-batch.

    Attributes:
      specs: of what the last layer returns.
      axes: the axes of the examples, as the user gave them.
      followed: how that is made of the examples; ``None`` where nobody knows.
    """

    specs: PyTree
    axes: Any
    followed: Outputs | None


def check(objective: Objective, given: Given, batch: Batch) -> list[str]:
    """Checks that the loss of a mini-batch is what its micro-batches make of it.

    Only what is certain is refused: what its jaxpr tells, or else random numbers show;
    of one that is at most something it is said that it may be.

    Args:
      objective: the loss, and how micro-batches combine.
      given: what it is given.
      batch: the mini-batch.

    Returns:
      What is said of one that may be another.

    Raises:
      ValueError: if it certainly is.
    """
    fault, doubt = "", ""
    for traced in _traced(objective, given, batch):
        made = traced.made
        fault = _fault(objective.reduction, made, batch) or "" if made else ""
        doubt = _doubt(*made) if made else ""
        if not fault and not doubt:
            with contextlib.suppress(Differs), reported():
                fault, doubt = _tried(objective.reduction, traced, made)
        if made or fault or doubt:
            break
    if fault:
        moved = given.followed and given.followed.moved
        where = ", as the layers put examples in the places of others" if moved else ""
        raise ValueError(
            f"loss_fn {fault}{where}; with reduction={objective.reduction!r} its "
            f"{batch.num_parts} micro-batches would make another "
            f"loss than the mini-batch. {_ADVICE.format(alone=_alone(batch))}"
        )
    return [f"loss_fn {doubt}"] if doubt else []


_AT_LEAST = (
    "returns a weight that is at least, or at most, something: with "
    "jnp.maximum(sum, 1) each micro-batch that has none counts as one; return the sum"
)
_ADVICE = (
    "A mean over the examples needs nothing; for a sum over them type "
    "reduction='sum'; for a quotient of two sums, such as a mean of what is not "
    "masked, reduction='weighted', and return (total, weight). For any other loss, "
    "such as one that compares examples with one another, take {alone}; "
    "or, where that of each micro-batch by itself is meant, say so: return "
    "(size * loss, size) with reduction='weighted', where size is its number of "
    "examples"
)


def _alone(batch: Batch) -> str:
    """What leaves a mini-batch whole."""
    shards = " on a mesh without data shards" if batch.num_shards > 1 else ""
    return f"num_microbatches=1{shards}"


def _doubt(loss: Made, *weights: Made) -> str:
    """Why a loss may be another, as unless it is less than what it is at most."""
    if weights:
        return _doubt_of_quotient(loss, *weights)
    if loss.kind in (UNSURE, UNKNOWN) and loss.why not in SHIFTS:
        return loss.why
    if loss.kind == WHOLE and loss.why in SHIFTS:
        return loss.why
    scaled = loss.kind == WHOLE and loss.degree == UNCLEAR
    return "returns a mean times what the number of examples makes" if scaled else ""


def _doubt_of_quotient(total: Made, weight: Made) -> str:
    """Why that of sums over micro-batches may be another, where it is not said."""
    if weight.kind == UNSURE and weight.why == FOLLOWS:
        return _AT_LEAST
    told = {made: _of_several(made) for made in (total, weight)}
    if GROWS in told.values():  # which each micro-batch does: it counts as many times
        return GROWS
    if told[weight]:
        return f"returns a weight that is no sum: it {told[weight]}"
    if told[total] and not _is_said(total, weight):
        return (
            f"{told[total]}; where that of each micro-batch by itself is meant, return "
            f"(size * loss, size), where size is its number of examples"
        )
    return ""


def _is_said(total: Made, weight: Made) -> bool:
    """Whether each micro-batch counts by its number of examples, or as one."""
    return weight.kind == SAME and (total.sized or not weight.degree)


def _of_several(made: Made) -> str:
    """What makes of several examples more than a sum."""
    told = made.kind in (OTHER, UNSURE, UNKNOWN) and made.why != LITTLE
    return made.why if told else ""


def _fault(reduction: str, made: list[Made], batch: Batch) -> str | None:
    """What a loss is that is not what its reduction says; None where it may be."""
    loss, *weights = made
    if not weights and loss.orders and loss.orders.exact and loss.orders.are_all_known:
        return SOME
    if loss.kind == UNSURE and not weights and loss.why not in VAGUE:
        return loss.why
    if any(one.kind not in (SAME, WHOLE, OTHER) for one in made):
        return None
    if weights:
        (weight,) = weights
        degrees = loss.degree, weight.degree
        if degrees == (0, 0) and len(set(batch.sizes)) > 1:
            return f"{_returned(loss, weight)}, of micro-batches of several sizes"
        if None in degrees or UNCLEAR in degrees or loss.degree == weight.degree:
            return None
        return _returned(loss, weight)
    if loss.kind == OTHER:
        return loss.why
    needed = 1 if reduction == "sum" else 0
    if loss.kind == SAME or loss.degree in (None, UNCLEAR, needed):
        return None
    return f"returns {_told(loss)}"


def _returned(loss: Made, weight: Made) -> str:
    return f"returns {_told(loss)}, and as its weight {_told(weight)}"


def _told(made: Made) -> str:
    names: dict[int, dict[float, str]] = {
        SAME: {0: "a constant", 1: "the number of examples"},
        WHOLE: {0: "a mean over the examples", 1: "a sum over the examples"},
        OTHER: {0: "what does not grow with the number of examples"},
    }
    power = f"what grows as the number of examples to the power {made.degree}"
    return names[made.kind].get(made.degree or 0, power)


class _Traced(NamedTuple):
    """A loss, traced with two numbers of examples.

    Attributes:
      one: its jaxpr with some of them.
      other: with more.
      given: how each of its inputs is made of them.
      numbers: how many there are.
    """

    one: core.ClosedJaxpr
    other: core.ClosedJaxpr
    given: list[Made]
    numbers: Numbers

    @property
    def made(self) -> list[Made] | None:
        """How loss and weight follow from the examples; ``None`` if nobody knows."""
        try:
            return results(*self)
        except Differs:
            return None


def _traced(objective: Objective, given: Given, batch: Batch) -> Iterator[_Traced]:
    """The loss with two numbers of examples, by every two that it takes.

    Those that the layers were followed with; and one micro-batch and all, which meet
    a table that is as long as the mini-batch as they will.
    """
    size, numbers = batch.sizes[0], whole(batch.sizes, batch.num_shards)
    tries = [
        lambda: given.followed or _scaled(given, size, two(batch.sizes)),
        lambda: numbers and _scaled(given, size, numbers),
    ]
    for outputs in tries:
        try:
            found = outputs()
            traced = found and _with(objective, found, batch)
        except Exception:  # whatever a loss does with another number
            continue
        if traced:
            yield traced


def _with(objective: Objective, outputs: Outputs, batch: Batch) -> _Traced:
    """The loss of such outputs, and the targets of as many examples."""
    numbers = outputs.numbers
    few, many = (batch.part(count)[1]["targets"] for count in numbers.counts)
    one, _ = _jaxpr.trace(objective.parts, outputs.few, few)
    other, _ = _jaxpr.trace(objective.parts, outputs.many, many)
    leaves = zip(jax.tree.leaves(few), batch.target_axes, strict=True)
    targets = (taken_in(leaf.ndim, axis, numbers.counts) for leaf, axis in leaves)
    return _Traced(one, other, [*outputs.made, *targets], numbers)


def _tried(
    reduction: str, traced: _Traced, made: Sequence[Made] | None
) -> tuple[str, str]:
    """What a loss of random numbers is that no jaxpr tells of, or may be."""
    one, other, given, numbers = traced
    differ, known = made is None, made or []
    pieced = differ or any(each.pieced for each in known)
    unknown = pieced or any(each.kind in (UNKNOWN, UNSURE) for each in known)
    # A weight may say that the loss of each micro-batch by itself is meant.
    said = reduction == "weighted" and (differ or _is_said(*known))
    # One that is known is measured too, where that takes a moment.
    if not said and (unknown or is_small(other)):
        draws = measured(*traced)
        if not draws and differ:
            return "", UNTRIED
        for draw in draws:
            if why := _other(reduction, draw, numbers):
                return (why, "") if unknown else ("", why)
    if not pieced and not _backward.is_free(one, other, numbers):
        return "", ""
    share = Made(WHOLE, 1) if reduction == "mean" else Made(SAME)
    why = _backward.found(one, other, given, {0: share}, numbers)
    return "" if said else why, ""


def _other(reduction: str, found: Sequence[Result], numbers: Numbers) -> str:
    """What a loss is of all examples and by parts, if that is not the same."""
    loss, *weight = found
    parts = loss.parts
    weights = weight[0].parts if weight else []
    by = {"mean": len(parts), "sum": 1}.get(reduction) or np.sum(weights)
    scale = weight[0].whole if weight else 1
    if not by or not scale:  # of random numbers none counts
        return ""
    together = loss.whole / scale
    made = np.sum(parts, axis=0) / by
    if weight:
        loss = loss._replace(whole=together, noise=loss.noise / abs(scale))
    if not loss.differs(made, magnitude(parts) / abs(by)):
        return ""
    few, many = numbers.counts
    return (
        f"is, of random numbers, {float(together):.5g} for {many} examples, "
        f"and {float(made):.5g} by {len(parts)} micro-batches of {few}"
    )


def _scaled(given: Given, size: int, numbers: Numbers) -> Outputs:
    """One array of more examples, where a layer takes no other number of them.

    Raises:
      ValueError: if there are several: a layer may return beside what is of the
        examples what is not, and the length of an axis does not tell.
    """
    (leaf,), tree = jax.tree.flatten(given.specs)
    (axis,) = _microbatch.flat_axes(given.axes, given.specs, "outputs", "out_axes")
    axis = None if axis is None else _axis(leaf, axis, size)
    each = 1 if axis is None else leaf.shape[axis] // size
    few, many = (
        tree.unflatten(_microbatch.part_specs([leaf], [axis], each * count))
        for count in numbers.counts
    )
    made = taken_in(leaf.ndim, axis, numbers.counts)
    # Where more is merged with the examples, nobody knows in which order.
    return Outputs(few, many, [made if each == 1 else Made(EACH)], numbers)


def _axis(leaf: jax.ShapeDtypeStruct, axis: int, size: int) -> int | None:
    """Along which axis an output has the examples; tokens may be merged with them."""
    fits = -leaf.ndim <= axis < leaf.ndim and leaf.shape[axis] % size == 0
    if fits and leaf.shape[axis]:
        return axis
    exactly = [i for i, length in enumerate(leaf.shape) if length == size]
    return exactly[0] if len(exactly) == 1 else None

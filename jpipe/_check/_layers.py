"""Each layer and the loss, run with all examples at once and in micro-batches.

Nothing is proven of what a layer computes: it computes, on the user's data, in both
ways, and the numbers are compared: what it returns, what it writes, and the gradient
of one random projection of what it returns. The next layer is given what this one made
of all examples at once, so that the first difference hides no second one.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from .._functions._objective import Objective, as_weight
from .._layers import _batchnorm, _half, _rng, _skip
from .._layers._parent import Entries
from .._layers._sequence import Sequential
from . import _compare
from ._compare import Difference
from ._function import (
    Function,
    Given,
    Result,
    first_line,
    host,
    noise,
    split,
)
from ._report import Checked

PyTree = Any
# So much of the largest gradient of a layer counts at least: some are zero but for
# rounding.
_OF_LAYER = 1e-2
_WEIGHTED = (
    "Where it is a quotient of two sums over examples return both, (total, weight), "
    "with reduction='weighted'; else take num_microbatches=1"
)


class _At(NamedTuple):
    """What a layer is given: its input, and what was stashed and not popped yet."""

    x: PyTree
    skips: dict[_skip.Key, PyTree]


class _Traced(NamedTuple):
    """A layer as a function, and the keys of what may be popped after it."""

    function: Function
    skips: list[_skip.Key]


class Checking:
    """Goes through the layers of a model, and then to the loss.

    Args:
      x: the input of a mini-batch.
      x_axes: where the examples are in each of its leaves.
      sizes: how many of them each micro-batch has.
      rngs: the keys of a step, or ``None``.
      train: whether this is training.
      tolerance: how far numbers may be apart, relative to those beside them; ``None``:
        as far as rounding explains.
    """

    def __init__(
        self,
        x: PyTree,
        x_axes: Sequence[int | None],
        sizes: tuple[int, ...],
        rngs: _rng.Rngs = None,
        train: bool = True,
        tolerance: float | None = None,
    ) -> None:
        self._sizes, self._train, self._tolerance = sizes, train, tolerance
        self._keys = _half.like(rngs)
        # All examples, then each micro-batch.
        self._at = [_At(one, {}) for one in split(x, x_axes, sizes)]
        # Equal layers on equal shapes are compiled once.
        self._known: dict[Any, Function] = {}
        # Why no later layer can be compared; empty if they can.
        self._stopped = ""

    def layer(self, number: int, layers: Sequential, entries: Entries) -> Checked:
        """What is found of the next layer.

        Args:
          number: that of the layer.
          layers: it, behind those whose variables it reads.
          entries: the variables of these.
        """
        name = f"layer {number} ({layers.layers[-1].name})"
        if self._stopped:
            return Checked(name, notes=(self._stopped,))
        entries = jax.tree.map(host, entries)
        # Those of Flax normalize each micro-batch by itself, which is known: here they
        # return what they are given.
        normed = self._train and any("batch_stats" in entry for entry in entries)
        given = [_given(entries, at, self._keys) for at in self._at]
        stopped = f"not compared, since {name} was not"
        try:
            traced = self._trace(layers, given, normed)
        except Exception as error:
            # What is wrong with any batch, such as a missing key, is no difference.
            if not any(self._can_trace(layers, [one], normed) for one in given):
                raise
            self._stopped = stopped
            return Checked(name, notes=(f"not compared: {first_line(error)}",))
        function, notes = traced.function, []
        if reason := _compare.why_not(function.made[0], function.made[1:]):
            self._stopped = stopped
            compared, differences = ["outputs"], [Difference("outputs", reason=reason)]
        else:
            compared, differences, results = self._differences(function, given)
            whole, *parts = results
            if normed:
                plain = self._trace(layers, given[:1], apart=False)
                (whole,) = plain.function(given[:1])
                if _compare.compare("", whole.made, [results[0].made], [1], 0.0):
                    notes.append("batch norms normalize each micro-batch by itself")
            self._go_on(traced, whole, parts)
        if function.reads(len(jax.tree.leaves(self._keys))):
            notes.append("compared without dropout and other random numbers")
        if function.error:
            notes.append(f"without gradients: {function.error}")
        return Checked(
            name,
            tuple(differences),
            tuple(compared),
            tuple(notes),
            f"Where all examples should count take num_microbatches=1; where those of "
            f"each micro-batch should, say so: report.raise_if_different("
            f"accept=[{number}])",
        )

    def _can_trace(self, *what: Any) -> bool:
        """Whether a layer can be traced on some examples: see `_trace`."""
        try:
            self._trace(*what)
        except Exception:
            return False
        return True

    def _trace(self, layers: Sequential, given: list[Given], apart: bool) -> _Traced:
        before, names = [*self._at[0].skips], []

        def applied(free: PyTree, fixed: PyTree) -> Any:
            (params, x, skips), (state, keys) = free, fixed
            after = dict(zip(before, skips, strict=True))
            with (
                jax.default_matmul_precision("highest"),
                _batchnorm.merging(True),
                _batchnorm.recording(),
                _batchnorm.apart() if apart else nullcontext(),
            ):
                entries = [{**a, **b} for a, b in zip(params, state, strict=True)]
                y, changed = layers.last(entries, x, keys, self._train, after)
            names[:] = after
            (state,) = changed if len(changed) == 1 else [dict(enumerate(changed))]
            return (y, [*after.values()]), state

        function = Function(applied, given)
        known = self._known.setdefault(function.form, function)
        return _Traced(known, names)

    def _differences(
        self, function: Function, given: list[Given]
    ) -> tuple[list[str], list[Difference], list[Result]]:
        """What was compared of a layer, what differs, and its results."""
        cotangents = noise(function.made)
        has_any = any(np.any(leaf) for leaf in cotangents[0])
        results = function(given, cotangents if has_any else None)
        found = {
            "outputs": ([one.made for one in results], _compare.mean_or_sum, 0.0),
            "state": (
                [_compare.named(one.aux) for one in results],
                _compare.mean_or_last,
                0.0,
            ),
        }
        if results[0].gradient is not None:
            least = _OF_LAYER * _compare.size(results[0].gradient[0])
            for at, what in enumerate(("parameters", "input", "what it pops")):
                gradients = [one.gradient[at] for one in results]
                least = least if at == 0 else 0.0
                found[f"gradients by {what}"] = gradients, _compare.total, least
        limit = function.limit if self._tolerance is None else self._tolerance
        compared, differences = {}, []
        for what, ((whole, *parts), *how) in found.items():
            if jax.tree.leaves(whole):
                compared[what.split()[0]] = True
                differences.append(
                    _compare.compare(what, whole, parts, self._sizes, limit, *how)
                )
        return [*compared], [*filter(None, differences)], results

    def _go_on(self, traced: _Traced, whole: Result, parts: Sequence[Result]) -> None:
        """Gives the next layer what this one made of all examples at once.

        What is of no example is the micro-batch's own, such as its mean.
        """
        pieces = _compare.cut(whole.made, [part.made for part in parts])
        self._at = [
            _At(y, dict(zip(traced.skips, skips, strict=True)))
            for y, skips in [whole.made, *pieces]
        ]

    def loss(
        self, objective: Objective, targets: PyTree, axes: Sequence[int | None]
    ) -> Checked:
        """What is found of the loss of what the last layer returned."""
        name = f"loss_fn with reduction={objective.reduction!r}"
        if objective.reduction == "microbatch_mean":
            return Checked(name, notes=("not compared: each micro-batch by itself",))
        if self._stopped:
            return Checked(name, notes=(self._stopped,))
        y, *ys = [at.x for at in self._at]

        def loss(outputs: PyTree, fixed: PyTree) -> Any:
            # Each as if it were all, so that any reduction can be tried.
            with jax.default_matmul_precision("highest"):
                value, _ = objective.of_part(outputs, fixed)
            if objective.reduction != "weighted":
                return [value], []
            total, weight = value
            return [total], [as_weight(weight, total)]

        def given(step: int) -> list[Given]:
            """All examples, and the micro-batches in one order or the other."""
            outputs = [y, *_compare.cut(y, ys[::step])]
            shares = split(targets, axes, self._sizes[::step])
            return [*zip(outputs, shares, strict=True)]

        try:
            function = Function(loss, given(1))
        except Exception as error:
            Function(loss, given(1)[1:2])  # raises what is wrong with any batch
            return Checked(name, notes=(f"not compared: {first_line(error)}",))
        ones = [[np.ones((), made[0].dtype)] for made in function.made]
        # The examples of one micro-batch may count by chance as all do: others do not.
        runs = [(self._sizes[::step], function(given(step), ones)) for step in (1, -1)]
        limit = function.limit if self._tolerance is None else self._tolerance
        differences = _loss_differences(objective.reduction, runs, limit)
        other = {"mean": "sum", "sum": "mean"}.get(objective.reduction)
        advice = _WEIGHTED
        if differences and other and not _loss_differences(other, runs, limit):
            advice = f"Type reduction={other!r}, which fits"
        notes = [f"{_terms(runs[0][1][:1], [1])[0][0]:.6g}"]
        notes += [f"without its gradient: {function.error}"] if function.error else []
        compared = ("outputs", *(() if function.error else ("gradients",)))
        return Checked(name, differences, compared, tuple(notes), advice)


def _loss_differences(
    reduction: str, runs: Sequence[Any], limit: float
) -> tuple[Difference, ...]:
    """Where a loss or its gradient is another in the first micro-batches that tell."""
    for sizes, (at_once, *parts) in runs:
        shares = np.array(sizes) / (sum(sizes) if reduction == "mean" else sizes)
        (whole,), (gradient,) = _terms([at_once], [1])
        values, gradients = _terms(parts, shares)
        found = (
            _compare.compare("outputs", whole, values, sizes, limit),
            _compare.compare("gradients", gradient, gradients, sizes, limit),
        )
        if any(found):
            return tuple(filter(None, found))
    return ()


def _terms(results: Sequence[Result], shares: Any) -> tuple[list[Any], list[PyTree]]:
    """What micro-batches add to the loss, and to its gradient."""
    weights = [np.float64(one.aux[0]) for one in results if one.aux]
    with np.errstate(all="ignore"):
        shares = np.asarray(shares) / (sum(weights) if weights else 1)

    def times(share: float, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _compare.numbers(leaf) * share, tree)

    values = [one.made[0] for one in results]
    gradients = [one.gradient for one in results]
    return [*map(times, shares, values)], [*map(times, shares, gradients)]


def _given(entries: Entries, at: _At, keys: PyTree) -> Given:
    params = [{n: value for n, value in x.items() if n == "params"} for x in entries]
    state = [{n: value for n, value in x.items() if n != "params"} for x in entries]
    return (params, at.x, list(at.skips.values())), (state, keys)

"""Each layer and the loss, run with all examples at once and in micro-batches.

Nothing is proven of what a layer computes: it computes, on the user's data, in both
ways, and the numbers are compared: what it returns, what it writes, and the gradient
of one random projection of what it returns. The next layer is given what this one made
of all examples at once, so that the first difference hides no second one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._functions._objective import Objective
from .._layers import _batchnorm, _half, _rng, _skip
from .._layers._alike import behaviour
from .._layers._layer import Layer
from .._layers._stage import StageFunction
from . import _compare
from ._compare import Difference
from ._function import (
    Function,
    Given,
    Result,
    first_line,
    floating,
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
    """A layer as a function, and the keys of what it stashes and pops."""

    function: Function
    stashed: list[_skip.Key]
    popped: list[_skip.Key]


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
        self._keys, self._own_keys = _half.like(rngs), _rng.layer_rngs(rngs, 0, 0)
        # All examples, then each micro-batch.
        self._at = [_At(one, {}) for one in split(x, x_axes, sizes)]
        # Equal layers on equal shapes are traced and compiled once.
        self._known: dict[Any, _Traced] = {}

    def layer(self, number: int, layer: Layer, variables: PyTree) -> Checked:
        """What is found of the next layer."""
        stage = StageFunction(number, number, (layer,))
        name, entry = f"layer {number} ({layer.name})", jax.tree.map(host, variables)
        # Those of Flax normalize each micro-batch by itself, which is known: here they
        # return what they are given.
        normed = self._train and "batch_stats" in entry
        given = [_given(entry, at, self._keys) for at in self._at]
        try:
            traced = self._trace(stage, given, "apart" if normed else "compared")
        except Exception as error:
            given = [_given(entry, self._at[0], self._own_keys)]
            traced = self._trace(stage, given, "alone")
            self._go_on(traced, traced.function(given, None)[0])
            return Checked(name, notes=(f"not compared: {first_line(error)}",))
        function, notes = traced.function, []
        compared, differences, results = self._differences(function, given)
        if function.reads(len(jax.tree.leaves(self._keys))):
            notes.append("compared without dropout and other random numbers")
        if function.error:
            notes.append(f"without gradients: {function.error}")
        whole, *parts = results
        if normed:
            plain = self._trace(stage, given[:1], "compared")
            (whole,) = plain.function(given[:1], None)
            if _compare.compare("", whole.made, [results[0].made], [1], 0.0):
                notes.append("batch norms normalize each micro-batch by itself")
        self._go_on(traced, whole, [] if differences else parts)
        return Checked(
            name,
            tuple(differences),
            tuple(compared),
            tuple(notes),
            f"Where all examples should count take num_microbatches=1; where those of "
            f"each micro-batch should, say so: report.raise_if_different("
            f"accept=[{number}])",
        )

    def _trace(self, stage: StageFunction, given: list[Given], mode: str) -> _Traced:
        names, stashed, popped = [*self._at[0].skips], [], []

        def applied(free: PyTree, fixed: PyTree) -> Any:
            (params, x, skips), (state, keys) = free, fixed
            before = dict(zip(names, skips, strict=True))
            after = dict(before)
            with _scope(mode):
                entry = {**params, **state}
                y, (changed,) = stage((entry,), x, keys, None, self._train, after)
            stashed[:] = [key for key in after if after[key] is not before.get(key, ())]
            popped[:] = [key for key in before if key not in after or key in stashed]
            return (y, [after[key] for key in stashed]), changed

        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tuple(given))
        leaves, structure = jax.tree.flatten(shapes)
        key = behaviour(stage.layers[0]), mode, tuple(names), tuple(leaves), structure
        if key not in self._known:
            self._known[key] = _Traced(Function(applied, given), stashed, popped)
        return self._known[key]

    def _differences(
        self, function: Function, given: list[Given]
    ) -> tuple[list[str], list[Difference], list[Result]]:
        """What was compared of a layer, what differs, and its results."""
        specs = function.made
        if reason := _compare.why_not(specs[0], specs[1:]):
            found = Difference("outputs", reason=reason)
            return ["outputs"], [found], function(given[:1], None)
        cotangents = noise(specs)
        has_any = any(np.any(leaf) for leaf in cotangents[0])
        results = function(given, cotangents if has_any else None)
        rows = [("outputs", [one.made for one in results], 0.0)]
        rows += [("state", [_compare.named(one.aux) for one in results], 0.0)]
        if results[0].gradient is not None:
            least = _OF_LAYER * _compare.size(results[0].gradient[0])
            for place, what in enumerate(("parameters", "input", "what it pops")):
                found = [one.gradient[place] for one in results]
                least = least if place == 0 else 0.0
                rows.append((f"gradients by {what}", found, least))
        rows = [row for row in rows if jax.tree.leaves(row[1][0])]
        limit = function.limit if self._tolerance is None else self._tolerance
        differences = [
            _compare.compare(what, whole, parts, self._sizes, limit, least)
            for what, (whole, *parts), least in rows
        ]
        compared = [*dict.fromkeys(what.split()[0] for what, _, _ in rows)]
        return compared, [one for one in differences if one is not None], results

    def _go_on(
        self, traced: _Traced, whole: Result, parts: Sequence[Result] = ()
    ) -> None:
        """Gives the next layer what this one made of all examples at once."""
        specs = traced.function.made[1:]
        if not specs or _compare.why_not(whole.made, specs):
            specs = [_likely(whole.made, sum(self._sizes), n) for n in self._sizes]
        # What is of no example is the micro-batch's own, such as its mean.
        own = [part.made for part in parts] or specs
        pieces = [whole.made, *_compare.cut(whole.made, own)]
        for place, (y, stashed) in enumerate(pieces):
            skips = self._at[place].skips.items()
            kept = {key: value for key, value in skips if key not in traced.popped}
            new = dict(zip(traced.stashed, stashed, strict=True))
            self._at[place] = _At(y, {**kept, **new})

    def loss(
        self, objective: Objective, targets: PyTree, axes: Sequence[int | None]
    ) -> Checked:
        """What is found of the loss of what the last layer returned."""
        name = f"loss_fn with reduction={objective.reduction!r}"
        if objective.reduction == "microbatch_mean":
            return Checked(name, notes=("not compared: each micro-batch by itself",))
        dtype, total = jnp.result_type(float), sum(self._sizes)
        y, *ys = [at.x for at in self._at]

        def loss(outputs: PyTree, fixed: PyTree) -> Any:
            with jax.default_matmul_precision("highest"):
                value, weights, _ = objective(outputs, *fixed)
            return [value], weights

        def given(order: Sequence[int]) -> list[Given]:
            """All examples, and micro-batches of the sizes of these numbers."""
            sizes = [self._sizes[i] for i in order]
            outputs = [y, *_compare.cut(y, [ys[i] for i in order])]
            # Each as if it were all, so that any reduction can be tried.
            cut = [(one, np.ones((), dtype)) for one in split(targets, axes, sizes)]
            return [*map(Given, outputs, cut)]

        order = range(len(self._sizes))
        try:
            function = Function(loss, given(order))
        except Exception as error:
            Function(loss, given(order)[1:2])  # raises what is wrong with any batch
            return Checked(name, notes=(f"not compared: {first_line(error)}",))
        # The examples of one micro-batch may count by chance as all do: others do not.
        orders: list[Sequence[int]] = [order, order[::-1]]
        if total % self._sizes[0] == 0:
            orders.append([0] * (total // self._sizes[0]))
        runs = []
        for order in orders:
            like, sizes = [0, *(1 + i for i in order)], [self._sizes[i] for i in order]
            ones = [[np.ones((), function.made[i][0].dtype)] for i in like]
            runs.append((sizes, function(given(order), ones, like)))
        limit = function.limit if self._tolerance is None else self._tolerance
        differences = _loss_differences(objective.reduction, y, runs, limit)
        other = {"mean": "sum", "sum": "mean"}.get(objective.reduction)
        advice = _WEIGHTED
        if differences and other and not _loss_differences(other, y, runs, limit):
            advice = f"Type reduction={other!r}, which fits"
        notes = [f"{_combined(runs[0][1][:1], [1])[0]:.6g}"]
        notes += [f"without its gradient: {function.error}"] if function.error else []
        compared = ("outputs", *(() if function.error else ("gradients",)))
        return Checked(name, differences, compared, tuple(notes), advice)


def _loss_differences(
    reduction: str, y: PyTree, runs: Sequence[Any], limit: float
) -> tuple[Difference, ...]:
    """Where a loss or its gradient is another in the first micro-batches that tell."""
    for sizes, (at_once, *parts) in runs:
        all_of_them = sum(sizes) if reduction == "mean" else sizes
        shares = np.array(sizes) / all_of_them
        whole, gradient = _combined([at_once], [1])
        value, gradients = _combined(parts, shares)
        # What is added up tells how the sum may be rounded.
        terms = zip(floating(y), jax.tree.leaves(gradient), strict=False)
        least = sum(float(np.sum(np.abs(one * by))) for one, by in terms)
        found = (
            _compare.compare("outputs", whole, [value], [1], limit, least),
            _compare.compare("gradients", gradient[0], gradients, sizes, limit),
        )
        if any(found):
            return tuple(filter(None, found))
    return ()


def _combined(results: Sequence[Result], shares: Any) -> tuple[Any, list[PyTree]]:
    """The loss of some micro-batches, and what each adds to its gradient."""
    weights = [np.float64(one.aux[0]) for one in results if one.aux]
    with np.errstate(all="ignore"):
        shares = np.asarray(shares) / (sum(weights) if weights else 1)

    def times(share: float, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _compare.numbers(leaf) * share, tree)

    values = [
        times(share, one.made[0]) for share, one in zip(shares, results, strict=True)
    ]
    return sum(values), [*map(times, shares, (one.gradient for one in results))]


def _scope(mode: str) -> ExitStack:
    """Where a layer is traced: as on one device alone, or to be compared."""
    scope = ExitStack()
    if mode != "alone":
        scope.enter_context(jax.default_matmul_precision("highest"))
        scope.enter_context(_batchnorm.merging(True))
        scope.enter_context(_batchnorm.recording())
    if mode == "apart":
        scope.enter_context(_batchnorm.apart())
    return scope


def _given(entry: PyTree, at: _At, keys: PyTree) -> Given:
    params = {name: value for name, value in entry.items() if name == "params"}
    state = {name: value for name, value in entry.items() if name != "params"}
    return Given((params, at.x, list(at.skips.values())), (state, keys))


def _likely(whole: PyTree, total: int, size: int) -> PyTree:
    """Specs of a micro-batch, where it is not known: cut where there are as many."""

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        if total in shape:
            shape[shape.index(total)] = size
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.map(spec, whole)

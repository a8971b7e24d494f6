"""Each layer and the loss, run with all examples at once and in micro-batches.

Nothing is proven of what a layer computes: it computes, on the user's data, in both
ways, and the numbers are compared: what it returns, what it writes, and the gradient
of one random projection of what it returns. The next layer is given what this one made
of all examples at once, so that the first difference hides no second one.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from .._functions._objective import Objective
from .._jaxprs._jaxpr import is_inexact
from .._layers import _batchnorm, _half, _rng, _skip
from .._layers._parent import Entries
from .._layers._sequence import Sequential
from . import _loss
from ._compare import (
    Difference,
    Unlike,
    axis_of,
    compare,
    floating,
    joined,
    named,
    size,
)
from ._function import (
    Function,
    Result,
    first_line,
    host,
    in_parts,
    with_own,
)
from ._report import CheckResult

PyTree = Any
# So much of the largest gradient of a layer counts at least: some are zero but for
# rounding.
_OF_LAYER = 1e-2
# Of specs of outputs, what each leaf without examples may be: see `compare`.
Reductions = Callable[[PyTree], list[Sequence[str]]]


class Checking:
    """Goes through the layers of a model, and then to the loss.

    Args:
      x: the input of a mini-batch.
      axes: where the examples are in each of its leaves.
      sizes: how many of them each micro-batch has.
      rngs: the keys of a step, or ``None``.
      train: whether this is training.
      tolerance: how far numbers may be apart, relative to those beside them; ``None``:
        as far as rounding explains.
    """

    def __init__(
        self,
        x: PyTree,
        axes: Sequence[int | None],
        sizes: tuple[int, ...],
        rngs: _rng.Rngs = None,
        train: bool = True,
        tolerance: float | None = None,
    ) -> None:
        # What the last layer returned for all examples, and where these are in it.
        self._x, self._axes = jax.tree.map(host, x), axes
        # Why no later layer can be compared; empty if they can.
        self._stopped = ""
        self._sizes, self._train, self._tolerance = sizes, train, tolerance
        self._keys = _half.like(rngs)
        # What of this each micro-batch has by itself: see `with_own`.
        self._own: list[Any] = [None] * len(axes)
        # What was stashed and not popped yet.
        self._skips: dict[_skip.Key, PyTree] = {}
        # Equal layers on equal shapes are compiled once.
        self._known: dict[Any, Function] = {}

    def layer(
        self,
        number: int,
        layers: Sequential,
        entries: Entries,
        reductions: Reductions | None = None,
    ) -> CheckResult:
        """What is found of the next layer.

        Args:
          number: that of the layer.
          layers: it, behind those whose variables it reads.
          entries: the variables of these.
          reductions: of the last layer, what `Pipeline.apply` makes of its outputs;
            default: what has no examples may be a mean or a sum, as a loss takes it.
        """
        name = f"layer {number} ({layers.layers[-1].name})"
        if self._stopped:
            return CheckResult(name, notes=(self._stopped,))
        entries = jax.tree.map(host, entries)
        free = _of(entries, True), (self._x, [*self._skips.values()])
        fixed = self._own, _of(entries, False), self._keys
        # Those of Flax normalize each micro-batch by itself, which is known: here they
        # return what they are given.
        normed = self._train and any("batch_stats" in entry for entry in entries)
        names: list[_skip.Key] = []
        apply = functools.partial(self._apply, layers, names)
        specs = jax.eval_shape(apply, free, fixed)
        advice = (
            f"where all examples should count take num_microbatches=1; where those of "
            f"each micro-batch should, say so: report.raise_if_different("
            f"accept=[{number}])"
        )
        if reductions is not None:
            advice += (
                "; out_axes= says what apply makes of outputs: an axis, jpipe.MEAN or "
                "jpipe.SUM"
            )
        try:
            function, axes = self._function(apply, normed, specs, free, fixed)
        except Exception as error:
            self._stopped = f"not compared, since {name} was not"
            if isinstance(error, Unlike):
                return CheckResult(name, error.args, ("outputs",), advice=advice)
            return CheckResult(name, notes=(f"not compared: {first_line(error)}",))
        random = np.random.default_rng(0)
        cotangents = [
            random.normal(size=leaf.shape).astype(leaf.dtype)
            for leaf in function.projected
        ]
        whole, parts = function(free, fixed, cotangents)
        of_leaves: list[Sequence[str]] = [("mean", "sum")] * len(axes)
        if reductions is not None:
            of_outputs = reductions(specs[0][0])
            of_leaves[: len(of_outputs)] = of_outputs
        compared, differences = self._compared(
            function, axes, whole, parts, reductions=of_leaves
        )
        (apart, _), made = whole.results
        notes = []
        if compare("", made, apart, axes, self._sizes, 0.0):
            notes.append("batch norms normalize each micro-batch by itself")
        if function.reads(len(jax.tree.leaves(self._keys))):
            notes.append("compared without dropout and other random numbers")
        if function.error:
            notes.append(f"without gradients: {function.error}")
        self._x, skips = made
        self._axes, self._skips = axes, dict(zip(names, skips, strict=True))
        pairs = zip(jax.tree.leaves(parts.results[0]), axes, strict=True)
        self._own = [leaf if axis is None else None for leaf, axis in pairs]
        return CheckResult(name, differences, compared, tuple(notes), advice)

    def _apply(
        self,
        layers: Sequential,
        names: list[_skip.Key],
        free: PyTree,
        fixed: PyTree,
        apart: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """What the last of some layers returns and stashes, and what it writes.

        Args:
          layers: the layers.
          names: becomes the keys of what may be popped after it.
          free: parameters; its input, and what it may pop.
          fixed: the other variables, and keys, behind what only parts read.
          apart: whether batch norms of Flax return their input.
        """
        (params, (x, skips)), (_, state, keys) = free, fixed
        after = dict(zip(self._skips, skips, strict=True))
        with (
            jax.default_matmul_precision("highest"),
            _batchnorm.merging(True),
            _batchnorm.recording(),
            _batchnorm.apart() if apart else nullcontext(),
        ):
            entries = [{**a, **b} for a, b in zip(params, state, strict=True)]
            y, changed = layers.last(entries, x, keys, self._train, after)
        names[:] = after
        return (y, [*after.values()]), [*map(named, changed)]

    def _function(
        self,
        apply: Callable[..., Any],
        normed: bool,
        specs: tuple[PyTree, PyTree],
        free: PyTree,
        fixed: PyTree,
    ) -> tuple[Function, list[int | None]]:
        """A layer as a function, and where the examples are in what it returns.

        Raises:
          Unlike: if it returns something else in micro-batches.
        """
        applied = functools.partial(apply, apart=normed)
        axes = [*_none(free[0]), *self._axes]
        cut = in_parts(lambda *free: free, axes, self._sizes)

        def each_part(free: PyTree, fixed: PyTree) -> list[PyTree]:
            return [
                applied((params, with_own(given, fixed[0], i)), fixed)
                for i, (params, given) in enumerate(cut(*free))
            ]

        outputs, _ = zip(*jax.eval_shape(each_part, free, fixed), strict=True)
        jax.eval_shape(lambda made: joined("outputs", specs[0], made), outputs)
        leaves = zip(*map(jax.tree.leaves, (specs[0], outputs[0])), strict=True)
        out_axes = [axis_of(*pair) for pair in leaves]

        def projected(made: PyTree) -> list[jax.Array]:
            # What is of no example may be a mean or a sum.
            pairs = zip(jax.tree.leaves(made), out_axes, strict=True)
            return [x for x, axis in pairs if axis is not None and is_inexact(x)]

        def at_once(free: PyTree, fixed: PyTree) -> Any:
            results = applied(free, fixed)
            made, _ = apply(free, fixed) if normed else results
            return projected(results[0]), (results, made)

        def divided(free: PyTree, fixed: PyTree) -> Any:
            made, states = zip(*each_part(free, fixed), strict=True)
            made = joined("outputs", specs[0], made)
            return projected(made), (made, joined("state", specs[1], states))

        function = Function(at_once, divided, free, fixed)
        return self._known.setdefault(function.form, function), out_axes

    def _compared(
        self,
        function: Function,
        axes: Sequence[int | None],
        whole: Result,
        parts: Result,
        reductions: Sequence[Sequence[str]],
    ) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
        """What was compared of a layer, and what differs."""
        (results, _), divided = whole.results, parts.results
        found = [
            ("outputs", results[0], divided[0], axes, 0.0),
            ("state", results[1], divided[1], _none(results[1]), 0.0),
        ]
        if whole.gradient is not None:
            params, given = zip(whole.gradient, parts.gradient, strict=True)
            least = _OF_LAYER * size(params[0])
            given_axes = floating((self._x, [*self._skips.values()]), self._axes)
            found += [
                ("gradients by parameters", *params, _none(params[0]), least),
                ("gradients by input", *given, given_axes, 0.0),
            ]
        limit = function.limit if self._tolerance is None else self._tolerance
        compared = [what.split()[0] for what, one, *_ in found if jax.tree.leaves(one)]
        differences = [
            compare(
                what,
                whole=one,
                parts=other,
                axes=at,
                sizes=self._sizes,
                limit=limit,
                least=least,
                reductions=reductions if what == "outputs" else None,
            )
            for what, one, other, at, least in found
        ]
        return tuple(dict.fromkeys(compared)), tuple(filter(None, differences))

    def loss(
        self, objective: Objective, targets: PyTree, target_axes: Sequence[int | None]
    ) -> CheckResult:
        """What is found of the loss of what the last layer returned."""
        if self._stopped:
            name = f"loss_fn with reduction={objective.reduction!r}"
            return CheckResult(name, notes=(self._stopped,))
        axes = self._axes, target_axes
        return _loss.check(
            *(objective, self._x, targets, axes, self._sizes, self._tolerance),
            self._own,
        )


def _of(entries: Entries, trained: bool) -> list[PyTree]:
    """Of each entry the parameters, or its other variables."""
    return [
        {name: x for name, x in entry.items() if (name == "params") == trained}
        for entry in entries
    ]


def _none(tree: PyTree) -> list[None]:
    """The axes of what has no examples."""
    return [None] * len(jax.tree.leaves(tree))

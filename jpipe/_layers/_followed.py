"""Layers followed on abstract values: how what each gives is made of the examples."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jaxprs import _jaxpr
from .._mixing._made import (
    ADDS,
    EACH,
    OTHER,
    SAME,
    SHIFTS,
    UNCLEAR,
    UNKNOWN,
    UNSURE,
    WHOLE,
    Made,
    by_shapes,
    placed,
    taken_in,
)
from .._mixing._pairs import Differs, Numbers
from .._mixing._results import reported, results
from . import _alike, _batchnorm, _rng, _skip
from ._streams import applied, retried
from ._tree import flat, nested
from ._tried import tried
from ._walk import Visit

PyTree = Any
Path = tuple[Any, ...]
Skips = dict[_skip.Key, PyTree]
# So many times as many examples can be taken in the same groups, and in halves.
_GROWTH = 3
# Two micro-batches, so that what one is of its own is not all; and where each is one
# example, more, as all axes of length one would be alike.
_FEW = 4


def two(sizes: Sequence[int]) -> Numbers:
    """Two numbers of examples, by those of the micro-batches."""
    return Numbers(_GROWTH, max(2 * sizes[0], _FEW), math.gcd(*sizes))


def whole(sizes: Sequence[int], shards: int = 1) -> Numbers | None:
    """The examples of a micro-batch, and of the mini-batch; ``None`` if that is uneven.

    For what takes no other number: what it holds may be as long as the mini-batch.
    """
    count, size = len(sizes) * shards, sizes[0]
    return Numbers(count, size, size) if count > 1 and {*sizes} == {size} else None


class Outcome(NamedTuple):
    """What a layer does with examples.

    Attributes:
      written: how each leaf is made that it writes, by its path.
      mixes: what makes more of them than of each by itself; empty if nothing does.
      followed: whether that is known: not of what is another with more examples.
      moved: whether the model returns examples in the places of others.
    """

    written: dict[Path, Made]
    mixes: str
    followed: bool = True
    moved: bool = False


class Outputs(NamedTuple):
    """What the last layer returns.

    Attributes:
      few: specs, with some number of examples.
      many: with more of them.
      made: how each leaf is made of them.
      numbers: of the examples.
      moved: whether examples are in the places of others.
    """

    few: PyTree
    many: PyTree
    made: list[Made]
    numbers: Numbers
    moved: bool = False


@dataclass(frozen=True)
class _Given:
    """What a layer is given, as specs: its input, and what it may pop."""

    x: PyTree
    skips: Skips

    @property
    def arrays(self) -> tuple[PyTree, list[PyTree]]:
        return self.x, [*self.skips.values()]


class _Traced(NamedTuple):
    closed: Any
    changed: PyTree
    after: _Given


class _Followed(NamedTuple):
    """A layer, traced with two numbers of examples.

    Attributes:
      traced: with each.
      made: how is made what it writes, returns and leaves.
      certain: whether that is known.
      tried: what it makes of random ones of several examples, where it is not.
    """

    traced: list[_Traced]
    made: list[Made]
    certain: bool
    tried: str


class Following:
    """Layers, followed as far as they are asked for.

    Args:
      visits: the layers, as they were met.
      sized: the input of the model with so many examples, as specs.
      axes: where the examples are in each leaf of it.
      train: whether the layers are trained.
      size: of how many examples each layer was met.
      numbers: those of the examples.

    Attributes:
      failed: how many layers so far do not take such numbers.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        sized: Callable[[int], PyTree],
        axes: Sequence[int | None],
        train: bool,
        size: int,
        numbers: Numbers,
    ) -> None:
        self.failed = 0
        self._visits = visits
        self._size = size
        self._numbers = numbers
        self._train = train
        self._given = [_Given(sized(count), {}) for count in numbers.counts]
        leaves = jax.tree.leaves(self._given[0].x)
        self._made = [
            taken_in(leaf.ndim, axis, numbers.counts)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        self._outcomes: list[Outcome] = []
        # Equal layers on equal inputs are followed once.
        self._known: dict[Hashable, _Followed] = {}

    def layer(self, number: int) -> Outcome:
        """What a layer does with examples."""
        while len(self._outcomes) <= number:
            self._outcomes.append(self._next())
        return self._outcomes[number]

    @property
    def outcomes(self) -> list[Outcome]:
        """What all layers do."""
        return [self.layer(number) for number in range(len(self._visits))]

    @property
    def outputs(self) -> Outputs:
        """What the last layer returns, which is followed itself."""
        few, many = self._given[0].x, self._given[-1].x
        moved = self._outcomes[-1].moved
        return Outputs(few, many, self._made, self._numbers, moved)

    def _next(self) -> Outcome:
        number = len(self._outcomes)
        try:
            followed = self._followed(self._visits[number])
        except Exception:  # whatever a layer does that takes no such number
            self.failed += 1
            self._begin_anew(self._visits[number + 1 :])
            return Outcome({}, "", followed=False)
        traced, found, certain, mixes = followed
        one, twin = traced[0], traced[-1]
        paths = jax.tree_util.tree_leaves_with_path(one.changed)
        written = {
            tuple(path): made._replace(drawn=made.drawn and _is_inexact(leaf))
            for (path, leaf), made in zip(paths, found, strict=False)
        }
        leaves = (jax.tree.leaves(each.after.arrays) for each in (one, twin))
        is_last = number + 1 == len(self._visits)
        self._given = [each.after for each in traced]
        self._made, amiss, moved = [], "", False
        for made, few, many in zip(found[len(paths) :], *leaves, strict=True):
            shapes = few.shape, many.shape
            along = self._numbers.along(*shapes)
            passed, why = _passed(made, any(along))
            moved |= is_last and self._is_moved(passed, along, shapes)
            self._made.append(placed(passed, few, many, self._numbers))
            amiss = amiss or why
        return Outcome(written, amiss or mixes, certain, moved)

    def _begin_anew(self, visits: Sequence[Visit]) -> None:
        """Takes as the input of the next layer what it was met with, of more examples.

        Args:
          visits: those of that layer, and of all after it.
        """
        for visit in visits[:1]:
            given = [
                _Given(*jax.tree.map(self._of(count), (visit.x, visit.skips)))
                for count in self._numbers.counts
            ]
            few, many = (jax.tree.leaves(each.arrays) for each in (given[0], given[-1]))
            self._given = given
            self._made = by_shapes(few, many, self._numbers, Made(UNKNOWN))

    def _of(self, count: int) -> Callable[[Any], Any]:
        """What gives a value of as many examples, by the shape it was met with."""

        def sized(leaf: Any) -> Any:
            exact = [i for i, n in enumerate(leaf.shape) if n == self._size]
            axis = exact[0] if len(exact) == 1 else 0
            shape = list(leaf.shape)
            if shape and shape[axis] % self._size == 0:
                shape[axis] = shape[axis] // self._size * count
            weak = leaf.weak_type
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=weak)

        return sized

    def _is_moved(
        self, made: Made, along: Sequence[bool], shapes: Sequence[Sequence[int]]
    ) -> bool:
        """Whether what a model returns has examples in the places of others."""
        if made.orders is None or not made.orders.are_known or sum(along) != 1:
            return False
        axis = along.index(True)
        lengths = [shape[axis] for shape in shapes]
        return not made.orders.are_in_place(axis, lengths, self._numbers.counts)

    def _followed(self, visit: Visit) -> _Followed:
        """A layer as traced, and how is made what it writes, returns and leaves."""
        arrays = [given.arrays for given in self._given]
        leaves, tree = jax.tree.flatten([arrays, visit.variables, visit.borrowed])
        skips, made = tuple(self._given[0].skips), tuple(self._made)
        key = _alike.behaviour(visit.layer), skips, tree, tuple(leaves), made
        if key not in self._known:
            traced = [self._traced(visit, given) for given in self._given]
            with reported():
                self._known[key] = self._looked_at(traced, made)
        return self._known[key]

    def _looked_at(self, traced: list[_Traced], made: Sequence[Made]) -> _Followed:
        one, other = traced[0].closed, traced[-1].closed
        held = [Made(SAME)] * (len(one.jaxpr.invars) - len(made) - 1)
        args = one, other, [*made, *held, Made(SAME, drawn=True)]
        numbers, certain = self._numbers, True
        try:
            found = results(*args, numbers)
        except Differs:
            # So that the layers after it are followed.
            avals, certain = (one.out_avals, other.out_avals), False
            found = by_shapes(*avals, numbers, Made(UNKNOWN))
        came = tried(*args, found, certain, numbers, self._train)
        return _Followed(traced, found, certain, came)

    def _traced(self, visit: Visit, given: _Given) -> _Traced:
        names: list[_skip.Key] = []

        def call(arrays: PyTree, variables: PyTree, key: jax.Array) -> PyTree:
            x, skips = arrays
            left = dict(zip(given.skips, skips, strict=True))
            args = visit.layer, variables, x, key, (0, 0), self._train, left
            y, changed = applied(*args)
            names[:] = left
            return changed, y, [*left.values()]

        trace = jax.make_jaxpr(call, return_shape=True)
        variables = visit.variables
        if visit.borrowed:
            variables = nested(flat(variables) | flat(visit.borrowed))
        with _batchnorm.apart():
            closed, result = retried(
                lambda: trace(given.arrays, variables, _rng.key_spec())
            )
        specs = map(_jaxpr.spec, closed.out_avals)
        changed, y, left = jax.tree.unflatten(jax.tree.structure(result), specs)
        skips = dict(zip(names, left, strict=True))
        return _Traced(closed, changed, _Given(y, skips))


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _passed(made: Made, along: bool) -> tuple[Made, str]:
    """How the next layer finds what this one made, and why that is of several examples.

    What goes along the examples counts as one of each from then on: that of a
    micro-batch by itself is what is trained.
    """
    single = made.single or (along and made.kind != SAME)
    if along and made.kind == EACH and made.degree not in (0, None):
        return made._replace(single=single), "computes with the number of examples"
    why = made.why or ADDS
    unsure = made.kind in (UNSURE, UNKNOWN) and made.why
    mixed = made.kind == WHOLE or unsure or made.why in SHIFTS
    if not (made.kind == OTHER or (along and mixed)):
        why = ""
    if along and made.kind not in (SAME, EACH):
        made = Made(EACH)
    elif made.kind == EACH:
        made = made._replace(why="")
    elif made.kind == OTHER:
        known = made.degree != UNCLEAR
        made = Made(WHOLE if known else UNSURE, made.degree)
    # What was taken apart is measured of this layer, and of no other.
    return made._replace(single=single, pieced=False, factors=()), why

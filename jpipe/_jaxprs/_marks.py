"""Marks on values: set while a function is traced, and followed in its jaxpr.

What Python sees of a trace is not what is computed: a transformation may run a function
again, or not at all, as JAX has traced it before. The jaxpr tells.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from . import _jaxpr

# What gives the values that it is given, in another order, shape or dtype.
_MOVES = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "reshape",
    "squeeze",
)
# The mark on an input that was given none: whatever bears it is that input itself, or
# with the order of its axes behind it that input transposed.
_INPUT = "input "


class Marks(NamedTuple):
    """The marks that tell what a value is.

    Attributes:
      here: those on the value itself; several, where branches give one each.
      behind: those on values from which it is computed.
    """

    here: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        """The marks on all that the value depends on."""
        return self.here | self.behind

    @property
    def inputs(self) -> set[int]:
        """The numbers of the inputs on which the value may depend."""
        return {int(text.split()[1]) for text in self.all if text.startswith(_INPUT)}

    @property
    def input(self) -> int | None:
        """The number of the input that the value is, if it is one whatever happens."""
        text, *others = self.here or [""]
        alone = not others and not self.behind
        number = text.removeprefix(_INPUT)
        return int(number) if alone and number.isdecimal() else None

    def computed(self) -> "Marks":
        """Those on what is computed from the value."""
        return Marks(behind=self.all)

    def moved(self) -> "Marks":
        """Those on what holds the same values, elsewhere."""
        inputs = frozenset(text for text in self.here if text.startswith(_INPUT))
        return Marks(self.here - inputs, self.behind | inputs)

    def transposed(self, axes: Sequence[int]) -> "Marks":
        """Those on what holds the same values, with its axes in another order."""
        return Marks(frozenset(_reorder(text, axes) for text in self.here), self.behind)


_NONE = Marks()


def _reorder(text: str, axes: Sequence[int]) -> str:
    """The mark on an input, transposed once more; any other as it is."""
    if not text.startswith(_INPUT):
        return text
    number, *before = map(int, text.removeprefix(_INPUT).split())
    before = before or list(range(len(axes)))
    if len(before) != len(axes):  # it was transposed in a loop that goes along it
        return f"{_INPUT}{number} -1"
    order = [before[axis] for axis in axes]
    back = order == list(range(len(axes)))
    return " ".join([f"{_INPUT}{number}", *([] if back else map(str, order))])


def mark(x: jax.Array, text: str) -> jax.Array:
    """The same array, which is known again in a jaxpr."""
    return checkpoint_name(x, text)


def follow(closed: core.ClosedJaxpr, prefix: str) -> tuple[list[Marks], set[str]]:
    """Follows marks through a jaxpr, its calls, branches and loops.

    Args:
      closed: the jaxpr.
      prefix: how the texts of the marks begin; empty if only inputs are followed.

    Returns:
      The marks of each result; and those on values on which a value may depend that is
      marked itself.
    """
    remarked: set[str] = set()
    count = len(closed.jaxpr.invars)
    given = [Marks(frozenset([f"{_INPUT}{i}"])) for i in range(count)]
    return _follow(closed.jaxpr, given, prefix, remarked), remarked


def _follow(
    jaxpr: core.Jaxpr, given: Sequence[Marks], prefix: str, remarked: set[str]
) -> list[Marks]:
    marks: dict[core.Var, Marks] = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> Marks:
        return _NONE if isinstance(atom, core.Literal) else marks.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        text = eqn.params["name"] if eqn.primitive.name == "name" else ""
        if prefix and text.startswith(prefix):
            known = _any(operands).all
            remarked |= {mark for mark in known if mark.startswith(prefix)}
            results = [Marks(frozenset([text]), known)]
        else:
            results = _through(eqn, operands, prefix, remarked)
        marks.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(
    eqn: core.JaxprEqn, operands: list[Marks], prefix: str, remarked: set[str]
) -> list[Marks]:
    """The marks on the results of an equation."""
    inside = [closed.jaxpr for closed in _jaxpr.inside(eqn)]
    # The first operands say which branch it is, or are for the end of a loop.
    fewer = eqn.primitive.name in ("cond", "while")
    bodies = [
        jaxpr
        for jaxpr in inside
        if len(jaxpr.outvars) == len(eqn.outvars)
        and (fewer or len(jaxpr.invars) == len(operands))
    ]
    if not bodies:  # whatever it computes
        for jaxpr in inside:
            spread = [_any(operands)] * len(jaxpr.invars)
            operands = operands + _follow(jaxpr, spread, prefix, remarked)
        found = _any(operands)
        if eqn.primitive.name == "transpose":
            return [found.transposed(eqn.params["permutation"])]
        moves = eqn.primitive.name in _MOVES
        return [found.moved() if moves else found.computed()] * len(eqn.outvars)
    carry = _jaxpr.carry(eqn)
    while True:
        cases = []
        for jaxpr in bodies:
            first = len(operands) - len(jaxpr.invars)
            made = _follow(jaxpr, operands[first:], prefix, remarked)
            chosen = _any(operands[:first]).computed()
            cases.append([_any([chosen, marks]) for marks in made])
        ends = _ends(eqn, operands, prefix, remarked)
        results = [_joined([*case]) for case in zip(*cases, strict=True)]
        before = operands[carry]
        # A loop may not turn at all.
        after = [_joined(pair) for pair in zip(before, results, strict=False)]
        if before == after:
            return [_any([ends, marks]) for marks in (*after, *results[len(after) :])]
        operands[carry] = after


def _ends(
    eqn: core.JaxprEqn, operands: list[Marks], prefix: str, remarked: set[str]
) -> Marks:
    """Those on what says when a loop ends."""
    if eqn.primitive.name != "while":
        return _NONE
    cond, count = eqn.params["cond_jaxpr"].jaxpr, eqn.params["cond_nconsts"]
    given = [*operands[:count], *operands[_jaxpr.carry(eqn)]]
    return _any(_follow(cond, given, prefix, remarked)).computed()


def _joined(cases: Sequence[Marks]) -> Marks:
    """Those on what is one of several values: an input, if all are that one."""
    found = _any(cases)
    same = all(case.here == found.here for case in cases)
    return found if same else found.moved()


def _any(marks: Iterable[Marks]) -> Marks:
    marks = list(marks)
    return Marks(
        frozenset().union(*(each.here for each in marks)),
        frozenset().union(*(each.behind for each in marks)),
    )

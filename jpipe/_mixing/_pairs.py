"""Equations of two jaxprs of one function, traced with two numbers of examples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

# Of what is at places that the other operands say.
PLACED = frozenset(["dynamic_slice", "gather"])
# What puts values there.
WRITES = frozenset(["dynamic_update_slice", "scatter", "scatter-add"])


class Numbers(NamedTuple):
    """How two jaxprs of one function differ.

    Attributes:
      growth: how many times as many examples the second has: its longer axes are those
        of examples, and what grows as their number does so in it. One: there is only
        one jaxpr, given twice; of it is known only what holds single ones.
      size: of how many examples the first is. Where there is no second, an axis whose
        length is a multiple of it is one of examples.
      part: what follows one another in groups of it, or of a divisor, stays together.
    """

    growth: int
    size: int
    part: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Of how many examples the jaxprs are."""
        return tuple(dict.fromkeys([self.size, self.growth * self.size]))

    def along(self, shape: Sequence[int], twin: Sequence[int]) -> list[bool]:
        """Which axes go along the examples, by their lengths in both."""
        if len(shape) != len(twin):
            raise Differs
        if self.growth == 1:
            return [n > 0 and n % self.size == 0 for n in shape]
        return [m != n for m, n in zip(shape, twin, strict=True)]


class Differs(Exception):
    """The two jaxprs are not the same but for the number of examples."""


class Pair:
    """An equation, and what it is with more examples.

    Attributes:
      after: of each result which axes go along the examples.
      before: of each operand.
    """

    def __init__(
        self, eqn: core.JaxprEqn, twin: core.JaxprEqn, numbers: Numbers
    ) -> None:
        self.name = eqn.primitive.name
        if self.name != twin.primitive.name:
            raise Differs
        self.eqn, self.twin = eqn, twin
        self.before = axes_along(eqn.invars, twin.invars, numbers)
        self.after = axes_along(eqn.outvars, twin.outvars, numbers)


def axes_along(
    atoms: Sequence[Any], twins: Sequence[Any], numbers: Numbers
) -> list[list[bool]]:
    """Which axes of each value go along the examples."""
    shapes, others = ([getattr(a.aval, "shape", ()) for a in x] for x in (atoms, twins))
    if len(shapes) != len(others):
        raise Differs
    return [numbers.along(*pair) for pair in zip(shapes, others, strict=True)]

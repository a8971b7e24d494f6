"""Marks on values: set while a function is traced, and followed in its jaxpr.

What Python sees of a trace is not what is computed: a transformation may run a function
again, or not at all, as JAX has traced it before. The jaxpr tells.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from . import _jaxpr

Marks = frozenset[str]
_NONE: Marks = frozenset()


def mark(x: jax.Array, text: str) -> jax.Array:
    """The same array, which is known again in a jaxpr."""
    return checkpoint_name(x, text)


def follow(closed: core.ClosedJaxpr, prefix: str) -> tuple[list[Marks], set[str]]:
    """Follows marks through a jaxpr, its calls, branches and loops.

    Args:
      closed: the jaxpr.
      prefix: how the texts of the marks begin.

    Returns:
      For each result the marks on values that it may depend on; and those on values
      on which a value may depend that is marked itself.
    """
    remarked: set[str] = set()
    given = [_NONE] * len(closed.jaxpr.invars)
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
        if text.startswith(prefix):
            remarked |= _any(operands)
            results = [_any(operands) | {text}]
        else:
            results = _through(eqn, operands, prefix, remarked)
        marks.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _through(
    eqn: core.JaxprEqn, operands: list[Marks], prefix: str, remarked: set[str]
) -> list[Marks]:
    """The marks on the results of an equation."""
    inside = [closed.jaxpr for closed in _jaxpr.inside(eqn)]
    # The first operands say which branch it is, or when a loop ends.
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
        return [_any(operands)] * len(eqn.outvars)
    carried = _jaxpr.carried(eqn)
    while True:
        cases = []
        for jaxpr in bodies:
            first = len(operands) - len(jaxpr.invars)
            made = _follow(jaxpr, operands[first:], prefix, remarked)
            cases.append([_any([*operands[:first], marks]) for marks in made])
        results = [_any(case) for case in zip(*cases, strict=True)]
        before = operands[carried]
        after = [_any(pair) for pair in zip(before, results, strict=False)]
        if before == after:
            return results
        operands[carried] = after


def _any(marks: Iterable[Marks]) -> Marks:
    return frozenset().union(*marks)

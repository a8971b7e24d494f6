"""Which results are no means: some places of a value are written, or single examples.

Micro-batches find the same values and write what they make of their own examples. The
mean of that is what a layer means if examples come together in it, as in a sum.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from . import _jaxpr

_THROUGH = {"convert_element_type", "copy", "stop_gradient", "reshape", "squeeze"}
_CHOICES = {"select_n", "where"}
# What leaves out some examples, or tells one from another, as a sum of them does not.
_SELECTIONS = {
    "concatenate",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "pad",
    "scatter",
    "slice",
    "split",
}


def is_partly_written(
    closed: core.ClosedJaxpr, result: int, inputs: Sequence[bool]
) -> bool:
    """Whether a result is an earlier value, with places of it written by the inputs.

    Such as a table of which the nearest rows are replaced; not where the places follow
    from what all micro-batches find, as those of a count of steps.

    Args:
      closed: the jaxpr.
      result: the number of the result.
      inputs: which inputs differ from one micro-batch to another.
    """
    return _is_written(closed, closed.jaxpr.outvars[result], inputs)


def _is_written(closed: core.ClosedJaxpr, atom: Any, inputs: Sequence[bool]) -> bool:
    made = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    eqn = made.get(atom) if not isinstance(atom, core.Literal) else None
    if eqn is None:
        return False
    name = eqn.primitive.name
    reached = _jaxpr.depending_on(closed, inputs)

    def follows(atoms: Sequence[Any]) -> bool:
        return not reached.isdisjoint(_jaxpr.variables(atoms))

    if name in _THROUGH or name in _CHOICES:
        sources = eqn.invars if name in _THROUGH else eqn.invars[1:]
        return any(_is_written(closed, source, inputs) for source in sources)
    if name == "scatter":
        return follows(eqn.invars[1:2])
    if name == "dynamic_update_slice":
        return follows(eqn.invars[2:])
    inner = _jaxpr.inside(eqn)
    if len(inner) == 1 and len(inner[0].jaxpr.outvars) == len(eqn.outvars):
        given = [follows([source]) for source in eqn.invars]
        if len(given) == len(inner[0].jaxpr.invars):
            place = list(eqn.outvars).index(atom)
            return _is_written(inner[0], inner[0].jaxpr.outvars[place], given)
    return False


def is_along(value: Any, number: int) -> bool:
    """Whether an array, of which the shape is known, goes along the examples."""
    return any(size and size % number == 0 for size in value.shape)


def holding(closed: core.ClosedJaxpr, given: Sequence[bool], number: int) -> list[bool]:
    """Which results hold values of single examples, and not what is made of all.

    Args:
      closed: the jaxpr.
      given: which inputs hold values of examples.
      number: an axis whose length is a multiple of it goes along the examples.
    """
    held = {var for var, one in zip(closed.jaxpr.invars, given, strict=True) if one}

    def holds(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, core.Literal) and atom in held for atom in atoms]

    for eqn in closed.jaxpr.eqns:
        operands = holds(eqn.invars)
        if not any(operands):
            continue
        if eqn.primitive.name == "sort":
            # Examples in order, and not in that of something else, are not told apart.
            along = [n % number == 0 for n in eqn.outvars[0].aval.shape]
            if along[eqn.params["dimension"]] and sum(along) == 1:
                operands[0] = False
            held |= set(itertools.compress(eqn.outvars, operands))
            continue
        results = _within(eqn, operands, number)
        if results is None:
            sources = itertools.compress(eqn.invars, operands)
            single = not all(is_along(source.aval, number) for source in sources)
            single |= eqn.primitive.name in _SELECTIONS
            results = [single or is_along(var.aval, number) for var in eqn.outvars]
        held |= {var for var, one in zip(eqn.outvars, results, strict=True) if one}
    return holds(closed.jaxpr.outvars)


def _within(eqn: core.JaxprEqn, given: list[bool], number: int) -> list[bool] | None:
    """Which results of a call, of branches or of a loop do; None of any other."""
    name = eqn.primitive.name
    # The first operands say which branch it is, or are for the end of a loop.
    fewer = name in ("cond", "while")
    bodies = [
        closed
        for closed in _jaxpr.inside(eqn)
        if len(closed.jaxpr.outvars) == len(eqn.outvars)
        and (fewer or len(closed.jaxpr.invars) == len(given))
    ]
    if not bodies or name.startswith("reduce"):
        return None
    carried = _jaxpr.carry(eqn)
    while True:
        cases = [
            holding(closed, given[len(given) - len(closed.jaxpr.invars) :], number)
            for closed in bodies
        ]
        results = [any(case) for case in zip(*cases, strict=True)]
        after = [a or b for a, b in zip(given[carried], results, strict=False)]
        if after == given[carried]:
            return results
        given = [*given[: carried.start or 0], *after, *given[carried.stop :]]

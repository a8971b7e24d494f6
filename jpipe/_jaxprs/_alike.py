"""What is equal for jaxprs that compute the same, as far as one can tell."""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend import core


def form(closed: core.ClosedJaxpr) -> tuple[Hashable, ...]:
    """The equations of a jaxpr, without the names of its variables.

    Functions among their parameters, such as rules for derivatives, say nothing: what
    is to be told apart by these has to be so by other means.
    """
    jaxpr = closed.jaxpr
    made = [*jaxpr.constvars, *jaxpr.invars]
    made += [var for eqn in jaxpr.eqns for var in eqn.outvars]
    number = {var: i for i, var in enumerate(made)}

    def atom(one: Any) -> Hashable:
        is_literal = isinstance(one, core.Literal)
        return _value(one.val) if is_literal else number[one], str(one.aval)

    eqns = [
        (
            eqn.primitive.name,
            tuple((name, _value(x)) for name, x in sorted(eqn.params.items())),
            *map(atom, eqn.invars),
            *map(atom, eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]
    ends = *map(atom, jaxpr.invars), *map(atom, jaxpr.outvars)
    return tuple(map(id, closed.consts)), tuple(eqns), ends


def _value(value: Any) -> Hashable:
    """A parameter, or a number that stands in a jaxpr."""
    if isinstance(value, core.ClosedJaxpr):
        return form(value)
    if isinstance(value, core.Jaxpr):
        return form(core.ClosedJaxpr(value, [None] * len(value.constvars)))
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if callable(value) and not isinstance(value, type):
        return type(value).__name__
    return str(value)

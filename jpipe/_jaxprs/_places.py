"""Which results are values of which only some places were written."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from . import _jaxpr

_THROUGH = {"convert_element_type", "copy", "stop_gradient", "reshape", "squeeze"}
_CHOICES = {"select_n", "where"}


def is_partly_written(closed: core.ClosedJaxpr, result: int) -> bool:
    """Whether a result is an earlier value, with some places of it written or moved.

    Such as a queue, or a table in which rows are replaced; but where the places are
    the same whatever the inputs.

    Args:
      closed: the jaxpr.
      result: the number of the result.
    """
    inputs = [True] * len(closed.jaxpr.invars)
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
    if name == "concatenate":
        parts = [made.get(part) for part in _jaxpr.variables(eqn.invars)]
        cut = [part for part in parts if part and "slice" in part.primitive.name]
        return any(set(part.invars) & set(closed.jaxpr.invars) for part in cut)
    inner = _jaxpr.inside(eqn)
    if len(inner) == 1 and len(inner[0].jaxpr.outvars) == len(eqn.outvars):
        given = [follows([source]) for source in eqn.invars]
        if len(given) == len(inner[0].jaxpr.invars):
            place = list(eqn.outvars).index(atom)
            return _is_written(inner[0], inner[0].jaxpr.outvars[place], given)
    return False

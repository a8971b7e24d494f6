"""Which results are no means: some places of a value are written, or single examples.

Micro-batches find the same values and write what they make of their own examples. The
mean of that is what a layer means if examples come together in it, as in a sum.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from . import _jaxpr

# What makes a table of a table, place by place.
_THROUGH = {
    "add",
    "clamp",
    "convert_element_type",
    "copy",
    "div",
    "max",
    "min",
    "mul",
    "neg",
    "reshape",
    "squeeze",
    "stop_gradient",
    "sub",
    "transpose",
}
_CHOICES = {"select_n", "where"}


def is_partly_written(
    closed: core.ClosedJaxpr, result: int, earlier: int, inputs: Sequence[bool]
) -> bool:
    """Whether a result is an earlier value, with places of it written by the inputs.

    Such as a table of which the nearest rows are replaced; not where the places follow
    from what all micro-batches find, as those of a count of steps.

    Args:
      closed: the jaxpr.
      result: the number of the result.
      earlier: the number of the input that is the earlier value.
      inputs: which inputs differ from one micro-batch to another.
    """
    own = [at == earlier for at in range(len(inputs))]
    return _is_written(closed, closed.jaxpr.outvars[result], own, inputs)


def _is_written(
    closed: core.ClosedJaxpr, atom: Any, own: Sequence[bool], inputs: Sequence[bool]
) -> bool:
    """The same of a value that depends on inputs that are its own."""
    made = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    held = _jaxpr.depending_on(closed, own)
    reached = _jaxpr.depending_on(closed, inputs)

    def follow(atoms: Sequence[Any], among: set[core.Var]) -> list[bool]:
        return [not among.isdisjoint(_jaxpr.variables([atom])) for atom in atoms]

    seen: set[core.Var] = set()
    left = [atom]
    while left:
        new = (_jaxpr.variables([left.pop()]) & held & made.keys()) - seen
        seen |= new
        for var in new:
            eqn = made[var]
            name, rest = eqn.primitive.name, eqn.invars[1:]
            if name in _THROUGH:
                left += eqn.invars
            elif name in _CHOICES:
                left += rest
            elif name == "dynamic_update_slice" or name.startswith("scatter"):
                operand, *_ = eqn.invars
                left.append(operand)
                places = {"scatter": rest[:1], "dynamic_update_slice": rest[1:]}
                chosen = any(follow(places.get(name, []), reached))
                if chosen and any(follow([operand], held)):
                    return True
            for body in _jaxpr.bodies(eqn):
                result = body.jaxpr.outvars[eqn.outvars.index(var)]
                given = eqn.invars[len(eqn.invars) - len(body.jaxpr.invars) :]
                if _is_written(
                    body, result, follow(given, held), follow(given, reached)
                ):
                    return True
    return False

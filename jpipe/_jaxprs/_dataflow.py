"""What follows from what in a jaxpr, through its calls, branches and loops."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from . import _jaxpr


def reached(closed: core.ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which results follow from some of the given inputs, through calls and loops."""
    known = {v for v, yes in zip(closed.jaxpr.invars, inputs, strict=True) if yes}

    def follows(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in known

    for eqn in closed.jaxpr.eqns:
        given = list(map(follows, eqn.invars))
        inner = [] if eqn.primitive.name == "while" else _jaxpr.bodies(eqn)
        found, before = [any(given)] * len(eqn.outvars), None
        while inner and given != before:
            before, found = list(given), [False] * len(eqn.outvars)
            for body in inner:
                first = len(given) - len(body.jaxpr.invars)
                results = reached(body, given[first:])
                chosen = any(given[:first])
                found = [a or b or chosen for a, b in zip(found, results, strict=True)]
            turns = _jaxpr.carry_slice(eqn)
            given[turns] = [a or b for a, b in zip(given[turns], found, strict=False)]
        known.update(v for v, yes in zip(eqn.outvars, found, strict=True) if yes)
    return list(map(follows, closed.jaxpr.outvars))


def origins(closed: core.ClosedJaxpr, prefix: str = "\0") -> list[int | str | None]:
    """What each result is, unchanged, through calls, branches and loops.

    Args:
      closed: the jaxpr.
      prefix: how the names begin that are looked for.

    Returns:
      The number of the input that it is; or the name that it bears, as
      `jax.ad_checkpoint.checkpoint_name` gives one; else ``None``.
    """
    known: dict[Any, int | str | None] = {
        var: number for number, var in enumerate(closed.jaxpr.invars)
    }

    def of(atom: Any) -> int | str | None:
        return None if isinstance(atom, core.Literal) else known.get(atom)

    for eqn in closed.jaxpr.eqns:
        if name := _name(eqn, prefix):
            known[eqn.outvars[0]] = name
        inner = _jaxpr.bodies(eqn)
        cases = zip(*(_operands(body, eqn, prefix) for body in inner), strict=True)
        for place, (var, found) in enumerate(zip(eqn.outvars, cases, strict=False)):
            names = [at for at in found if isinstance(at, str)]
            if names:  # of branches that leave it out it is what it was
                known[var] = names[0]
            elif len(set(found)) == 1 and _stays(eqn, place, at := found[0]):
                known[var] = of(eqn.invars[at])
    return list(map(of, closed.jaxpr.outvars))


def _operands(
    body: core.ClosedJaxpr, eqn: core.JaxprEqn, prefix: str
) -> list[int | str | None]:
    """The origins of the results of a body, inputs as operands of its equation."""
    first = len(eqn.invars) - len(body.jaxpr.invars)
    found = origins(body, prefix)
    return [at + first if isinstance(at, int) else at for at in found]


def _stays(eqn: core.JaxprEqn, place: int, operand: Any) -> bool:
    """Whether a result that each turn of a loop takes from an operand is that one."""
    if operand is None or eqn.primitive.name not in ("scan", "while"):
        return operand is not None
    turns = _jaxpr.carry_slice(eqn)
    if turns.start + place < turns.stop:
        return operand == turns.start + place
    return operand >= turns.stop


def dtypes(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """Of all that is computed."""
    made = (var.aval for eqn in _jaxpr.equations(closed) for var in eqn.outvars)
    avals = list[Any]([*closed.in_avals, *made])
    yield from (aval.dtype for aval in avals if hasattr(aval, "dtype"))


def names(closed: core.ClosedJaxpr, prefix: str) -> set[str]:
    """The names that begin so in a jaxpr, and in those inside of it."""
    return {name for eqn in _jaxpr.equations(closed) if (name := _name(eqn, prefix))}


def _name(eqn: core.JaxprEqn, prefix: str) -> str:
    """The name that an equation gives to its operand, if it begins so; else empty."""
    text = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return text if text.startswith(prefix) else ""

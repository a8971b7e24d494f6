"""The flow of values through a jaxpr, result by result, through all that is inside.

    dependents          variables that follow from some others
    dependent_results   results that follow from some of the inputs
    result_origins      inputs, or values with a name, that results are, unchanged

They go through the equations once, with a fact about each variable. The facts about the
results of a call or a branch are those of the jaxpr inside. A loop feeds its results to
its next iteration: `dependents` goes through its body until no fact changes, and
`result_origins` once, since a loop must hand on what is unchanged.

These are facts about values. An equation runs whole: which variables are computed once
some have been, and which equations a program needs, `_jaxpr` tells.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core

from . import _jaxpr

# The index of an input, or a name; ``None`` for a value that is neither.
Origin = int | str | None


def dependents(
    jaxpr: core.Jaxpr, roots: Iterable[core.Var], *, differentiably: bool = False
) -> set[core.Var]:
    """The variables that follow from any of some variables, and these.

    Args:
      jaxpr: the jaxpr.
      roots: the variables to begin with.
      differentiably: True if those count alone that may have a tangent when the roots
        have one: of floating-point or complex numbers, not behind a
        `jax.lax.stop_gradient`. A rule for derivatives of the user's own may give each
        result a tangent for each operand.
    """
    reached = set(roots)
    for eqn in jaxpr.eqns:
        operands = [
            not isinstance(atom, core.Literal) and atom in reached
            for atom in eqn.invars
        ]
        if not any(operands):
            continue
        results = _dependent_eqn_results(eqn, operands, differentiably=differentiably)
        for var, is_reached in zip(eqn.outvars, results, strict=True):
            if is_reached and (not differentiably or _jaxpr.is_inexact(var.aval)):
                reached.add(var)
    return reached


def dependent_results(
    closed: core.ClosedJaxpr, inputs: Sequence[bool], *, differentiably: bool = False
) -> list[bool]:
    """One bool per result; True if it follows from any of the chosen inputs.

    Args:
      closed: the jaxpr.
      inputs: one bool per input; True if it is chosen.
      differentiably: see `dependents`.
    """
    invars = zip(closed.jaxpr.invars, inputs, strict=True)
    roots = [var for var, is_chosen in invars if is_chosen]
    reached = dependents(closed.jaxpr, roots, differentiably=differentiably)
    return [
        not isinstance(atom, core.Literal) and atom in reached
        for atom in closed.jaxpr.outvars
    ]


def _dependent_eqn_results(
    eqn: core.JaxprEqn, operands: list[bool], *, differentiably: bool
) -> list[bool]:
    """One bool per result of an equation; True if it follows from chosen operands."""
    if differentiably and eqn.primitive.name == "stop_gradient":
        return [False] * len(eqn.outvars)
    bodies = _jaxpr.bodies(eqn)
    has_rule = differentiably and eqn.primitive.name in _jaxpr.RULES
    if not bodies or has_rule:
        return [True] * len(eqn.outvars)

    carry = _jaxpr.carry_slice(eqn)
    while True:
        # All results follow from the index of a branch, and from the end of a loop.
        is_choice_chosen = not differentiably and _is_choice_chosen(eqn, operands)
        results = [is_choice_chosen] * len(eqn.outvars)
        if _may_run_no_iteration(eqn):  # the results are then what it begins with
            for index, is_chosen in enumerate(operands[carry]):
                results[index] |= is_chosen
        for body in bodies:
            body_results = dependent_results(
                body,
                operands[len(operands) - len(body.jaxpr.invars) :],
                differentiably=differentiably,
            )
            for index, is_dependent_result in enumerate(body_results):
                results[index] |= is_dependent_result

        next_operands = [*operands]
        next_operands[carry] = [
            before or after
            for before, after in zip(operands[carry], results, strict=False)
        ]
        if next_operands == operands:
            return results
        operands = next_operands


def _may_run_no_iteration(eqn: core.JaxprEqn) -> bool:
    """True if an equation is a loop whose body may never run."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"] == 0
    return eqn.primitive.name == "while"


def _is_choice_chosen(eqn: core.JaxprEqn, operands: Sequence[bool]) -> bool:
    """True if a chosen operand tells which branch runs, or when a loop ends.

    Args:
      eqn: a call, a cond or a loop.
      operands: one bool per operand; True if it is chosen.
    """
    if eqn.primitive.name != "while":
        return eqn.primitive.name == "cond" and operands[0]
    condition: Any = eqn.params["cond_jaxpr"]
    carry = _jaxpr.carry_slice(eqn)
    num_consts = len(condition.jaxpr.invars) - (carry.stop - carry.start)
    inputs = [*operands[:num_consts], *operands[carry]]
    return any(dependent_results(condition, inputs))


def result_origins(closed: core.ClosedJaxpr, prefix: str = "\0") -> list[Origin]:
    """The origin of each result, unchanged, through calls, branches and loops.

    Args:
      closed: the jaxpr.
      prefix: the begin of the names that count.

    Returns:
      The index of the input that the result is; or the name that it bears, as
      `jax.ad_checkpoint.checkpoint_name` gives one; else ``None``.
    """
    origin_of: dict[Any, Origin] = {
        var: index for index, var in enumerate(closed.jaxpr.invars)
    }

    def origin(atom: Any) -> Origin:
        return None if isinstance(atom, core.Literal) else origin_of.get(atom)

    for eqn in closed.jaxpr.eqns:
        if name := _name(eqn, prefix):
            origin_of[eqn.outvars[0]] = name
        cases = [_operand_origins(body, eqn, prefix) for body in _jaxpr.bodies(eqn)]
        if not cases:
            continue
        for index, var in enumerate(eqn.outvars):
            origin_in_cases = [case[index] for case in cases]
            names_in_cases = [x for x in origin_in_cases if isinstance(x, str)]
            if names_in_cases:  # a branch without the name leaves the value as it was
                origin_of[var] = names_in_cases[0]
                continue
            operand = origin_in_cases[0]
            if len(set(origin_in_cases)) == 1 and _is_operand(eqn, index, operand):
                origin_of[var] = origin(eqn.invars[operand])
    return [*map(origin, closed.jaxpr.outvars)]


def _operand_origins(
    body: core.ClosedJaxpr, eqn: core.JaxprEqn, prefix: str
) -> list[Origin]:
    """The origins of the results of a body, with indices of operands for inputs."""
    num_leading = len(eqn.invars) - len(body.jaxpr.invars)
    return [
        origin + num_leading if isinstance(origin, int) else origin
        for origin in result_origins(body, prefix)
    ]


def _is_operand(eqn: core.JaxprEqn, result: int, operand: Any) -> bool:
    """True if a result is an operand, which a loop hands on in each iteration.

    Args:
      eqn: the equation.
      result: the index of the result.
      operand: the index of the operand that one iteration returns, if it returns one.
    """
    if operand is None:
        return False
    if eqn.primitive.name not in ("scan", "while"):
        return True
    carry = _jaxpr.carry_slice(eqn)
    if carry.start + result < carry.stop:
        return operand == carry.start + result
    return operand >= carry.stop


def all_dtypes(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """The dtypes of all inputs and of all that equations compute."""
    outvars = _jaxpr.outvars_of(_jaxpr.equations(closed))
    avals = list[Any]([*closed.in_avals, *(var.aval for var in outvars)])
    yield from (aval.dtype for aval in avals if hasattr(aval, "dtype"))


def names(closed: core.ClosedJaxpr, prefix: str) -> set[str]:
    """The names that begin so in a jaxpr, and in those inside of it."""
    return {name for eqn in _jaxpr.equations(closed) if (name := _name(eqn, prefix))}


def _name(eqn: core.JaxprEqn, prefix: str) -> str:
    """The name that an equation gives to its operand, if it begins so; else empty."""
    text = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return text if text.startswith(prefix) else ""

"""What is equal for jaxprs that compute the same, with the same derivative."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from . import _jaxpr

# The names that jpipe gives to values tell them apart, not what they are.
_OWN = "jpipe "


class IdentityKey:
    """An object that is equal to itself only; it stays alive as long as this."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def structural_key(closed: core.ClosedJaxpr) -> tuple[Hashable, ...]:
    """The equations of a jaxpr, without the names of its variables.

    Where a function has a derivative of its own, this is a part of the form.
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
            _params(jaxpr, eqn),
            str(eqn.ctx),  # such as how random bits are made
            *map(atom, eqn.invars),
            *map(atom, eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]
    ends = *map(atom, jaxpr.invars), *map(atom, jaxpr.outvars)
    return tuple(map(IdentityKey, closed.consts)), tuple(eqns), ends


def _params(jaxpr: Any, eqn: core.JaxprEqn) -> Hashable:
    """The parameters of an equation; in place of rules what they make."""
    name, params = eqn.primitive.name, eqn.params
    if name == "name" and params["name"].startswith(_OWN):
        return ()
    if name not in _jaxpr.RULES:
        return _value(params)
    if params.get("symbolic_zeros"):  # what the rule does hangs on what is perturbed
        return IdentityKey(eqn)
    inner = [x for x in params.values() if isinstance(x, core.ClosedJaxpr)]
    return _value(inner), _derivative(jaxpr, eqn)


def _derivative(jaxpr: Any, eqn: core.JaxprEqn) -> Hashable:
    """The value and the derivative of an equation, by operations alone."""

    def derived(operands: list[Any], cotangents: list[Any]) -> Any:
        made, pullback = _jaxpr.vjp(lambda *x: _jaxpr.bind(jaxpr, eqn, x), operands)
        return made, pullback(cotangents)

    operands = [_jaxpr.spec(atom.aval) for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    cotangents = [_jaxpr.spec(x) for x in results if _jaxpr.is_inexact(x)]
    try:
        made = jax.make_jaxpr(derived)(operands, cotangents)
    except Exception:  # which is raised again where somebody differentiates it
        return IdentityKey(eqn)
    return structural_key(_jaxpr.inline_calls(made))


def _value(value: Any) -> Hashable:
    """A parameter, or a number that stands in a jaxpr."""
    if isinstance(value, core.ClosedJaxpr):
        return structural_key(value)
    if isinstance(value, core.Jaxpr):
        return structural_key(core.ClosedJaxpr(value, [None] * len(value.constvars)))
    if isinstance(value, tuple | list):
        return type(value), *map(_value, value)
    if isinstance(value, Mapping):
        return tuple((name, _value(x)) for name, x in sorted(value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, int | float | complex):
        return type(value), repr(value)  # which tells 0.0 from -0.0
    try:
        hash(value)
    except TypeError:
        return IdentityKey(value)
    return value

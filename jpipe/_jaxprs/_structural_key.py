"""Keys that are equal for jaxprs which compute the same, with the same derivative.

    structural_key(jaxpr) == (constants, equations, (inputs, outputs))

Variables stand in it as numbers, in the order in which the jaxpr defines them, so that
two traces of one function have one key. Stages with one key are compiled once.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from jax.extend import core

from . import _inlining, _jaxpr, _sharding_constraints
from ._explicit_dtypes import make_jaxpr

# The names that jpipe gives to values tell them apart, not what they are; but for those
# of sharding constraints.
_JPIPE_PREFIX = "jpipe "


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

    Where a function has a derivative of its own, this is a part of the key.
    """
    jaxpr = closed.jaxpr
    defined_vars = [*jaxpr.constvars, *jaxpr.invars, *_jaxpr.outvars_of(jaxpr.eqns)]
    var_index = {var: index for index, var in enumerate(defined_vars)}

    def atom_key(atom: Any) -> Hashable:
        is_literal = isinstance(atom, core.Literal)
        value = _value_key(atom.val) if is_literal else var_index[atom]
        return value, str(atom.aval)

    eqn_keys = [
        (
            eqn.primitive.name,
            _params_key(jaxpr, eqn),
            str(eqn.ctx),  # such as the implementation of random bits
            *map(atom_key, eqn.invars),
            *map(atom_key, eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]
    const_keys = tuple(map(IdentityKey, closed.consts))
    ends = (*map(atom_key, jaxpr.invars), *map(atom_key, jaxpr.outvars))
    return const_keys, tuple(eqn_keys), ends


def _params_key(jaxpr: Any, eqn: core.JaxprEqn) -> Hashable:
    """The parameters of an equation; the derivative in place of a rule for it."""
    name = eqn.primitive.name
    params = eqn.params
    if name == "name" and _is_label(params["name"]):
        return ()
    if name not in _jaxpr.RULES:
        return _value_key(params)
    if params.get("symbolic_zeros"):  # the rule may ask which inputs are perturbed
        return IdentityKey(eqn)
    inner = [x for x in params.values() if isinstance(x, core.ClosedJaxpr)]
    return _value_key(inner), _derivative_key(jaxpr, eqn)


def _is_label(name: str) -> bool:
    """True if a name says nothing of what is computed."""
    is_constraint = name.startswith(_sharding_constraints.NAME_PREFIX)
    return name.startswith(_JPIPE_PREFIX) and not is_constraint


def _derivative_key(jaxpr: Any, eqn: core.JaxprEqn) -> Hashable:
    """The value and the derivative of an equation, by operations alone."""

    def value_and_vjp(operands: list[Any], cotangents: list[Any]) -> Any:
        results, pullback = _jaxpr.vjp(lambda *x: _jaxpr.bind(jaxpr, eqn, x), operands)
        return results, pullback(cotangents)

    operands = [_jaxpr.spec(atom.aval) for atom in eqn.invars]
    result_avals = [var.aval for var in eqn.outvars]
    cotangents = [_jaxpr.spec(x) for x in result_avals if _jaxpr.is_inexact(x)]
    try:
        closed = make_jaxpr(value_and_vjp)(operands, cotangents)
    except Exception:  # which is raised again where somebody differentiates it
        return IdentityKey(eqn)
    return structural_key(_inlining.inline_calls(closed))


def _value_key(value: Any) -> Hashable:
    """A parameter of an equation, or a number that stands in a jaxpr."""
    if isinstance(value, core.ClosedJaxpr):
        return structural_key(value)
    if isinstance(value, core.Jaxpr):
        return structural_key(core.ClosedJaxpr(value, [None] * len(value.constvars)))
    if isinstance(value, tuple | list):
        return type(value), *map(_value_key, value)
    if isinstance(value, Mapping):
        return tuple((name, _value_key(x)) for name, x in sorted(value.items()))
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, int | float | complex):
        return type(value), repr(value)  # which tells 0.0 from -0.0
    try:
        hash(value)
    except TypeError:
        return IdentityKey(value)
    return value

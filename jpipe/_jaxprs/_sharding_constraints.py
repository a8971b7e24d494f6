"""Calls of `jax.lax.with_sharding_constraint` in what users wrote.

A constraint says how an array lies on the devices of a mesh; it is an identity. The
user's mesh is not that of a stage, which has some of the devices. So

    trace:    constraint(x, NamedSharding(user_mesh, spec)) -> name(x, spec), or x
    compile:  name(x, spec) -> constraint(x, NamedSharding(stage_mesh, spec))

where the name is a text such as ``jpipe constraint ["data", null]``, which
`jax.ad_checkpoint.checkpoint_name` puts on an array. In between there are no meshes.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxpr
from ._explicit_dtypes import make_jaxpr

_PRIMITIVE = "sharding_constraint"
NAME_PREFIX = "jpipe constraint "
# The text of `P.UNCONSTRAINED`: an axis that XLA may cut, while ``null`` is not cut.
_UNCONSTRAINED = "?"
# ``(array, spec) -> array``, with ``None`` for the spec of a sharding without one.
Constrain = Callable[[Any, P | None], Any]


def constraint_shardings(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """The shardings of all constraints, in loops and branches too."""
    for eqn in _jaxpr.equations(closed):
        if eqn.primitive.name == _PRIMITIVE:
            yield eqn.params["sharding"]


def is_constraint(eqn: core.JaxprEqn) -> bool:
    """True if an equation is a constraint."""
    return eqn.primitive.name == _PRIMITIVE


def name_specs(
    closed: core.ClosedJaxpr, is_kept: Callable[[P], bool]
) -> core.ClosedJaxpr:
    """The same computation, with names in place of constraints.

    Args:
      closed: the jaxpr.
      is_kept: tells if a spec is kept; else the constraint is left out.
    """

    def name(array: Any, spec: P | None) -> Any:
        if spec is None or not is_kept(spec):
            return array
        return checkpoint_name(array, NAME_PREFIX + json.dumps([*map(_as_text, spec)]))

    has_any = next(constraint_shardings(closed), None) is not None
    return _replace_constraints(closed, name) if has_any else closed


def remove_constraints(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation without constraints."""
    return name_specs(closed, lambda spec: False)


def without_constraints(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without constraints; nobody may differentiate it: see `evaluate`."""

    @functools.wraps(function)  # its name is that of the program in profiles
    def run(*args: Any) -> Any:
        closed, result = make_jaxpr(function, return_shape=True)(*args)
        leaves = core.jaxpr_as_fun(remove_constraints(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return run


def has_constraints(closed: core.ClosedJaxpr) -> bool:
    """True if there are constraints, or names of these, in a jaxpr."""
    return any(map(_is_constraint_or_name, _jaxpr.equations(closed)))


def evaluate(
    closed: core.ClosedJaxpr, args: Sequence[Any], constrain: Constrain
) -> list[Any]:
    """Evaluates a jaxpr with other constraints, in loops and branches too.

    Args:
      closed: the jaxpr, after differentiation: the derivative that a user defines may
        bring constraints which the trace of the function did not have.
      args: its inputs.
      constrain: replaces a constraint, or a name.
    """

    def replace_param(value: Any) -> Any:
        """Replaces constraints in a parameter of an equation, if it is a jaxpr."""
        if _is_operand_sharding(value):
            return None
        if isinstance(value, core.Jaxpr):
            return _replace_constraints(core.ClosedJaxpr(value, []), constrain).jaxpr
        if isinstance(value, core.ClosedJaxpr):
            return _replace_constraints(value, constrain)
        return value

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if _is_constraint_or_name(eqn):
            spec = _spec_of(eqn)
            return lambda operands: [constrain(operands[0], spec)]
        values = jax.tree.leaves([*eqn.params.values()])
        has_mesh = any(map(_has_mesh, _jaxpr.inner_jaxprs(eqn)))
        if not has_mesh and not any(map(_is_operand_sharding, values)):
            return None
        params = {
            name: jax.tree.map(replace_param, value)
            for name, value in eqn.params.items()
        }
        new_eqn = eqn.replace(params=params)
        return lambda operands: _jaxpr.bind(closed.jaxpr, new_eqn, operands)

    return _jaxpr.evaluate(closed, args, rule)


def _replace_constraints(
    closed: core.ClosedJaxpr, constrain: Constrain
) -> core.ClosedJaxpr:
    return _jaxpr.retrace(closed, lambda *args: evaluate(closed, args, constrain))


def _is_constraint_or_name(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name == "name":
        return eqn.params["name"].startswith(NAME_PREFIX)
    return is_constraint(eqn)


def _has_mesh(closed: core.ClosedJaxpr) -> bool:
    """True if a jaxpr has constraints, or inputs that follow from one.

    JAX writes the mesh into the types of these.
    """
    avals = list[Any]([*closed.in_avals, *closed.out_avals])
    meshes = (aval.sharding.mesh for aval in avals if hasattr(aval, "sharding"))
    return has_constraints(closed) or not all(mesh.empty for mesh in meshes)


def _is_operand_sharding(value: Any) -> bool:
    """True for a sharding that JAX wrote into an equation since its operands had it.

    `jax.numpy.zeros_like` of a constrained array broadcasts to such a sharding. It has
    no meaning where meshes are not explicit, and names no devices.
    """
    return isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh)


def _spec_of(eqn: core.JaxprEqn) -> P | None:
    """The spec of a constraint, as a user would type it, or of a name."""
    if eqn.primitive.name == "name":
        parts = json.loads(eqn.params["name"].removeprefix(NAME_PREFIX))
        return P(*map(_from_text, parts))
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return None
    array: Any = eqn.outvars[0].aval
    parts = [*spec, *[None] * (array.ndim - len(spec))]
    for axis in eqn.params["unconstrained_dims"]:
        parts[axis] = P.UNCONSTRAINED
    return P(*parts)


def _as_text(part: Any) -> Any:
    return _UNCONSTRAINED if part is P.UNCONSTRAINED else part


def _from_text(part: Any) -> Any:
    if isinstance(part, list):
        return tuple(part)
    return P.UNCONSTRAINED if part == _UNCONSTRAINED else part

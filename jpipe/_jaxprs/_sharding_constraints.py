"""Calls of `jax.lax.with_sharding_constraint` in what users wrote.

A constraint says how an array lies on the devices of a mesh; its value is that of the
array. A stage runs on devices of its own. So where a program is traced, a constraint is
left out, or only its spec is kept, as a name on the array, such as
``constraint ["data", null]``. Where a program of a stage is compiled, the name becomes
a constraint on the devices of that stage. In between nothing knows of other meshes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _jaxpr

_PRIMITIVE = "sharding_constraint"
_NAME = "constraint "
# A part of a spec that says nothing, where ``null`` says that nothing is cut.
_UNCONSTRAINED = "?"
# ``(array, spec) -> array``, where the spec is ``None`` if it is not known.
Constrain = Callable[[Any, P | None], Any]


def shardings(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """The shardings of all constraints, in loops and branches too."""
    for eqn in _jaxpr.equations(closed):
        if eqn.primitive.name == _PRIMITIVE:
            yield eqn.params["sharding"]


def is_constraint(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a constraint."""
    return eqn.primitive.name == _PRIMITIVE


def name_specs(
    closed: core.ClosedJaxpr, keeps: Callable[[P], bool]
) -> core.ClosedJaxpr:
    """The same computation, with names in place of constraints.

    Args:
      closed: the jaxpr.
      keeps: whether a spec is kept; else the constraint is left out.
    """

    def name(array: Any, spec: P | None) -> Any:
        if spec is None or not keeps(spec):
            return array
        return checkpoint_name(array, _NAME + json.dumps([*map(_as_text, spec)]))

    return _replaced(closed, name) if next(shardings(closed), None) else closed


def leave_out(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same computation without constraints."""
    return name_specs(closed, lambda spec: False)


def without(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without constraints; nobody may differentiate it: see `evaluate`."""

    def run(*args: Any) -> Any:
        closed, result = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = core.jaxpr_as_fun(leave_out(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return run


def are_in(closed: core.ClosedJaxpr) -> bool:
    """Whether there are constraints or names of these in a jaxpr."""
    return any(map(_is_either, _jaxpr.equations(closed)))


def evaluate(
    closed: core.ClosedJaxpr, args: Sequence[Any], constrain: Constrain
) -> list[Any]:
    """Evaluates a jaxpr with other constraints, in loops and branches too.

    Args:
      closed: the jaxpr. Derivatives are a part of it: those that a function has of its
        own may bring constraints that no trace had before.
      args: its inputs.
      constrain: what takes the place of a constraint, or of a name.
    """

    def inner(value: Any) -> Any:
        """A jaxpr in the parameters of an equation, or another parameter."""
        if _is_of_types(value):
            return None
        if isinstance(value, core.Jaxpr):
            return _replaced(core.ClosedJaxpr(value, []), constrain).jaxpr
        is_closed = isinstance(value, core.ClosedJaxpr)
        return _replaced(value, constrain) if is_closed else value

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if _is_either(eqn):
            spec = _spec(eqn)
            return lambda operands: [constrain(operands[0], spec)]
        values = jax.tree.leaves([*eqn.params.values()])
        has_mesh = any(map(_is_of_mesh, _jaxpr.inner_jaxprs(eqn)))
        if not has_mesh and not any(map(_is_of_types, values)):
            return None
        params = {name: jax.tree.map(inner, x) for name, x in eqn.params.items()}
        changed = eqn.replace(params=params)
        return lambda operands: _jaxpr.bind(closed.jaxpr, changed, operands)

    return _jaxpr.evaluate(closed, args, rule)


def _replaced(closed: core.ClosedJaxpr, constrain: Constrain) -> core.ClosedJaxpr:
    return _jaxpr.retrace(closed, lambda *args: evaluate(closed, args, constrain))


def _is_either(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name == _PRIMITIVE or (
        name == "name" and eqn.params["name"].startswith(_NAME)
    )


def _is_of_mesh(closed: core.ClosedJaxpr) -> bool:
    """Whether a jaxpr has constraints, or is given what follows from one.

    JAX writes the mesh into the types of that.
    """
    avals = list[Any]([*closed.in_avals, *closed.out_avals])
    meshes = (aval.sharding.mesh for aval in avals if hasattr(aval, "sharding"))
    return are_in(closed) or not all(mesh.empty for mesh in meshes)


def _is_of_types(value: Any) -> bool:
    """Whether JAX wrote a sharding into an equation since its operands had it.

    `jax.numpy.zeros_like` of what was constrained broadcasts to such a sharding. It
    says nothing where meshes are not explicit, and names no devices.
    """
    return isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh)


def _spec(eqn: core.JaxprEqn) -> P | None:
    """The spec of a constraint, as a user would type it, or of a name."""
    if eqn.primitive.name == "name":
        parts = json.loads(eqn.params["name"].removeprefix(_NAME))
        return P(*map(_from_text, parts))
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return None
    free = eqn.params["unconstrained_dims"]
    array: Any = eqn.outvars[0].aval
    parts = [*spec, *[None] * (array.ndim - len(spec))]
    return P(*(P.UNCONSTRAINED if i in free else part for i, part in enumerate(parts)))


def _as_text(part: Any) -> Any:
    return _UNCONSTRAINED if part is P.UNCONSTRAINED else part


def _from_text(part: Any) -> Any:
    if isinstance(part, list):
        return tuple(part)
    return P.UNCONSTRAINED if part == _UNCONSTRAINED else part

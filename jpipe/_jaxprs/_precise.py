"""A jaxpr computed in float32 at least: what is measured of it is not its rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from . import _jaxpr

Rules = Callable[[core.JaxprEqn], _jaxpr.Rule | None]

# What is run as it is, with the jaxprs that are in it: they are of one program of a
# kernel, or of one device of a mesh.
_CLOSED = ("pallas_call", "shard_map")


def precise(closed: core.ClosedJaxpr, rule: Rules) -> core.ClosedJaxpr:
    """The same computation, with more bits where there are few.

    Floating numbers are float32 at least, products of matrices are computed in all
    bits of theirs. Kernels, and what speaks of the bits of numbers, stay as they are.

    Args:
      closed: the jaxpr.
      rule: what takes the place of an equation, as a function of its operands, which
        have more bits; ``None`` for those that stay.
    """

    def run(*args: Any) -> list[Any]:
        return evaluate(closed, args, rule)

    specs = (_jaxpr.spec(aval) for aval in closed.in_avals)
    return jax.make_jaxpr(run)(
        *(spec.update(dtype=_widened(spec.dtype)) for spec in specs)
    )


def evaluate(closed: core.ClosedJaxpr, args: Sequence[Any], rule: Rules) -> list[Any]:
    """Evaluates a jaxpr as `precise` would make it."""

    def own(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
        if run := rule(eqn):
            return lambda operands: run([*map(_wide, operands)])
        if _is_precise(eqn):
            return None
        return lambda operands: _bound(closed.jaxpr, eqn, operands, rule)

    consts = [*map(_wide, closed.consts)]
    wide = core.ClosedJaxpr(closed.jaxpr, consts)
    return [*map(_wide, _jaxpr.evaluate(wide, [*map(_wide, args)], own))]


def _is_precise(eqn: core.JaxprEqn) -> bool:
    """Whether an equation, given the same, is computed as precisely already."""
    if "precision" in eqn.params or _jaxpr.inside(eqn):
        return False
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    dtypes += [value for value in eqn.params.values() if isinstance(value, np.dtype)]
    return all(dtype is None or dtype == _widened(dtype) for dtype in dtypes)


def _bound(
    jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any], rule: Rules
) -> Sequence[Any]:
    name = eqn.primitive.name
    given = [getattr(atom.aval, "dtype", None) for atom in eqn.invars]
    if name == "reduce_precision" and given[0] != _widened(given[0]):
        return operands
    if name not in _CLOSED:
        params = jax.tree.map(
            lambda value: _param(value, rule),
            dict(eqn.params),
            is_leaf=lambda leaf: leaf is None,
        )
        if "precision" in params:
            params["precision"] = (jax.lax.Precision.HIGHEST,) * 2
        wide = [*map(_wide, operands)]
        shapes = [getattr(var.aval, "shape", None) for var in eqn.outvars]
        try:
            made = _bind(jaxpr, eqn.replace(params=params), wide)
        except Exception:  # whatever speaks of bits
            if _jaxpr.inside(eqn):
                raise
        else:
            if [getattr(each, "shape", None) for each in made] == shapes:
                return made
    narrow = [
        jnp.asarray(x, dtype) if dtype and dtype != _widened(dtype) else x
        for x, dtype in zip(operands, given, strict=True)
    ]
    return [*map(_wide, _bind(jaxpr, eqn, narrow))]


def _bind(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on operands of other dtypes, literals too."""
    values = [*map(jnp.asarray, operands)]
    names = jax.make_jaxpr(lambda *xs: xs)(*map(_jaxpr.spec, values)).jaxpr.invars
    return _jaxpr.bind(jaxpr, eqn.replace(invars=list(names)), values)


def _param(value: Any, rule: Rules) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return precise(value, rule)
    if isinstance(value, core.Jaxpr):
        closed = precise(core.ClosedJaxpr(value, []), rule)
        if closed.consts:
            raise ValueError("nowhere to put constants")
        return closed.jaxpr
    return _widened(value) if isinstance(value, np.dtype) else value


def _wide(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    wide = dtype and _widened(dtype)
    return x if wide == dtype else jnp.asarray(x, wide)


def _widened(dtype: Any) -> Any:
    """The dtype in which such numbers are computed."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if is_narrow else dtype

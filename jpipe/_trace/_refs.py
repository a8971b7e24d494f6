"""Replaces `jax.Ref`s that a function makes by the values that they hold.

    r = new_ref x                   r0 = x
    a = get r                       a = r0
    swap r (add a y)                r1 = add a y
    b = get r                       b = r1

A function that makes, writes and reads a ref of its own is pure. Its stages, remat
modes and halves of backwards need to know nothing of refs then. A ref from outside is
state that the micro-batches would share: it is refused.
"""

from typing import Any

from jax.extend import core

from .. import _compat
from .._jaxprs import _eqn_source, _jaxpr


def replace_refs(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replaces the refs of a jaxpr by values.

    Args:
      closed: the jaxpr.

    Raises:
      ValueError: if a ref is from outside, or is used in a function with a rule for
        derivatives, which JAX cannot differentiate without it.
    """
    for var in [*closed.jaxpr.constvars, *closed.jaxpr.invars]:
        if _is_ref(var):
            raise ValueError(
                "the function reads or writes a jax.Ref from outside, which the "
                "micro-batches of a pipeline cannot share; give its value as an "
                "argument and return the new one (as aux with has_aux=True); a jax.Ref "
                "that the function itself makes is fine"
            )
    if not any(map(_uses_refs, closed.jaxpr.eqns)):
        return closed
    for eqn in _jaxpr.equations(closed):
        if eqn.primitive.name in _jaxpr.RULES and _uses_refs(eqn):
            raise ValueError(
                f"{_eqn_source.describe_eqn(eqn)} uses a jax.Ref in a function with a "
                f"rule for derivatives, which a pipeline cannot keep: use values there"
            )
    replaced = _compat.replace_refs(closed)
    if replaced is None:
        raise ValueError("this version of JAX cannot pipeline a jax.Ref; use values")
    return replaced


def _is_ref(var: Any) -> bool:
    return "Ref" in type(var.aval).__name__


def _uses_refs(eqn: core.JaxprEqn) -> bool:
    """True if an equation makes, reads or writes a ref, or a body of it does.

    Kernels, such as of Pallas, have refs of their own, and are no bodies.
    """
    if any(map(_is_ref, [*eqn.invars, *eqn.outvars])):
        return True
    return any(
        _uses_refs(inner_eqn)
        for body in _jaxpr.bodies(eqn)
        for inner_eqn in body.jaxpr.eqns
    )

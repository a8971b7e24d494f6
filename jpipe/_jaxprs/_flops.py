"""How many floating-point operations a jaxpr takes, counted without a device."""

import math
from typing import Any

from jax.extend import core

from . import _jaxpr
from ._primitives import MOVES, REDUCTIONS


def flops(closed: core.ClosedJaxpr) -> int:
    """The operations of a jaxpr: of a product two per term, else one per result.

    A loop takes those of its body as often as it turns, a branch those of the dearest;
    of a `jax.lax.while_loop` once, as nobody knows how often it turns.
    """
    return sum(map(of_equation, closed.jaxpr.eqns))


def of_equation(eqn: core.JaxprEqn) -> int:
    """Those of one equation: see `flops`."""
    name, params = eqn.primitive.name, eqn.params
    made, operands = sum(map(_size, eqn.outvars)), list[Any](eqn.invars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = operands[0].aval.shape
        return 2 * made * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = operands[1].aval.shape
        channels = kernel[params["dimension_numbers"].rhs_spec[0]]
        terms = made * (math.prod(kernel) // max(channels, 1))
        # Of the zeros between inputs, in the gradient of strides, none is a term.
        return 2 * terms // math.prod(params["lhs_dilation"])
    if name in MOVES:
        return 0
    if name in REDUCTIONS:
        return sum(map(_size, operands))
    inside = [flops(closed) for closed in _jaxpr.inner_jaxprs(eqn)]
    if name == "scan":
        return params["length"] * sum(inside)
    if name == "cond":
        return max(inside)
    return sum(inside) if inside else made


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)

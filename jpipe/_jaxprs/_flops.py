"""Floating-point operations of a jaxpr, counted without a device."""

import math
from typing import Any

from jax.extend import core

from . import _jaxpr
from ._primitives import MOVES, REDUCTIONS


def count_flops(closed: core.ClosedJaxpr) -> int:
    """The operations of a jaxpr: two per term of a product, else one per result.

    A loop takes the operations of its body times its length, a branch those of the
    dearest case, a `jax.lax.while_loop`, whose length nobody knows, those of its body.
    """
    return sum(map(count_eqn_flops, closed.jaxpr.eqns))


def count_eqn_flops(eqn: core.JaxprEqn) -> int:
    """The operations of one equation: see `count_flops`."""
    name = eqn.primitive.name
    params = eqn.params
    operands = list[Any](eqn.invars)
    num_results = sum(map(_size, eqn.outvars))

    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = operands[0].aval.shape
        return 2 * num_results * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = operands[1].aval.shape
        channels = kernel[params["dimension_numbers"].rhs_spec[0]]
        num_terms = num_results * (math.prod(kernel) // max(channels, 1))
        # The zeros between inputs, in the gradient of strides, are no terms.
        return 2 * num_terms // math.prod(params["lhs_dilation"])
    if name in MOVES:
        return 0
    if name in REDUCTIONS:
        return sum(map(_size, operands))

    inner_flops = [count_flops(closed) for closed in _jaxpr.inner_jaxprs(eqn)]
    if name == "scan":
        return params["length"] * sum(inner_flops)
    if name == "cond":
        return max(inner_flops)
    return sum(inner_flops) if inner_flops else num_results


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)

"""What rules of the user's own make of cotangents, which need not be a derivative.

No forward tells of a `jax.custom_vjp`, nor of a `jax.custom_jvp`, so they are measured:
see `_measured`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr
from ._made import DRAWN, EACH, FOLLOWS, OTHER, SAME, UNSURE, WHOLE, Made, by_shapes
from ._measured import magnitude, measured, mixes
from ._pairs import Differs, Numbers, axes_along
from ._results import results

MIXES = "has a backward that makes something of the cotangents of several examples"
# What cuts cotangents off does so with large ones; what adds to them is seen beside
# small ones.
_SCALES = (1e3, 1e-3)


def is_free(one: core.ClosedJaxpr, other: core.ClosedJaxpr, numbers: Numbers) -> bool:
    """Whether a backward may be another than the forward tells.

    Args:
      one: the jaxpr of a function with some number of examples.
      other: with more.
      numbers: of the examples.
    """
    names = ("custom_vjp_call", "custom_vjp_call_jaxpr")
    if any(_jaxpr.contains(one, name) for name in names):
        return True
    return _jaxpr.contains(one, _TANGENTS) and _are_free(one, other, numbers)


# Many functions of JAX are such, and of each example by itself.
_TANGENTS = "custom_jvp_call"


def _are_free(one: core.ClosedJaxpr, other: core.ClosedJaxpr, numbers: Numbers) -> bool:
    """Whether tangents may be made of those of several examples."""
    for eqn, twin in zip(one.jaxpr.eqns, other.jaxpr.eqns, strict=False):
        if eqn.primitive.name != _TANGENTS:
            each = zip(_jaxpr.inside(eqn), _jaxpr.inside(twin), strict=False)
            if any(_are_free(*both, numbers) for both in each):
                return True
            continue
        few, many = _tangents(one.jaxpr, eqn), _tangents(other.jaxpr, twin)
        try:
            given = by_shapes(few.in_avals, many.in_avals, numbers, Made(SAME))
            made = results(few, many, given, numbers)
        except Differs:
            return True
        if any(each.kind not in (SAME, EACH) or each.degree for each in made):
            return True
    return False


def _tangents(jaxpr: core.Jaxpr, eqn: core.JaxprEqn) -> core.ClosedJaxpr:
    """The tangents of an equation, as ``(*operands, *their tangents) -> tangents``."""
    specs = [_jaxpr.spec(atom.aval) for atom in eqn.invars]
    free = [i for i, each in enumerate(specs) if _is_differentiable(each)]

    def tangents(*args: Any) -> Any:
        given = list(args[: len(specs)])

        def run(*floats: Any) -> list[Any]:
            for i, value in zip(free, floats, strict=True):
                given[i] = value
            return _jaxpr.bind(jaxpr, eqn, given)

        return jax.jvp(run, [given[i] for i in free], [*args[len(specs) :]])[1]

    return jax.make_jaxpr(tangents)(*specs, *[specs[i] for i in free])


def found(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    cotangents: Mapping[int, Made],
    numbers: Numbers,
) -> str:
    """Why gradients of all examples are others than those of parts, if they are.

    Args:
      one: its jaxpr with some number of examples.
      other: with more, of which they are a part.
      given: how each input is made of the examples.
      cotangents: of some results how that of each is made.
      numbers: of the examples.
    """
    given = [*given, *cotangents.values()]
    is_own = is_free(one, other, numbers)
    try:
        one, other = (_backward(closed, [*cotangents]) for closed in (one, other))
    except Exception:  # whatever a backward does with another number of examples
        return ""
    came = measured(one, other, given, numbers)
    axes = axes_along(one.jaxpr.outvars, other.jaxpr.outvars, numbers)
    mixed = any(
        mixes(result, along, numbers)
        if any(along)
        else result.differs(np.sum(result.parts, axis=0), magnitude(result.parts))
        for draw in came
        for result, along in zip(draw, axes, strict=True)
    )
    if mixed:
        return MIXES
    why = _why(one, other, given, numbers) if is_own else ""
    return f"has a backward that {why}" if why else ""


def _why(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    numbers: Numbers,
) -> str:
    """What makes more of several examples than of each, such as a threshold of all."""
    # A share of all, in which a loss is, makes no numbers other ones.
    given = [Made(SAME) if made.kind == WHOLE else made for made in given]
    try:
        made = results(one, other, given, numbers)
    except Differs:
        return ""
    axes = axes_along(one.jaxpr.outvars, other.jaxpr.outvars, numbers)
    of_all = [
        each.why
        for each, along in zip(made, axes, strict=True)
        if each.why in (DRAWN, FOLLOWS)
        or (any(along) and each.kind in (OTHER, UNSURE) and each.why)
    ]
    return of_all[0] if of_all else ""


def _backward(closed: core.ClosedJaxpr, chosen: Sequence[int]) -> core.ClosedJaxpr:
    """The gradients of some results, by all inputs that have one, for each scale.

    Returns:
      ``(*inputs, *cotangents) -> gradients``.
    """
    count = len(closed.in_avals)
    free = [i for i, aval in enumerate(closed.in_avals) if _is_differentiable(aval)]

    def backward(*args: Any) -> Any:
        given = list(args[:count])

        def forward(*floats: Any) -> list[Any]:
            for i, value in zip(free, floats, strict=True):
                given[i] = value
            results = core.jaxpr_as_fun(closed)(*given)
            return [results[i] for i in chosen]

        _, pull = jax.vjp(forward, *(given[i] for i in free))
        return [
            gradient / scale
            for scale in _SCALES
            for gradient in pull([ct * scale for ct in args[count:]])
        ]

    avals = [*closed.in_avals, *(closed.out_avals[i] for i in chosen)]
    return jax.make_jaxpr(backward)(*map(_jaxpr.spec, avals))


def _is_differentiable(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)

"""Layers tried on random numbers, where their jaxprs do not tell what they do."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend import core

from .._mixing import _backward
from .._mixing._made import UNKNOWN, UNSURE, Made
from .._mixing._measured import TOLD, UNTRIED, measured, mixes
from .._mixing._pairs import Numbers, axes_along


def tried(
    one: core.ClosedJaxpr,
    other: core.ClosedJaxpr,
    given: Sequence[Made],
    found: Sequence[Made],
    certain: bool,
    numbers: Numbers,
    train: bool,
) -> str:
    """What a layer makes of several examples, where that is not known of it.

    Its backward is tried too, if that is free. Empty if it is nothing.

    Args:
      one: its jaxpr with some number of examples.
      other: with more.
      given: how each input is made of the examples.
      found: how each result is, as far as is known.
      certain: whether it is known at all: the jaxprs are not two functions.
      numbers: of the examples.
      train: whether it is trained.
    """
    axes = axes_along(one.jaxpr.outvars, other.jaxpr.outvars, numbers)
    unknown = [
        not certain or made.pieced or (made.kind in (UNKNOWN, UNSURE) and not made.why)
        for made in found
    ]
    if any(unknown):
        draws = measured(one, other, given, numbers)
        if not draws and not certain:
            return UNTRIED
        for draw in draws:
            asked = itertools.compress(zip(draw, axes, strict=True), unknown)
            if any(mixes(*each, numbers) for each in asked):
                return TOLD
    pieced = any(made.pieced for made in found)
    if not train or not (
        pieced or not certain or _backward.is_free(one, other, numbers)
    ):
        return ""
    cotangents = {
        i: made
        for i, (made, aval) in enumerate(zip(found, one.out_avals, strict=True))
        if any(axes[i]) and jnp.issubdtype(aval.dtype, jnp.inexact)
    }
    return _backward.found(one, other, given, cotangents, numbers)

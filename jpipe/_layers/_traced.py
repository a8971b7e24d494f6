"""What a layer does, read of its jaxpr: what it writes, and what it draws."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from .._jaxprs import _jaxpr

_DRAWING = {"random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"}

PyTree = Any
Place = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """What a layer does with its arguments.

    Attributes:
      y: what it returns, as far as tracing asks.
      written: the paths of the states that it writes.
      closed: its jaxpr.
    """

    y: PyTree
    written: frozenset[Place]
    closed: core.ClosedJaxpr

    @cached_property
    def draws(self) -> int:
        """How often it draws random numbers for its results."""
        return _draws(_jaxpr.prune(self.closed, self.closed.jaxpr.outvars).jaxpr)

    @cached_property
    def program(self) -> tuple[str, list[Any]]:
        """What is equal for layers that compute the same."""
        # Functions that a jaxpr names are printed with their addresses.
        text = re.sub(r"0x[0-9a-f]+", "", str(self.closed.jaxpr))
        return text, [_content(const) for const in self.closed.consts]


def trace(
    apply: Callable[..., tuple[PyTree, PyTree]],
    variables: PyTree,
    x: PyTree,
    rngs: PyTree,
) -> Traced:
    """Traces ``(variables, x, rngs) -> (y, changed)``."""
    closed, (y, changed) = jax.make_jaxpr(apply, return_shape=True)(variables, x, rngs)
    before = _leaves(variables)
    inputs = dict(zip(closed.jaxpr.invars, before, strict=False))
    results = closed.jaxpr.outvars[len(jax.tree.leaves(y)) :]
    written = {
        path
        for path, atom in zip(_leaves(changed), results, strict=True)
        if isinstance(atom, core.Literal) or inputs.get(atom) != path
    }
    return Traced(y, frozenset(written), closed)


def _draws(jaxpr: core.Jaxpr) -> int:
    inner = (each.jaxpr for eqn in jaxpr.eqns for each in _jaxpr.inside(eqn))
    own = sum(eqn.primitive.name in _DRAWING for eqn in jaxpr.eqns)
    return own + sum(map(_draws, inner))


def _leaves(tree: PyTree) -> list[Place]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [tuple(map(_part, path)) for path, _ in found]


def _part(entry: Any) -> Any:
    return next(
        getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)
    )


def _content(const: Any) -> Any:
    is_key = jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    unknown = is_key or isinstance(const, Tracer)
    return id(const) if unknown else np.asarray(const).tobytes()

"""Which operation makes a value that is no number, for `jax_debug_nans`.

`jax.jit` runs the Python function again that it has compiled, operation by operation.
A program of ours is a jaxpr, in which JAX looks for nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from . import _jaxpr, _sharding_constraints

# To a type checker it has no attributes.
_config: Any = jax.config


def find(function: Any, leaves: Sequence[Any]) -> FloatingPointError | None:
    """An error that names the first operation that makes a value that is looked for.

    Args:
      function: ``(*leaves) -> leaves``, which JAX can trace.
      leaves: what it was given.

    Returns:
      What to raise; ``None`` if there is none, run one by one.
    """
    specs = map(_jaxpr.spec, leaves)
    closed = _jaxpr.inline_calls(
        jax.make_jaxpr(_sharding_constraints.without(function))(*specs)
    )

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule:
        def run(operands: Sequence[Any]) -> Sequence[Any]:
            results = _jaxpr.bind(closed.jaxpr, eqn, operands)
            if kinds := list(filter(None, map(_kind, results))):
                raise FloatingPointError(
                    f"invalid value ({kinds[0]}) encountered in {eqn.primitive.name}, "
                    f"at {source_info_util.summarize(eqn.source_info)}"
                )
            return results

        return run

    try:
        _jaxpr.evaluate(closed, leaves, rule)
    except FloatingPointError as error:
        return error
    return None


def _kind(value: Any) -> str:
    """What is looked for in an array and is in it; may be empty."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return ""
    if _config.jax_debug_nans and bool(jnp.isnan(value).any()):
        return "nan"
    return "inf" if _config.jax_debug_infs and bool(jnp.isinf(value).any()) else ""

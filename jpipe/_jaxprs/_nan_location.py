"""Finds the operation that makes a NaN or an infinity, for `jax_debug_nans`.

`jax.jit` runs the Python function again that it has compiled, operation by operation.
A program of ours is a jaxpr, in which JAX looks for nothing: here its equations are
evaluated one by one.

JAX checks the results of a program where the setting holds in the thread. One that
holds in all threads ends in a thread as soon as that leaves a scope in which it is off,
and JAX opens such a scope to evaluate a jaxpr: so programs run in a scope of their own,
`check_results`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from . import _inlining, _jaxpr, _sharding_constraints

# To a type checker it has no attributes.
_config: Any = jax.config


def is_checking() -> bool:
    """True if JAX looks for invalid values, by the settings of the user."""
    return _config.jax_debug_nans or _config.jax_debug_infs


def check_results() -> AbstractContextManager[None]:
    """The scope in which the results of programs are checked, if any are."""
    return _checks() if is_checking() else nullcontext()


@contextmanager
def _checks() -> Iterator[None]:
    nans = jax.debug_nans(_config.jax_debug_nans)
    infs = jax.debug_infs(_config.jax_debug_infs)
    with nans, infs:
        yield


def find_invalid_value(
    function: Any, leaves: Sequence[Any]
) -> FloatingPointError | None:
    """An error that names the first operation with an invalid result.

    Args:
      function: ``(*leaves) -> leaves``, which JAX can trace.
      leaves: its arguments.

    Returns:
      The error to raise; ``None`` if no operation, run by itself, has such a result.
    """
    specs = map(_jaxpr.spec, leaves)
    closed = _inlining.inline_calls(
        jax.make_jaxpr(_sharding_constraints.without_constraints(function))(*specs)
    )

    def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule:
        def run(operands: Sequence[Any]) -> Sequence[Any]:
            results = _jaxpr.bind(closed.jaxpr, eqn, operands)
            for result in results:
                if invalid := invalid_value(result):
                    raise FloatingPointError(
                        f"invalid value ({invalid}) encountered in "
                        f"{eqn.primitive.name}, "
                        f"at {source_info_util.summarize(eqn.source_info)}"
                    )
            return results

        return run

    try:
        _jaxpr.evaluate(closed, leaves, rule)
    except FloatingPointError as error:
        return error
    return None


def invalid_value(array: Any) -> str:
    """The value in an array that the user's settings forbid; empty if none is."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return ""
    if _config.jax_debug_nans and bool(jnp.isnan(array).any()):
        return "nan"
    if _config.jax_debug_infs and bool(jnp.isinf(array).any()):
        return "inf"
    return ""

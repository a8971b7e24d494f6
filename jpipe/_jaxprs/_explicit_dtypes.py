"""Traces of specs of 64 bits, where JAX computes in 32 bits.

Arrays have 64 bits there under ``jax_explicit_x64_dtypes="allow"``. But JAX takes a
`jax.ShapeDtypeStruct` of float64 for one of float32 unless 64 bits are enabled. So they
are while it reads the specs, and not while it traces the function:

    with jax.enable_x64(True):
        jax.make_jaxpr(in_32_bits(function))(*specs)
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax


def make_jaxpr(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns `jax.make_jaxpr` of a function, for specs as they are."""

    def trace(*specs: Any) -> Any:
        leaves = jax.tree.leaves(specs)
        traced = in_32_bits(function) if are_narrowed(leaves) else function
        with keep_dtypes(leaves):
            return jax.make_jaxpr(traced, **options)(*specs)

    return trace


def are_narrowed(specs: Iterable[Any]) -> bool:
    """True if JAX takes a spec for one of fewer bits."""
    dtypes = {spec.dtype for spec in specs if isinstance(spec, jax.ShapeDtypeStruct)}
    return any(
        jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype
        for dtype in dtypes
    )


@contextmanager
def keep_dtypes(specs: Iterable[Any]) -> Iterator[None]:
    """A scope in which JAX takes specs as they are."""
    if not are_narrowed(specs):
        yield
        return
    with jax.enable_x64(True):  # noqa: FBT003
        yield


def in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced as where 64 bits are not enabled."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with jax.enable_x64(False):  # noqa: FBT003
            return function(*args)

    return run

"""The context in which a pipeline traces and runs: outside of its caller's mesh.

Each stage is a program of one device. Inside of `jax.set_mesh` JAX would compile it for
all devices of the mesh, and refuse the arrays of a stage as those of other devices.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_of_meshes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function to run outside of any mesh that its caller has set."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        try:
            without_mesh = jax.set_mesh(None)
        except ValueError:  # within a trace, which the function itself refuses
            return function(*args, **kwargs)
        with without_mesh:
            return function(*args, **kwargs)

    return run

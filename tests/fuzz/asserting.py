"""What is asserted of the results of a program."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jpipe

from .. import reference as ref
from ..compiling import log_compiled

PyTree = Any

# Where two orders of the same sums may differ, as a part of the largest entry.
CLOSE = {
    jnp.dtype(jnp.float64): ref.FLOAT64,
    jnp.dtype(jnp.float32): 1e-4,
    jnp.dtype(jnp.bfloat16): 2**-4,
}


@contextmanager
def asserting(what: str) -> Iterator[None]:
    """Names the property in what is raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"where it is asserted that {what}")
        raise


def assert_close(
    dtype: Any,
    rough: int,
    what: str,
    actual: PyTree,
    expected: PyTree,
    grown: int = 1,
) -> None:
    """Every leaf is close, as far as the dtype and norms allow."""
    # Of a tanh near one, 1 - tanh**2 has lost as many bits as it is small.
    largest = largest_entry(expected)
    # What a norm makes of a constant is rounding errors of terms of one.
    scale = max(largest, float(what == "output")) if rough else largest / 1000
    with asserting(f"{what} is that of one device"):
        ref.assert_close(actual, expected, grown * CLOSE[dtype], scale)


@contextmanager
def compiling_nothing(remat: Any) -> Iterator[None]:
    """Raises where something is traced or compiled inside.

    What offloads is called as `jax.jit` calls it, which looks for its trace again in
    this scope.
    """
    settings = remat if isinstance(remat, list) else [remat]
    offloads = any("offload" in getattr(one, "__qualname__", "") for one in settings)
    with log_compiled() as compiled, nullcontext() if offloads else jax.no_tracing():
        yield
    assert not compiled, f"a second step compiles nothing: {compiled}"


def assert_in_place(
    ranks: Sequence[Sequence[jax.Device]],
    pipe: jpipe.Pipeline,
    balance: Sequence[int],
    entries: Sequence[PyTree],
) -> None:
    """Each leaf of the entry of a layer is where the stage of the layer runs."""
    placement = pipe.schedule.placement
    stages = [stage for stage, count in enumerate(balance) for _ in range(count)]
    for number, (stage, entry) in enumerate(zip(stages, entries, strict=True)):
        for leaf in jax.tree.leaves(entry):
            if leaf.dtype != jax.dtypes.float0:
                devices = leaf.devices()
                assert devices == {*ranks[placement[stage]]}, (number, devices)


def assert_beside(variables: PyTree, tree: PyTree) -> None:
    """Each leaf is where the variable is that it belongs to."""
    flat = jax.tree_util.tree_leaves_with_path(variables)
    at = {path: leaf.devices() for path, leaf in flat}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.dtype != jax.dtypes.float0:
            assert leaf.devices() == at[path], path


def largest_entry(tree: PyTree) -> float:
    """The largest of all entries."""
    floating = [
        np.abs(leaf.astype(np.float64)).max(initial=0.0)
        for leaf in jax.tree.leaves(ref.on_host(tree))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return float(max(floating, default=0.0))

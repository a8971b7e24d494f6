"""The values of nnx modules, by collection and path."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._messages import raise_all
from ._slots import inner
from ._tree import nested

PyTree = Any
Path = tuple[Any, ...]


def leaves(source: Any) -> dict[Path, tuple[str | None, Any]]:
    """The leaves of a module by their paths, and in which collections they are carried.

    Args:
      source: an nnx module; what is none has no leaves.
    """
    found = flat(source)[1] if isinstance(source, nnx.Module) else {}
    return {path: (collection(leaf), leaf) for path, leaf in found.items()}


def parameters(source: Any) -> dict[Path, nnx.Variable]:
    """The Variables that hold the parameters of a module, by their paths."""
    return {
        path: leaf
        for path, (collection, leaf) in leaves(source).items()
        if collection == "params"
    }


def untrained(source: Any) -> dict[Path, nnx.Variable]:
    """Floating Variables of types that are the user's own and not `nnx.Param`."""
    return {
        path: leaf
        for path, (collection, leaf) in leaves(source).items()
        if isinstance(leaf, nnx.Variable)
        and collection not in (None, "params")
        and not type(leaf).__module__.startswith("flax.")
        and isinstance(value := leaf.get_value(), jax.Array | np.ndarray)
        and jnp.issubdtype(value.dtype, jnp.inexact)
    }


def flat(module: nnx.Module) -> tuple[Any, dict[Path, Any]]:
    """What of a module is static, and its leaves by their paths."""
    graphdef, state = nnx.split(module, graph=True)
    return graphdef, dict(nnx.to_flat_state(state))


def collection(leaf: Any) -> str | None:
    """The collection in which a pipeline carries a leaf, if it does.

    It does not carry the state of random streams, which follows from the keys of the
    step, and intermediate results, which are outputs.
    """
    if isinstance(leaf, jax.Ref):
        raise ValueError("a jax.Ref cannot be given to a pipeline; use an nnx.Variable")
    if isinstance(leaf, jax.Array | np.ndarray):
        return "arrays"
    if not isinstance(leaf, nnx.Variable):
        return None  # such as the None of a missing bias
    if isinstance(leaf, nnx.RngState | nnx.Intermediate):
        return None
    kind = type(leaf).__name__
    values = jax.tree.leaves(leaf.get_raw_value())
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        raise ValueError(
            f"a {kind} holds a shape and no value, as of nnx.eval_shape; make the "
            f"module itself: its values are replaced by those given as variables="
        )
    if leaf.ref or leaf.hijax:
        raise ValueError(
            f"a {kind} that is a reference (ref or hijax) cannot be given to a "
            f"pipeline; make it with ref=False and hijax=False"
        )
    if isinstance(leaf, nnx.Param):
        return "params"
    if isinstance(leaf, nnx.BatchStat):
        return "batch_stats"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind)
    if snake.lower() == "params":
        raise ValueError(
            f"the Variable type {kind} takes the name of what is trained; rename it, "
            f"or derive it from nnx.Param"
        )
    return snake.lower()


def _value(leaf: Any) -> PyTree:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def values(module: nnx.Module) -> dict[str, PyTree]:
    """What a module holds: by collection, then nested as its attributes are."""
    return nested(
        {
            (name, *path): _value(leaf)
            for path, leaf in flat(module)[1].items()
            if (name := collection(leaf)) is not None
        }
    )


def _get(tree: Any, path: Path) -> PyTree:
    for part in path:
        tree = tree[part]
    return tree


def merge(module: nnx.Module, variables: Mapping[str, PyTree]) -> nnx.Module:
    """A new module of the structure of one and the values of a pipeline."""
    graphdef, leaves = flat(module)
    state, missing = {}, []
    for path, leaf in leaves.items():
        name = collection(leaf)
        value = _value(leaf)
        if name is not None:
            try:
                value = _get(variables, (name, *path))
            except (KeyError, TypeError, IndexError):
                missing.append(f"{name}/{dotted(inner(path))}")
        state[path] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
    raise_all(f"the variables are not those of {_called(module)}: missing", missing)
    merged = nnx.merge(graphdef, nnx.from_flat_state(state))
    nnx.pop(merged, nnx.Intermediate)  # results of a call before
    return merged


def _called(module: nnx.Module) -> str:
    """A module, or a list of them, in words."""
    several = module if isinstance(module, nnx.List) else [module]
    return ", ".join(f"this {type(one).__name__}" for one in several)


def dotted(path: Path) -> str:
    """A path in a module, as Python writes attributes."""
    return ".".join(map(str, path))

"""The values of nnx modules, by collection and path."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from .._messages import raise_all
from ._linen_parent import path_in_layer

PyTree = Any
Path = tuple[Any, ...]


class SplitModule(NamedTuple):
    """A module of nnx in two parts.

    Attributes:
      graphdef: the static part: its structure and attributes.
      leaves: its Variables and arrays by their paths.
    """

    graphdef: Any
    leaves: dict[Path, Any]


def split(module: nnx.Module) -> SplitModule:
    """Splits a module into its static part and its leaves."""
    graphdef, state = nnx.split(module, graph=True)
    return SplitModule(graphdef, dict(nnx.to_flat_state(state)))


def _leaves(source: Any) -> dict[Path, Any]:
    """The leaves by their paths of an nnx module; none of any other object."""
    return split(source).leaves if isinstance(source, nnx.Module) else {}


def parameters(source: Any) -> dict[Path, nnx.Variable]:
    """The Variables that hold the parameters of a module, by their paths."""
    return {
        path: leaf
        for path, leaf in _leaves(source).items()
        if collection(leaf) == "params"
    }


def untrained_variables(source: Any) -> dict[Path, nnx.Variable]:
    """Floating Variables of types of the user that are not `nnx.Param`, by path."""
    return {
        path: leaf
        for path, leaf in _leaves(source).items()
        if collection(leaf) not in (None, "params") and _is_floating_user_variable(leaf)
    }


def _is_floating_user_variable(leaf: Any) -> bool:
    if not isinstance(leaf, nnx.Variable):
        return False
    if type(leaf).__module__.startswith("flax."):
        return False
    value = leaf.get_value()
    is_array = isinstance(value, jax.Array | np.ndarray)
    return is_array and jnp.issubdtype(value.dtype, jnp.inexact)


def collection(leaf: Any) -> str | None:
    """The collection in which a pipeline carries a leaf; ``None`` if it does not.

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

    class_name = type(leaf).__name__
    values = jax.tree.leaves(leaf.get_raw_value())
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        raise ValueError(
            f"a {class_name} holds a shape and no value, as of nnx.eval_shape; make "
            f"the module itself: its values are replaced by those given as variables="
        )
    if leaf.ref or leaf.hijax:
        raise ValueError(
            f"a {class_name} that is a reference (ref or hijax) cannot be given to a "
            f"pipeline; make it with ref=False and hijax=False"
        )

    if isinstance(leaf, nnx.Param):
        return "params"
    if isinstance(leaf, nnx.BatchStat):
        return "batch_stats"
    # The class name in snake case: MyStats -> my_stats.
    word_starts = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    snake_case = re.sub(word_starts, "_", class_name).lower()
    if snake_case == "params":
        raise ValueError(
            f"the Variable type {class_name} takes the name of what is trained; rename "
            f"it, or derive it from nnx.Param"
        )
    return snake_case


def _value(leaf: Any) -> PyTree:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def values(module: nnx.Module) -> dict[str, PyTree]:
    """The values of a module: by collection, then nested as its attributes are."""
    return unflatten_mapping(
        {
            (name, *path): _value(leaf)
            for path, leaf in split(module).leaves.items()
            if (name := collection(leaf)) is not None
        }
    )


def _value_at(tree: Any, path: Path) -> PyTree:
    for key in path:
        tree = tree[key]
    return tree


def merge(module: nnx.Module, variables: Mapping[str, PyTree]) -> nnx.Module:
    """A new module with the structure of a module and the values of a pipeline."""
    graphdef, leaves = split(module)
    # path -> Variable or array of the new module
    state: dict[Path, Any] = {}
    missing = []
    for path, leaf in leaves.items():
        name = collection(leaf)
        value = _value(leaf)
        if name is not None:
            try:
                value = _value_at(variables, (name, *path))
            except (KeyError, TypeError, IndexError):
                missing.append(f"{name}/{attribute_path(path_in_layer(path))}")
        state[path] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
    raise_all(f"the variables are not those of {_describe(module)}: missing", missing)

    merged = nnx.merge(graphdef, nnx.from_flat_state(state))
    nnx.pop(merged, nnx.Intermediate)  # results of a call before
    return merged


def _describe(module: nnx.Module) -> str:
    """A module, or a list of them, in words."""
    modules = module if isinstance(module, nnx.List) else [module]
    return ", ".join(f"this {type(module).__name__}" for module in modules)


def attribute_path(path: Path) -> str:
    """A path in a module, as Python writes attributes."""
    return ".".join(map(str, path))

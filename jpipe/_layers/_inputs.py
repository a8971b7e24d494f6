"""Several inputs of a model as one."""

from dataclasses import dataclass
from typing import Any

import jax

PyTree = Any


class Name(str):
    """A name of one of several inputs in errors: its keyword, or ``input 0``."""


@dataclass(frozen=True)
class _StaticInputs:
    """All of `Inputs` but its arrays: equal where the same program runs.

    Attributes:
      tree: the structure of ``(args, kwargs)``.
      constants: ``(leaf index, type, leaf)`` of each leaf that is no array; the type,
        since 1 and 1.0 are equal.
      names: the paths of the arrays.
    """

    tree: Any
    constants: tuple[tuple[int, type, Any], ...]
    names: tuple[Name, ...]


@jax.tree_util.register_pytree_with_keys_class
class Inputs:
    """The arguments of a call: arrays are leaves, all else is static; see `inputs`.

    Args:
      arrays: the leaves that are arrays.
      static: the structure, the other leaves and the paths of the arrays.
    """

    def __init__(self, arrays: Any, static: _StaticInputs) -> None:
        self._arrays = tuple(arrays)
        self._static = static

    def __repr__(self) -> str:
        args, kwargs = jax.tree.map(_to_shown, self.call)
        named = [f"{name}={value!r}" for name, value in kwargs.items()]
        return f"jpipe.inputs({', '.join([*map(repr, args), *named])})"

    @property
    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments by position and those by name."""
        static = self._static
        constants = {index: leaf for index, _, leaf in static.constants}
        arrays = iter(self._arrays)
        leaves = [
            constants[index] if index in constants else next(arrays)
            for index in range(static.tree.num_leaves)
        ]
        args, kwargs = jax.tree.unflatten(static.tree, leaves)
        return [*args], dict(kwargs)

    def prefix_of(self, inputs: "Inputs") -> tuple[Any, Any]:
        """Settings of inputs, such as axes, completed to match all of the inputs.

        Args:
          inputs: the inputs; those without a setting here get zero.

        Returns:
          The ``(args, kwargs)`` of the settings and those of the inputs.
        """
        settings, named_settings = self.call
        args, kwargs = inputs.call
        num_missing = len(args) - len(settings)
        settings = [*settings, *[0] * num_missing]
        named_settings = {**dict.fromkeys(kwargs, 0), **named_settings}
        return (settings, named_settings), (args, kwargs)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """For JAX: the arrays by their paths."""
        return [*zip(self._static.names, self._arrays, strict=True)], self._static

    @classmethod
    def tree_unflatten(cls, static: _StaticInputs, arrays: Any) -> "Inputs":
        """For JAX."""
        return cls(arrays, static)


def inputs(*args: PyTree, **kwargs: PyTree) -> Inputs:
    """Packs the inputs of a model that takes several.

    Args:
      *args: the positional arguments of the model's call. Arrays belong to the
        mini-batch; all else, such as ``None``, numbers and text, is static: another
        value is another program.
      **kwargs: its keyword arguments.

    Returns:
      The ``x`` to pass to `Pipeline.init`, `Pipeline.apply` and a step.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> x = jpipe.inputs(jnp.ones((4, 8)), mask=None, causal=True)
      >>> x.call[1]
      {'causal': True, 'mask': None}
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    arrays = []
    names = []
    constants = []
    for index, (path, leaf) in enumerate(leaves):
        if _is_array(leaf):
            arrays.append(leaf)
            names.append(_name(path))
        else:
            constants.append((index, type(leaf), leaf))
    return Inputs(arrays, _StaticInputs(tree, tuple(constants), tuple(names)))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class _Shown(str):
    """A text that is shown without quotation marks."""

    __repr__ = str.__str__


def _to_shown(leaf: Any) -> Any:
    """The dtype and shape of an array; else the leaf."""
    if not _is_array(leaf):
        return leaf
    return _Shown(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")


def _name(path: Any) -> Name:
    """The name of an array at a path ``(args or kwargs, argument, ...)``."""
    _, argument, *inner_path = path
    name = getattr(argument, "key", None) or f"input {argument.idx}"
    return Name(f"{name}{jax.tree_util.keystr(tuple(inner_path))}")


def leaf_name(tree_name: str, path: Any) -> str:
    """The name of a leaf in errors: with `tree_name`, unless an input has its name."""
    is_named = path and isinstance(path[0], Name)
    return f"{'' if is_named else tree_name}{jax.tree_util.keystr(path)}"


def call_arguments(x: PyTree) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call by position and by name."""
    return x.call if isinstance(x, Inputs) else ([x], {})

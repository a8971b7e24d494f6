"""Several inputs of a model as one."""

from typing import Any

import jax

PyTree = Any


class Name(str):
    """How errors call one of several inputs: by its keyword, or ``input 0``."""


@jax.tree_util.register_pytree_with_keys_class
class Inputs:
    """The arguments of a call: arrays are leaves, all else is fixed; see `inputs`.

    Args:
      leaves: the arrays.
      fixed: the structure of ``(args, kwargs)``, the leaves that are no arrays by their
        numbers, and the paths of the others.
    """

    def __init__(self, leaves: Any, fixed: Any) -> None:
        self._leaves, self._fixed = tuple(leaves), fixed

    def __repr__(self) -> str:
        args, kwargs = jax.tree.map(_shown, self.call)
        named = [f"{name}={value!r}" for name, value in kwargs.items()]
        return f"jpipe.inputs({', '.join([*map(repr, args), *named])})"

    @property
    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments by position and those by name."""
        tree, others, _ = self._fixed
        arrays, known = iter(self._leaves), {i: leaf for i, _, leaf in others}
        count = tree.num_leaves
        args, kwargs = jax.tree.unflatten(
            tree, [known[i] if i in known else next(arrays) for i in range(count)]
        )
        return [*args], dict(kwargs)

    def prefix_of(self, other: "Inputs") -> tuple[Any, Any]:
        """What is said of the inputs, such as their axes, in the form of the inputs.

        Args:
          other: the inputs. Of what nothing is said it is zero.
        """
        (args, kwargs), (data, named) = self.call, other.call
        args = [*args, *[0] * (len(data) - len(args))]
        return (args, {**dict.fromkeys(named, 0), **kwargs}), (data, named)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """For JAX: the arrays by their paths."""
        return [*zip(self._fixed[2], self._leaves, strict=True)], self._fixed

    @classmethod
    def tree_unflatten(cls, fixed: Any, leaves: Any) -> "Inputs":
        """For JAX."""
        return cls(leaves, fixed)


def inputs(*args: PyTree, **kwargs: PyTree) -> Inputs:
    """Packs the inputs of a model that takes several.

    Args:
      *args: what the model's call is given by position. Arrays belong to the
        mini-batch; all else, such as ``None``, numbers and text, is fixed: another
        value is another program.
      **kwargs: what it is given by name.

    Returns:
      What is given as ``x`` to `Pipeline.init`, `Pipeline.apply` and a step.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> x = jpipe.inputs(jnp.ones((4, 8)), mask=None, causal=True)
      >>> x.call[1]
      {'causal': True, 'mask': None}
    """
    flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for _, leaf in flat]
    others = tuple(
        (i, type(leaf), leaf)  # 1 and 1.0 are equal
        for i, ((_, leaf), yes) in enumerate(zip(flat, is_array, strict=True))
        if not yes
    )
    pairs = [pair for pair, yes in zip(flat, is_array, strict=True) if yes]
    names = tuple(_name(path) for path, _ in pairs)
    return Inputs([leaf for _, leaf in pairs], (tree, others, names))


class _Shown(str):
    """A text that is shown without quotation marks."""

    __repr__ = str.__str__


def _shown(leaf: Any) -> Any:
    """The dtype and shape of an array; else the leaf."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    return _Shown(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")


def _name(path: Any) -> Name:
    _, first, *rest = path
    name = getattr(first, "key", None) or f"input {first.idx}"
    return Name(f"{name}{jax.tree_util.keystr(tuple(rest))}")


def called(what: str, path: Any) -> str:
    """How errors call a leaf of a tree; one of several inputs has a name of its own."""
    tree = "" if path and isinstance(path[0], Name) else what
    return f"{tree}{jax.tree_util.keystr(path)}"


def arguments(x: PyTree) -> tuple[list[Any], dict[str, Any]]:
    """What a call is given by position and by name."""
    return x.call if isinstance(x, Inputs) else ([x], {})

"""The collections that a call may change in evaluation: the argument ``mutable``."""

from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import jax
from flax.core import DenyList

PyTree = Any


class Mutable(NamedTuple):
    """The collections that a forward pass may change, and returns.

    Attributes:
      names: their names.
      axes: name -> the axis of the examples in its leaves, as ``in_axes`` of
        `jax.vmap`; ``None``: it is read off.
    """

    names: tuple[str, ...] = ()
    axes: Mapping[str, PyTree] | None = None

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal collections and axes."""
        if self.axes is None:
            return self.names
        axes = dict(self.axes)
        leaves, structure = jax.tree.flatten(axes, is_leaf=lambda node: node is None)
        return self.names, structure, tuple(leaves)


NOTHING_MUTABLE = Mutable()


def read_mutable(mutable: Any) -> Mutable:
    """Reads the argument ``mutable`` of a call.

    Args:
      mutable: the name of a collection, several, or names and the axes of the examples
        in their leaves; ``False`` for none.

    Raises:
      ValueError: if it names parameters, or what is not to change.
      TypeError: if it is none of these.
    """
    if mutable is None or mutable is False:
        return NOTHING_MUTABLE
    if mutable is True or isinstance(mutable, DenyList):
        raise ValueError(
            f"mutable={mutable}: a pipeline needs the names of the collections that "
            f"it returns, such as mutable=['cache']"
        )
    names: Any = (mutable,) if isinstance(mutable, str) else mutable
    if not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"mutable={mutable!r}: needs names of collections, such as "
            f"mutable=['cache'], or these and the axis of the examples, such as "
            f"mutable={{'cache': 0}}"
        )
    if "params" in names:
        raise ValueError(
            f"mutable={mutable!r}: parameters are changed by the optimizer alone; name "
            f"other collections, such as mutable=['cache']"
        )
    axes = dict(names) if isinstance(names, Mapping) else None
    return Mutable(tuple(sorted(names)), axes)

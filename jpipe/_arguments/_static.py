"""Arguments that are no arrays: values that a program is compiled for."""

from dataclasses import dataclass
from typing import Any

import jax

PyTree = Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticArgument:
    """An argument that is compared by type and value; in a tree it has no leaves."""

    value_type: type
    value: Any

    @classmethod
    def of(cls, value: Any, note: str) -> "StaticArgument":
        """Wraps the value of an argument.

        Args:
          value: the value.
          note: a note for the error that is raised if the value is not hashable.
        """
        try:
            hash(value)
        except TypeError as error:
            error.add_note(note)
            raise
        return cls(type(value), value)

    def __repr__(self) -> str:
        return repr(self.value)


def without_statics(tree: PyTree) -> PyTree:
    """The tree with the values of static arguments in place of these."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, StaticArgument) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, StaticArgument),
    )

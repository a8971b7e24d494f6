"""Marks between stages: what bears one is the same value, made by the stage before."""

from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .._jaxprs import _jaxpr

PyTree = Any
_MARK = "jpipe boundary "


def boundary(x: PyTree) -> PyTree:
    """Marks the place between two stages; gives back what it is given.

    Call it in a loss function that `jpipe.value_and_grad` divides, or in a model that
    `jpipe.pipeline` does. Where there are marks, the stages are what is between them.

    Args:
      x: any pytree of arrays, such as the output of a block.

    Returns:
      ``x``.

    Raises:
      ValueError: when the function is traced, if a mark is in a loop or a branch.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> jpipe.boundary(jnp.ones(3)).shape
      (3,)
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _MARK), x)


def numbered(stage: int, trees: dict[int, PyTree]) -> dict[int, PyTree]:
    """Trees with the mark of the end of a stage; the place has one even without leaves.

    Args:
      stage: its number.
      trees: what leaves it, by numbers.
    """

    def mark(number: int, tree: PyTree) -> PyTree:
        name = f"{_MARK}{stage} {number}"
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, name), tree)

    checkpoint_name(np.zeros((), np.float32), f"{_MARK}{stage}")
    return {number: mark(number, tree) for number, tree in trees.items()}


def is_mark(eqn: core.JaxprEqn) -> bool:
    """Whether an equation marks a value."""
    return eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK)


def positions(closed: core.ClosedJaxpr) -> list[int]:
    """The numbers of the equations right behind each group of a user's marks."""
    eqns = closed.jaxpr.eqns
    inner = [i for i, eqn in enumerate(eqns) if are_inside(eqn)]
    if inner:
        raise ValueError(
            f"jpipe.boundary is called inside {eqns[inner[0]].primitive.name}; a stage "
            f"ends between two operations of the whole function: call it outside of "
            f"loops and branches"
        )
    at = [i for i, eqn in enumerate(eqns) if is_mark(eqn)]
    return [i + 1 for i in at if i + 1 not in at and i + 1 < len(eqns)]


def are_inside(eqn: core.JaxprEqn) -> bool:
    """Whether there are marks in the jaxprs of an equation."""
    inner = (e for closed in _jaxpr.inside(eqn) for e in closed.jaxpr.eqns)
    return any(is_mark(e) or are_inside(e) for e in inner)


def ends(closed: core.ClosedJaxpr) -> dict[int, int]:
    """Of each stage that bears a number the first equation behind it."""
    return {
        number: i + 1
        for i, eqn in enumerate(closed.jaxpr.eqns)
        if (number := _number(eqn)) is not None
    }


def _number(eqn: core.JaxprEqn) -> int | None:
    words = eqn.params["name"].removeprefix(_MARK).split() if is_mark(eqn) else []
    return int(words[0]) if words else None


def marked(closed: core.ClosedJaxpr) -> dict[core.Var, tuple[int, int]]:
    """Of what leaves a stage with a number: the stage, and which tree it is of."""
    found = {}
    for eqn in closed.jaxpr.eqns:
        words = eqn.params["name"].removeprefix(_MARK).split() if is_mark(eqn) else []
        if len(words) == 2:
            found[eqn.outvars[0]] = int(words[0]), int(words[1])
    return found

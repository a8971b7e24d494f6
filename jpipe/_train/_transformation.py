"""An optax optimizer as two functions of trees, evaluated where the parameters are."""

import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._functions._weights import is_inexact
from .._instructions._sharding import Sharding
from .._placed._by_path import ByPath, Where
from .._placed._function import Argument, Placement, where_computed

PyTree = Any


def check_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns ``tx`` if it is an optax transformation.

    Raises:
      TypeError: if it is not.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx={reprlib.repr(tx)} is a {type(tx).__name__}; needs an optax "
            f"optimizer, such as optax.adamw(1e-3)"
        )
    return tx


class Transformation:
    """``init`` and ``update`` of an optimizer, with errors that say what to type.

    Leaves of integers are not parameters: the optimizer does not see them, and their
    updates are zeros. What is not trained is ``None``, as for optax.

    Args:
      tx: the optax transformation.
      advice: what to type if it needs more than gradients, state and parameters.

    Raises:
      TypeError: if ``tx`` is not an optax transformation.
    """

    def __init__(self, tx: Any, advice: str) -> None:
        tx = check_optimizer(tx)
        if isinstance(tx, optax.MultiSteps):
            tx = tx.gradient_transformation()
        self._tx, self._advice = optax.with_extra_args_support(tx), advice

    def init(self, params: PyTree) -> PyTree:
        """The state for parameters."""
        with _explained("tx.init is given the parameters alone"):
            return self._tx.init(_floating(params))

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, /, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """The updates of the parameters, and the new state."""
        free = None if params is None else _floating(params)
        with _explained(self._advice):
            updates, state = self._tx.update(_floating(grads), state, free, **extra)
        return _with_integers(updates, grads, params), state


def of_init(
    leaves: Sequence[Argument], places: Sequence[Where], shardings: Sequence[Sharding]
) -> Placement:
    """The state of an optimizer is where its parameters are."""
    placement = where_computed(leaves, places, shardings)
    return dataclasses.replace(placement, stay=False)


def of_update(
    leaves: Sequence[Argument], places: Sequence[Where], shardings: Sequence[Sharding]
) -> Placement:
    """Updates and a new state are where parameters and gradients are.

    These are the first and the third argument, the second is the state. A leaf of the
    state that belongs to none of them, such as a count, belongs to all.
    """
    pairs = list(zip(leaves, places, strict=True))
    own = [place if each.of in (0, 2) else None for each, place in pairs]
    like = ByPath([(path, leaf) for _, path, leaf in leaves], own, shardings)
    settled = [
        None if each.of == 1 and like.place(each.path) is None else place
        for each, place in pairs
    ]
    return Placement(settled, lambda result: like.of(*result))


def _floating(tree: PyTree) -> PyTree:
    """The tree with nothing in place of integers."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def _with_integers(updates: PyTree, grads: PyTree, params: PyTree) -> PyTree:
    """Updates with zeros in place of what `_floating` left out."""
    if all(map(is_inexact, jax.tree.leaves((grads, params)))):
        return updates
    if params is None:
        raise ValueError(
            "a gradient of integers says neither their dtype nor their device; give "
            "the parameters too: tx.update(grads, state, params)"
        )
    return jax.tree.map(
        lambda own, leaf: (
            own if leaf is None or is_inexact(leaf) else jnp.zeros_like(leaf)
        ),
        updates,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


@contextmanager
def _explained(missing: str) -> Iterator[None]:
    """Adds to an error of an optimizer what to type.

    Args:
      missing: the same, where it needs more arguments.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        is_missing = isinstance(error, TypeError) and "missing" in text
        if is_missing or "must be provided" in text:  # as optax says it
            error.add_note(missing)
        if "tuple" in text and any(w in text for w in ("dict", "indices", "'items'")):
            error.add_note(
                "parameters and gradients are a tuple with one entry per layer; what "
                "needs a dict, such as flatten_dict in a mask, takes each entry: "
                "mask=lambda params: tuple(map(mask_of_entry, params))"
            )
        raise

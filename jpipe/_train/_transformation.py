"""An optax optimizer as two functions of trees, evaluated where the parameters are."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from .._arguments._static import StaticArgument
from .._instructions._graph import NOWHERE
from .._instructions._transfer import Device
from .._jaxprs._jaxpr import is_inexact
from .._jaxprs._pieces import Pieces
from .._placed._jit import Jitted
from .._placed._mirrored_places import ArgumentLeaf, MirroredPlaces, mirrored_pieces
from .._placed._placed_function import LeafPlacement, place_results

PyTree = Any


def check_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns ``tx`` if it is an optax transformation.

    Raises:
      TypeError: if it is not.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", "")
        if name and getattr(optax, name, None) is tx:
            raise TypeError(
                f"tx=optax.{name} is a function that makes an optimizer: call it, as "
                f"in optax.adamw(1e-3)"
            )
        raise TypeError(
            f"tx={reprlib.repr(tx)} is a {type(tx).__name__}; needs an optax "
            f"optimizer, such as optax.adamw(1e-3)"
        )
    return tx


class Transformation:
    """``init`` and ``update`` of an optimizer, with errors that name what to type.

    Leaves of integers are not parameters: the optimizer does not see them, and their
    updates are zeros. Leaves that are not trained are ``None``, as for optax.

    Args:
      tx: the optax transformation.
      advice: the note for an optimizer that needs more than gradients, state and
        parameters.

    Raises:
      TypeError: if ``tx`` is not an optax transformation.
    """

    def __init__(self, tx: Any, advice: str) -> None:
        tx = check_optimizer(tx)
        if isinstance(tx, optax.MultiSteps):
            tx = tx.gradient_transformation()
        self._tx = optax.with_extra_args_support(tx)
        self._advice = advice

    def init(self, params: PyTree) -> PyTree:
        """The state for parameters."""
        with _explained("tx.init is given the parameters alone"):
            return self._tx.init(_floating(params))

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, /, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """The updates of the parameters, and the new state."""
        with _explained(self._advice, grads):
            updates, new_state = self._tx.update(
                _floating(grads), state, _floating(params), **extra
            )
        return _with_integers(updates, grads, params), new_state


def optimizer(
    tx: Any, devices: Sequence[Device]
) -> optax.GradientTransformationExtraArgs:
    """See `Pipeline.optimizer`."""
    transformation = Transformation(
        tx,
        "what an optimizer needs besides gradients, state and parameters is given by "
        "name: tx.update(grads, state, params, value=loss)",
    )
    init = Jitted(
        transformation.init,
        devices,
        name="optimizer_init",
        blame="raised by tx.init",
        rule=place_init,
    )
    jitted_update = Jitted(
        transformation.update,
        devices,
        name="optimizer_update",
        blame="raised by tx.update",
        rule=place_update,
    )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        for name, value in extra.items():
            if _is_function(value):
                extra[name] = StaticArgument(type(value), value)
        return jitted_update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_function(value: Any) -> bool:
    """True if a value is a function, not a pytree that can be called."""
    return callable(value) and jax.tree.leaves(value) == [value]


def place_init(leaves: Sequence[ArgumentLeaf]) -> LeafPlacement:
    """The state of an optimizer is where its parameters are."""
    return replace(
        place_results(leaves, stay=False), result_pieces=_pieces_or_whole(leaves)
    )


def place_update(leaves: Sequence[ArgumentLeaf]) -> LeafPlacement:
    """Updates and a new state are where parameters and gradients are.

    These are the first and the third argument, the second is the state. A leaf of the
    state that belongs to none of them, such as a count, is computed in each place.
    """
    mirrored = MirroredPlaces([leaf for leaf in leaves if leaf.argument_key in (0, 2)])
    places: list[int] = []
    for leaf in leaves:
        is_state = leaf.argument_key == 1
        is_count = is_state and mirrored.place_of(leaf.path) < 0
        places.append(NOWHERE if is_count else leaf.place)
    return LeafPlacement(
        places,
        lambda result: mirrored.of(*result),
        result_pieces=_pieces_or_whole(leaves),
    )


def _pieces_or_whole(
    leaves: Sequence[ArgumentLeaf],
) -> Callable[[PyTree], dict[int, Pieces | None]]:
    """Makes ``specs of a result -> {index of a leaf: its pieces, or None}``.

    A leaf of another shape than its parameter, such as a factor, is whole: `Pipeline.
    place`, which does not know the optimizer, puts a state where a step needs it.
    """
    of = mirrored_pieces(leaves)

    def pieces_or_whole(result: PyTree) -> dict[int, Pieces | None]:
        pieces = of(result)
        return {i: pieces.get(i) for i in range(len(jax.tree.leaves(result)))}

    return pieces_or_whole


def _floating(tree: PyTree) -> PyTree:
    """The tree with ``None`` in place of integers."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


def _with_integers(updates: PyTree, grads: PyTree, params: PyTree) -> PyTree:
    """Updates with zeros in place of the leaves that `_floating` left out."""
    if all(map(is_inexact, jax.tree.leaves((grads, params)))):
        return updates
    if params is None:
        raise ValueError(
            "a gradient of integers has neither their dtype nor their device; give "
            "the parameters too: tx.update(grads, state, params)"
        )
    return jax.tree.map(
        lambda update, param: (
            update if param is None or is_inexact(param) else jnp.zeros_like(param)
        ),
        updates,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


@contextmanager
def _explained(advice: str, grads: PyTree = ()) -> Iterator[None]:
    """Adds advice to an error of an optimizer.

    Args:
      advice: the note for an optimizer that needs more arguments.
      grads: the gradients, some of which may be ``None``.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        flat = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda g: g is None)
        gaps = [f"grads{keystr(path)}" for path, leaf in flat if leaf is None]
        if gaps and "structure" in text:  # as `jax.tree.map` words it
            raise ValueError(
                f"{len(gaps)} gradients are None, as trainable= leaves them: {gaps[0]} "
                f"is the first; give parameters and a state with the same gaps: free = "
                f"jax.tree.map(lambda g, p: None if g is None else p, grads, params, "
                f"is_leaf=lambda g: g is None), opt_state = tx.init(free), and "
                f"tx.update(grads, opt_state, free)"
            ) from error
        is_missing = isinstance(error, TypeError) and "missing" in text
        if is_missing or "must be provided" in text:  # as optax words it
            error.add_note(advice)
        is_about_dicts = any(word in text for word in ("dict", "indices", "'items'"))
        if "tuple" in text and is_about_dicts:
            error.add_note(
                "parameters and gradients are a tuple with one entry per layer; what "
                "needs a dict, such as flatten_dict in a mask, takes each entry: "
                "mask=lambda params: tuple(map(mask_of_entry, params))"
            )
        raise

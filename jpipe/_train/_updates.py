"""Optimizers as functions of trees that are spread over devices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from .._functions._weights import is_inexact
from .._instructions._transfer import Device
from .._spread._homes import Home, homes, paths, places
from .._spread._placed import Placement
from .._spread._spread import Spread
from ._optimizer import explained
from ._step import check_optimizer

PyTree = Any


def optimizer(
    tx: Any, devices: Sequence[Device]
) -> optax.GradientTransformationExtraArgs:
    """See `Pipeline.optimizer`."""
    tx = check_optimizer(tx)
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    full = optax.with_extra_args_support(tx)

    def init_free(params: PyTree) -> PyTree:
        with explained("tx.init is given the parameters alone"):
            return full.init(_floating(params))

    def update_free(
        functions: Sequence[tuple[str, Any]],
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        extra: dict[str, Any],
    ) -> tuple[PyTree, PyTree]:
        free = None if params is None else _floating(params)
        with (
            _gaps_explained(grads),
            explained(
                "what an optimizer needs beside gradients, state and parameters is "
                "given by name: tx.update(grads, state, params, value=loss)"
            ),
        ):
            updates, state = full.update(
                _floating(grads), state, free, **extra, **dict(functions)
            )
        return _with_integers(updates, grads, params), state

    spread_init = Spread(
        init_free,
        devices,
        find_placement=_of_init,
        name="optimizer_init",
        blame="raised by tx.init",
    )
    spread_update = Spread(
        update_free,
        devices,
        static=(0,),
        find_placement=_of_update,
        name="optimizer_update",
        blame="raised by tx.update",
    )

    def init(params: PyTree) -> PyTree:
        return spread_init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        functions = {name: value for name, value in extra.items() if _is_static(value)}
        given = {name: value for name, value in extra.items() if name not in functions}
        return spread_update(tuple(functions.items()), updates, state, params, given)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_static(value: Any) -> bool:
    """Whether something is a function, not a pytree that can be called."""
    return callable(value) and jax.tree.leaves(value) == [value]


def _floating(tree: PyTree) -> PyTree:
    """The tree with nothing in place of integers, which are not parameters."""
    return jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree)


@contextmanager
def _gaps_explained(grads: PyTree) -> Iterator[None]:
    """Says what to give beside gradients that are None, where an optimizer fails."""
    try:
        yield
    except ValueError as error:
        flat = jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda g: g is None)
        gaps = [f"grads{keystr(path)}" for path, leaf in flat if leaf is None]
        if not gaps or "structure" not in str(error):  # as `jax.tree.map` says it
            raise
        raise ValueError(
            f"{len(gaps)} gradients are None, as trainable= leaves them: {gaps[0]} is "
            f"the first; give parameters and a state with the same gaps: free = "
            f"jax.tree.map(lambda g, p: None if g is None else p, grads, params, "
            f"is_leaf=lambda g: g is None), opt_state = tx.init(free), and "
            f"tx.update(grads, opt_state, free)"
        ) from error


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


def _of_init(arguments: PyTree, at: Sequence[Home]) -> Placement:
    """The state of an optimizer is where its parameters are."""
    found = [path[2:] for path in paths(arguments)]
    place = places(zip(found, at, strict=True))
    return Placement(at, lambda state: homes(state, place))


def _of_update(arguments: PyTree, at: Sequence[Home]) -> Placement:
    """Updates and state are where the parameters are, or the gradients.

    A leaf of the state that belongs to none of them, such as a count, belongs to all.
    """
    grads, state, params, _ = range(4)
    flat = [(path[1].idx, path[2:]) for path in paths(arguments)]
    place = places(
        (path, home)
        for (number, path), home in zip(flat, at, strict=True)
        if number in (grads, params)
    )
    own = iter(homes(arguments[0][state], place))
    settled = [
        None if number == state and next(own) is None else home
        for (number, _), home in zip(flat, at, strict=True)
    ]
    return Placement(settled, lambda result: homes(result, place))

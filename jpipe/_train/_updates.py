"""`pipe.optimizer`: an optax optimizer for parameters on several devices."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from .._instructions._transfer import Device
from .._placed._jit import Jitted, Static
from ._transformation import Transformation, of_init, of_update

PyTree = Any

_BY_NAME = (
    "what an optimizer needs beside gradients, state and parameters is given by name: "
    "tx.update(grads, state, params, value=loss)"
)


def optimizer(
    tx: Any, devices: Sequence[Device]
) -> optax.GradientTransformationExtraArgs:
    """See `Pipeline.optimizer`."""
    own = Transformation(tx, _BY_NAME)
    names = {"name": "optimizer_init", "blame": "raised by tx.init"}
    init = Jitted(own.init, devices, rule=of_init, **names)
    names = {"name": "optimizer_update", "blame": "raised by tx.update"}
    jitted = Jitted(own.update, devices, rule=of_update, **names)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        given = {
            name: Static.of(value) if _is_static(value) else value
            for name, value in extra.items()
        }
        return jitted(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(lambda params: init(params), update)


def _is_static(value: Any) -> bool:
    """Whether something is a function, not a pytree that can be called."""
    return callable(value) and jax.tree.leaves(value) == [value]

"""Makes numbers that are folded into keys inputs: so equal draws are equal programs.

``(*inputs) -> outputs`` becomes ``(*inputs, *folded numbers) -> outputs``.
"""

from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr


def lift_folded_numbers(
    closed: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, list[np.ndarray]]:
    """Makes literals that are folded into keys inputs, after all other inputs.

    Flax folds a number into a key for each variable and each dropout. Equal blocks
    differ in nothing else.

    Returns:
      The jaxpr, and the numbers.
    """
    reached = _jaxpr.descendants(closed.jaxpr, closed.jaxpr.invars)

    def is_fold(eqn: core.JaxprEqn) -> bool:
        if eqn.primitive.name != "random_fold_in":
            return False
        key, number = list[Any](eqn.invars)
        # `jax.random.fold_in` takes one key, not those of a `nn.vmap`.
        return key in reached and not key.aval.shape and _is_literal(number)

    folds = [eqn for eqn in closed.jaxpr.eqns if is_fold(eqn)]
    if not folds:
        return closed, []
    literals: list[Any] = [eqn.invars[1] for eqn in folds]
    numbers: list[Any] = [np.asarray(x.val, x.aval.dtype) for x in literals]
    # id of an equation that folds -> the index of its number
    number_index = {id(eqn): i for i, eqn in enumerate(folds)}
    count = len(closed.jaxpr.invars)

    def run(*args: Any) -> list[Any]:
        def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
            if id(eqn) not in number_index:
                return None
            number = args[count + number_index[id(eqn)]]
            return lambda operands: [jax.random.fold_in(operands[0], number)]

        return _jaxpr.evaluate(closed, args[:count], rule)

    return _jaxpr.retrace(closed, run, *numbers), numbers


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)

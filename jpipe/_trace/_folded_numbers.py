"""Numbers that are folded into keys, as inputs: so equal draws are equal programs."""

from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr


def lift_folded_numbers(
    closed: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, list[np.ndarray]]:
    """A jaxpr that is given such numbers, after its own inputs, and these.

    Flax folds a number into a key for each variable and each dropout. Equal blocks
    differ in nothing else.
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
    place = {id(eqn): i for i, eqn in enumerate(folds)}
    count = len(closed.jaxpr.invars)

    def run(*args: Any) -> list[Any]:
        def rule(eqn: core.JaxprEqn) -> _jaxpr.Rule | None:
            if id(eqn) not in place:
                return None
            number = args[count + place[id(eqn)]]
            return lambda operands: [jax.random.fold_in(operands[0], number)]

        return _jaxpr.evaluate(closed, args[:count], rule)

    return _jaxpr.retrace(closed, run, *numbers), numbers


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)

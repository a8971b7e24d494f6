"""Numbers that are folded into keys, as inputs: so equal draws are equal programs."""

from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._jaxprs import _jaxpr


def lifted(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[np.ndarray]]:
    """A jaxpr that is given such numbers, after its own inputs, and these.

    Flax folds a number into a key for each variable and each dropout. Equal blocks
    differ in nothing else.
    """
    reached, folds = set(closed.jaxpr.invars), list[core.JaxprEqn]()
    for eqn in closed.jaxpr.eqns:
        if not reached.isdisjoint(_jaxpr.variables(eqn.invars)):
            reached.update(eqn.outvars)
            is_fold = eqn.primitive.name == "random_fold_in"
            kind: Any = eqn.invars[0].aval
            # `jax.random.fold_in` takes one key, not those of a `nn.vmap`.
            if is_fold and not kind.shape and isinstance(eqn.invars[1], core.Literal):
                folds.append(eqn)
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

    specs = map(_jaxpr.spec, closed.in_avals)
    return jax.make_jaxpr(run)(*specs, *numbers), numbers

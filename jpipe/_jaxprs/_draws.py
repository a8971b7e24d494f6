"""Which arguments decide what random numbers are drawn."""

from collections.abc import Sequence

from jax.extend import core

from . import _jaxpr

_SEEDS = {"random_seed", "random_fold_in", "random_wrap", "threefry2x32"}


def seeds(closed: core.ClosedJaxpr, argument: int) -> bool:
    """Whether an argument is made a part of a random key.

    Args:
      closed: the jaxpr.
      argument: the number of the argument.
    """
    count = len(closed.jaxpr.invars)
    return _seeds(closed, [i == argument for i in range(count)])


def _seeds(closed: core.ClosedJaxpr, inputs: Sequence[bool]) -> bool:
    reached = _jaxpr.depending_on(closed, inputs)
    for eqn in closed.jaxpr.eqns:
        given = [not reached.isdisjoint(_jaxpr.variables([x])) for x in eqn.invars]
        if not any(given):
            continue
        if eqn.primitive.name in _SEEDS:
            return True
        for inner in _jaxpr.inside(eqn):
            count = len(inner.jaxpr.invars)
            # The last arguments are those of a body, as of one branch or a loop.
            own = given[len(given) - count :] if count <= len(given) else [True] * count
            if _seeds(inner, own):
                return True
    return False

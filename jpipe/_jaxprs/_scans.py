"""Scans with another body, or with operands in other roles.

    constants, carry, xs -> carry, ys

An iteration carries some operands of a scan, goes along some, and has the others as
constants.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core


def run_scan(
    body: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    *,
    carried: Sequence[int],
    along: Sequence[int],
    like: core.JaxprEqn,
) -> list[Any]:
    """Evaluates a scan.

    Args:
      body: ``(*operands) -> (*carry, *ys)``, the operands as an iteration has them.
      operands: the operands; those that the body does not read may have any shape.
      carried: the indices of the operands that are carried.
      along: the indices of the operands along whose first axis the scan goes.
      like: a scan of the same length, direction and unrolling.

    Returns:
      The last carry, and the ys.
    """

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
        args = list(operands)
        for index, value in zip([*carried, *along], [*carry, *xs], strict=True):
            args[index] = value
        results = body(*args)
        return results[: len(carried)], results[len(carried) :]

    params: Any = like.params
    carry, ys = jax.lax.scan(
        step,
        [operands[i] for i in carried],
        [operands[i] for i in along],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]

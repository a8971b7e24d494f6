"""Whether a loss function is what its micro-batches make of it: it is run both ways."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._check import _compare
from .._check._function import Function, Given, Result, host
from .._check._report import Checked, CheckReport
from .._instructions._transfer import one_of
from .._layers._half import half_key
from ._program import is_single_key
from ._sliced import Sliced

PyTree = Any
# So much of the largest gradient counts at least.
_OF_ALL = 1e-2
_ADVICE = (
    "Type the reduction that fits: 'sum', or 'weighted', with (total, weight) in place "
    "of a quotient of two sums, or 'microbatch_mean'; num_microbatches=1 takes any loss"
)


def check(
    sliced: Sliced,
    params: PyTree,
    args: Sequence[PyTree],
    parts: Sequence[int] | None,
    tolerance: float | None,
) -> CheckReport:
    """See `FunctionGradient.check`."""
    count = sliced.num_examples(args)
    if parts is None:
        first = max(1, count // 3)
        parts = (first, count - first)
    if len(parts) < 2 or min(parts) < 1 or sum(parts) != count:
        raise ValueError(
            f"parts={tuple(parts)}: needs the numbers of examples in two micro-batches "
            f"or more, together the {count} of the batch"
        )
    given = jax.tree.map(host, (params, jax.tree.map(_without_chance, tuple(args))))
    with (
        jax.default_device(one_of(sliced.devices[0])),
        jax.default_matmul_precision("highest"),
    ):
        (whole, _, gradient), _ = _run(sliced, given, (count,))
        (value, _, gradients), limit = _run(sliced, given, tuple(parts))
    limit = tolerance or limit
    # Some gradients are zero but for rounding.
    least = _OF_ALL * _compare.size(gradient)
    differences = [
        _compare.compare("outputs", whole, [value], [count], limit),
        _compare.compare(
            "gradients", gradient, [gradients], [count], limit, least=least
        ),
    ]
    name = f"the loss with reduction={sliced.reduction!r}"
    compared, notes = ("outputs", "gradients"), (f"{whole:.6g}",)
    one = Checked(name, tuple(filter(None, differences)), compared, notes, _ADVICE)
    return CheckReport(tuple(parts), (), one)


def _run(sliced: Sliced, given: Given, sizes: Sequence[int]) -> tuple[Result, float]:
    """The loss of such micro-batches and its gradient, and how far they may be apart.

    Raises:
      ValueError: if there is no gradient.
    """
    params, args = given
    loss = sliced.composed(params, args, sizes)
    function = Function(lambda params, args: (loss(params, args), ()), [given])
    (result,) = function([given], [[np.ones((), function.made[0].dtype)]])
    if function.error:
        raise ValueError(f"the loss cannot be differentiated: {function.error}")
    return result, function.limit


def _without_chance(leaf: Any) -> Any:
    return half_key() if hasattr(leaf, "dtype") and is_single_key(leaf) else leaf

"""Whether a loss function is what its micro-batches make of it: it is run both ways."""

from collections.abc import Sequence
from typing import Any

import jax

from .._check._function import Function, differentiated, host
from .._check._loss import ADVICE, compared
from .._check._report import CheckReport, CheckResult, check_microbatch_sizes
from .._instructions._transfer import one_of
from .._layers._half import half_key
from ._program import is_single_key
from ._sliced import Sliced

PyTree = Any
# So much of the largest gradient counts at least.
_OF_ALL = 1e-2


def check(
    sliced: Sliced,
    params: PyTree,
    args: Sequence[PyTree],
    microbatch_sizes: Sequence[int] | None,
    tolerance: float | None,
) -> CheckReport:
    """See `FunctionGradient.check`."""
    count = sliced.num_examples(args)
    if microbatch_sizes is None:
        first = max(1, count // 3)
        microbatch_sizes = first, count - first
    microbatch_sizes = check_microbatch_sizes(microbatch_sizes, count)
    args = jax.tree.map(_without_chance, tuple(args))
    given: tuple[PyTree, PyTree] = jax.tree.map(host, (params, args))
    with (
        jax.default_device(one_of(sliced.devices[0])),
        jax.default_matmul_precision("highest"),
    ):
        at_once = differentiated(sliced.composed(*given, (count,)))
        in_parts = differentiated(sliced.composed(*given, microbatch_sizes))
        function = Function(at_once, in_parts, *given)
        axes = [None] * len(jax.tree.leaves(params))
        whole, found = compared(
            function, given, axes, microbatch_sizes, tolerance, _OF_ALL
        )
    if function.error:
        raise ValueError(f"the loss cannot be differentiated: {function.error}")
    name = f"the loss with reduction={sliced.reduction!r}"
    what = "outputs", "gradients"
    one = CheckResult(name, found, what, (f"{whole:.6g}",), ADVICE)
    return CheckReport(microbatch_sizes, (), one)


def _without_chance(leaf: Any) -> Any:
    return half_key() if hasattr(leaf, "dtype") and is_single_key(leaf) else leaf

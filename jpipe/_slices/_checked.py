"""Whether a loss function is what its micro-batches make of it: it is run both ways."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import _compare
from .._check._report import Checked, CheckReport
from .._functions._weights import is_inexact
from .._instructions._transfer import one_of
from .._jaxprs import _flow
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
    count = sliced.num_examples(params, args)
    if parts is None:
        first = max(1, count // 3)
        parts = (first, count - first)
    if len(parts) < 2 or min(parts) < 1 or sum(parts) != count:
        raise ValueError(
            f"parts={tuple(parts)}: needs the numbers of examples in two micro-batches "
            f"or more, together the {count} of the batch"
        )
    device = one_of(sliced.devices[0])
    args = jax.tree.map(_without_chance, tuple(args))
    leaves, tree = jax.tree.flatten(jax.tree.map(_on_host, params))
    free = [is_inexact(leaf) for leaf in leaves]
    found = []
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        args = jax.tree.map(_on_host, args)
        for sizes in ((count,), tuple(parts)):
            loss = sliced.composed(tree.unflatten(leaves), args, sizes)
            found.append(_value_and_grad(loss, tree, leaves, free, args))
        closed = jax.make_jaxpr(loss)(tree.unflatten(leaves), args)
    limit = tolerance or _compare.tolerance(_flow.dtypes(closed))
    (whole, gradient), (value, gradients) = found
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


def _value_and_grad(
    loss: Any, tree: Any, leaves: Sequence[Any], free: Sequence[bool], args: Any
) -> tuple[Any, Any]:
    def of_the_free(chosen: Sequence[Any], args: Any) -> Any:
        given = iter(chosen)
        pairs = zip(leaves, free, strict=True)
        return loss(tree.unflatten([next(given) if y else x for x, y in pairs]), args)

    chosen = [leaf for leaf, yes in zip(leaves, free, strict=True) if yes]
    value, grads = jax.jit(jax.value_and_grad(of_the_free))(chosen, args)
    paths = jax.tree_util.tree_leaves_with_path(tree.unflatten(leaves))
    names = [path for (path, _), yes in zip(paths, free, strict=True) if yes]
    named = {
        jax.tree_util.keystr(path): g for path, g in zip(names, grads, strict=True)
    }
    return jax.tree.map(np.asarray, (value, named))


def _without_chance(leaf: Any) -> Any:
    return half_key() if hasattr(leaf, "dtype") and is_single_key(leaf) else leaf


def _on_host(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else np.asarray(leaf)

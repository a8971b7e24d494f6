"""Ways in which a loss function adds a penalty: a term that follows from no example."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
# ``(loss, parameters) -> loss``
AddPenalty = Callable[[jax.Array, PyTree], jax.Array]


def penalty_of(params: PyTree, dtype: Any) -> jax.Array:
    """Smooth, and small beside the errors of a few examples."""
    leaves = [jnp.cos(leaf.astype(dtype)).mean() for leaf in jax.tree.leaves(params)]
    return 0.1 * sum(leaves, start=jnp.zeros((), dtype))


def plainly(loss: jax.Array, params: PyTree) -> jax.Array:
    return loss + penalty_of(params, loss.dtype)


def in_scan(loss: jax.Array, params: PyTree) -> jax.Array:
    """Half of it in each of two iterations."""

    def step(loss, _):
        return loss + 0.5 * penalty_of(params, loss.dtype), None

    return jax.lax.scan(step, loss, None, length=2)[0]


def beside_the_loss(loss: jax.Array, params: PyTree) -> jax.Array:
    """As another carry of the same loop."""

    def step(_, sums):
        loss, penalty = sums
        return loss * 1.0, penalty + 0.5 * penalty_of(params, loss.dtype)

    return sum(jax.lax.fori_loop(0, 2, step, (loss, jnp.zeros_like(loss))))


def in_ref(loss: jax.Array, params: PyTree) -> jax.Array:
    total = jax.new_ref(loss)
    total[...] += penalty_of(params, loss.dtype)
    return total[...]


PENALTIES: dict[str, AddPenalty] = {
    "plainly": plainly,
    "in a scan": in_scan,
    "in a checkpoint": jax.checkpoint(plainly),
    "in a scan in a checkpoint": jax.checkpoint(in_scan),
    "beside the loss": beside_the_loss,
    "in a ref": in_ref,
}

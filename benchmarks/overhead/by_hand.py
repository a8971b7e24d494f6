"""Steps that a user writes by hand for one device: the other sides of `one_stage`.

All of them sum the gradients of M micro-batches and update once. They differ in what
XLA is given: one program with a loop, one without, or a program per micro-batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from ..experiment import mean_cross_entropy

PyTree = Any
Step = Callable[..., tuple[PyTree, PyTree, jax.Array]]


class _Accumulation:
    """What every step does, as functions to be compiled together or apart."""

    def __init__(
        self, layers: Sequence[Any], tx: optax.GradientTransformation, number: int
    ) -> None:
        self.layers, self.tx, self.number = layers, tx, number

    def loss(self, params: PyTree, x: Any, targets: jax.Array) -> jax.Array:
        for layer, own in zip(self.layers, params, strict=True):
            is_module = isinstance(layer, nn.Module)
            x = layer.apply({"params": own}, x) if is_module else layer(x)
        return mean_cross_entropy(x, targets)

    def zeros(self, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))

    def split(self, leaf: jax.Array) -> jax.Array:
        return leaf.reshape(self.number, -1, *leaf.shape[1:])

    def add(self, params: PyTree, sums: PyTree, part: Any) -> PyTree:
        new = jax.value_and_grad(self.loss)(params, *part)
        return jax.tree.map(jnp.add, sums, new)

    def update(self, params: PyTree, opt_state: PyTree, sums: PyTree) -> Any:
        value, grads = jax.tree.map(lambda leaf: leaf / self.number, sums)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value


def scan_step(
    layers: Sequence[Any],
    tx: optax.GradientTransformation,
    number: int,
    unroll: bool = False,
) -> Step:
    """One jit, `lax.scan` over the micro-batches.

    XLA on CPU runs a convolution inside a loop far slower than outside, so the scan
    can be unrolled; then XLA may also run micro-batches side by side.
    """
    work = _Accumulation(layers, tx, number)

    def step(params: PyTree, opt_state: PyTree, x: jax.Array, targets: jax.Array):
        def body(sums: PyTree, part: Any) -> Any:
            return work.add(params, sums, part), None

        each = work.split(x), work.split(targets)
        sums, _ = jax.lax.scan(body, work.zeros(params), each, unroll=unroll)
        return work.update(params, opt_state, sums)

    return jax.jit(step, donate_argnums=(0, 1))


def calls_step(
    layers: Sequence[Any],
    tx: optax.GradientTransformation,
    number: int,
    in_loop: bool = False,
) -> Step:
    """A call per micro-batch, as jpipe makes them, and one for the update.

    Args:
      layers: linen modules and functions.
      tx: the optimizer.
      number: of micro-batches.
      in_loop: put the work of each call into a loop that turns once. XLA cannot know
        how often it turns; and each turn takes its own part of the micro-batches that
        it is given, for what is the same in all turns XLA would do before the loop.
    """
    work = _Accumulation(layers, tx, number)

    def add(params: PyTree, sums: PyTree, part: Any, turns: jax.Array) -> PyTree:
        def body(turn: Any, sums: PyTree) -> PyTree:
            return work.add(params, sums, [leaf[turn] for leaf in part])

        return jax.lax.fori_loop(0, turns, body, sums) if in_loop else body(0, sums)

    def cut(x: jax.Array, targets: jax.Array) -> list[Any]:
        each = (jnp.split(work.split(leaf), number) for leaf in (x, targets))
        return list(zip(*each, strict=True))

    jit_add = jax.jit(add, donate_argnums=1)
    jit_update = jax.jit(work.update, donate_argnums=(0, 1))
    jit_zeros, jit_cut = jax.jit(work.zeros), jax.jit(cut)
    once = jnp.int32(1)

    def step(params: PyTree, opt_state: PyTree, x: jax.Array, targets: jax.Array):
        sums = jit_zeros(params)
        for part in jit_cut(x, targets):
            sums = jit_add(params, sums, part, once)
        return jit_update(params, opt_state, sums)

    return step


STEPS: dict[str, Callable[..., Step]] = {
    "scan": scan_step,
    "unrolled": partial(scan_step, unroll=True),
    "calls": calls_step,
    "calls_in_loop": partial(calls_step, in_loop=True),
}

"""What the first call and a step take if constants of the library had other values.

Run it with ``python -m benchmarks.overhead.constants``, or with names of constants. All
on one CPU device; the values of a constant in turns, the best of several steps.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jpipe
from jpipe._jaxprs import _min_cut
from jpipe._lower import _microbatch_inputs, _prologue

from ..markdown import table

_MANY = 2**20


class Constant(NamedTuple):
    """A constant, and a program that it tells in.

    Attributes:
      module: the module that holds it.
      values: other values than its own, and itself.
      make: ``() -> (gradient function, its arguments)``, made anew for each value.
    """

    module: ModuleType
    values: Sequence[int]
    make: Callable[[], tuple[Any, tuple[Any, ...]]]


def _chain() -> tuple[Any, tuple[Any, ...]]:
    """Long sums of narrow layers, 96 in a stage: ``x += tanh(tanh(x) @ w)``."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jnp.tanh(jnp.tanh(x) @ w)
        return jnp.mean(x**2)

    params = [jax.random.normal(key, (8, 8)) / 9 for key in _keys(192)]
    x = jax.random.normal(jax.random.key(1), (2 * 4096, 8))
    return _gradient(loss, 2, num_stages=2), (params, x)


def _many_microbatches() -> tuple[Any, tuple[Any, ...]]:
    """A tiny layer on many micro-batches of several arrays."""

    def loss(w: jax.Array, *xs: jax.Array) -> jax.Array:
        return jnp.mean(sum(jnp.tanh(x @ w) for x in xs))

    xs = [jax.random.normal(key, (512, 8)) for key in _keys(4)]
    return _gradient(loss, 256, num_stages=1), (jnp.eye(8), *xs)


def _many_loss_weights() -> tuple[Any, tuple[Any, ...]]:
    """The same, of a weighted loss, whose weights follow from a mask."""

    def loss(w: jax.Array, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
        return jnp.sum(jnp.tanh(x @ w) * mask[:, None]), jnp.sum(mask)

    x = jax.random.normal(jax.random.key(1), (512, 8))
    mask = jnp.ones(512)
    grad_fn = _gradient(loss, 256, num_stages=1, reduction="weighted")
    return grad_fn, (jnp.eye(8), x, mask)


def _keys(number: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), number)


def _gradient(
    loss: Any, num_microbatches: int, *, num_stages: int, **options: Any
) -> Any:
    return jpipe.value_and_grad(
        loss,
        num_microbatches,
        num_stages=num_stages,
        devices=jax.devices()[:1] * num_stages,
        **options,
    )


CONSTANTS = {
    "_CHAIN": Constant(_min_cut, (4, 8, 12, 24, _MANY), _chain),
    "_MICROBATCHES_PER_SPLIT": Constant(
        _microbatch_inputs, (1, 4, 16, 64, _MANY), _many_microbatches
    ),
    "_LOSS_WEIGHTS_PER_CALL": Constant(
        _prologue, (1, 4, 16, 64, _MANY), _many_loss_weights
    ),
}


def measure(name: str, rounds: int) -> list[list[str]]:
    """The seconds of the first call, and of the best step, for each value."""
    constant = CONSTANTS[name]
    first_seconds = dict[int, float]()
    steps = dict[int, Callable[[], Any]]()
    default = getattr(constant.module, name)
    for value in constant.values:
        setattr(constant.module, name, value)
        grad_fn, args = constant.make()
        placed = grad_fn.place(*args)
        begin = time.perf_counter()
        jax.block_until_ready(grad_fn(placed, *args[1:]))
        first_seconds[value] = time.perf_counter() - begin
        steps[value] = lambda grad_fn=grad_fn, placed=placed, args=args: grad_fn(
            placed, *args[1:]
        )
    setattr(constant.module, name, default)

    best = dict.fromkeys(constant.values, float("inf"))
    for _ in range(rounds):
        for value, step in steps.items():
            begin = time.perf_counter()
            jax.block_until_ready(step())
            best[value] = min(best[value], time.perf_counter() - begin)
    return [
        [
            f"`{name}`",
            "none" if value == _MANY else f"{value}",
            f"{first_seconds[value]:.2f}",
            f"{1e3 * best[value]:.1f}",
        ]
        for value in constant.values
    ]


def main() -> None:
    """Measures what was named, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CONSTANTS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = list[list[str]]()
    for name in options.names:
        rows += measure(name, options.rounds)
    print(table(["constant", "value", "first call, s", "a step, ms"], rows))


if __name__ == "__main__":
    main()

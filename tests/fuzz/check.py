"""What is asked of a random program: the numbers of one device, and the same bits.

Its names, and those of `layers`, are all that the text of a program needs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jpipe

from .. import reference as ref
from . import by_hand as hand
from .layers import *  # noqa: F403
from .layers import WORDS
from .layers import __all__ as vocabulary

__all__ = [
    "check",
    "floats",
    "jax",
    "jnp",
    "jpipe",
    "nn",
    "time_major",
    "tokens",
    "tree",
    "with_memory",
    *vocabulary,
]

PyTree = Any
KEY = jax.random.key
STEPS = 3

# Where two orders of the same sums may differ, as a part of the largest entry.
CLOSE = {
    jnp.dtype(jnp.float64): ref.FLOAT64,
    jnp.dtype(jnp.float32): 1e-4,
    jnp.dtype(jnp.bfloat16): 2**-4,
}

# Smooth where gradients are rounding errors, but for the last ones.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)
    ),
    "schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.02, 0.01, 3)
    ),
    "skipping": lambda: optax.apply_if_finite(optax.sgd(0.02), 3),
    "every other": lambda: optax.MultiSteps(
        optax.sgd(0.02), 2, accumulator_dtype=jnp.float64
    ),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
}


# ---------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """A mini-batch, and where its examples are."""

    size: int
    x: PyTree
    targets: PyTree
    dtype: Any
    in_axes: Any = 0

    def part(self, start: int, stop: int) -> hand.Part:
        """Some of its examples."""

        def cut(leaf: Any, axis: int | None) -> Any:
            return leaf if axis is None else np.take(leaf, range(start, stop), axis)

        axes = self.in_axes
        if axes in (0, 1):
            axes = jax.tree.map(lambda _: self.in_axes, self.x)
        x = [
            cut(leaf, axis)
            for leaf, axis in zip(
                jax.tree.leaves(self.x),
                jax.tree.leaves(axes, is_leaf=lambda axis: axis is None),
                strict=True,
            )
        ]
        targets = jax.tree.map(lambda leaf: leaf[start:stop], self.targets)
        return stop - start, jax.tree.unflatten(jax.tree.structure(self.x), x), targets


def _batch(size: int, dtype: Any, x: PyTree, in_axes: Any = 0) -> Batch:
    rng = np.random.default_rng(size)
    wide = np.float64 if dtype == jnp.float64 else np.float32
    counts = rng.random(size) < 0.6
    counts[0] = True
    targets = {"t": rng.normal(size=size).astype(wide), "counts": counts}
    return Batch(size, x, targets, jnp.dtype(dtype), in_axes)


def _normal(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def floats(size: int, axes: int, dtype: Any) -> Batch:
    """Arrays with so many axes between the examples and the width."""
    return _batch(size, dtype, _normal((size, *(2, 3)[:axes], 3), dtype))


def tokens(size: int, dtype: Any) -> Batch:
    x = np.random.default_rng(1).integers(0, WORDS, (size, 2)).astype(np.int32)
    return _batch(size, dtype, x)


def tree(size: int, dtype: Any) -> Batch:
    rng = np.random.default_rng(2)
    x = {
        "h": _normal((size, 2, 3), dtype),
        "ids": rng.integers(0, WORDS, (size, 2)).astype(np.int32),
        "mask": rng.random((size, 2)) < 0.5,
    }
    return _batch(size, dtype, x)


def time_major(size: int, dtype: Any) -> Batch:
    return _batch(size, dtype, _normal((2, size, 3), dtype), in_axes=1)


def with_memory(size: int, dtype: Any) -> Batch:
    x = (_normal((size, 2, 3), dtype), _normal((4, 3), dtype))
    return _batch(size, dtype, x, in_axes=(0, None))


# ----------------------------------------------------------------------- losses


def _errors(y: PyTree, targets: PyTree) -> jax.Array:
    """One number per example, of all floating leaves of the output.

    It grows no faster than these: with a square, three steps of SGD may lead so far
    that rounding errors become as large as the numbers.
    """
    t = targets["t"]
    total = -t
    for leaf in jax.tree.leaves(y):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            rows = leaf.astype(t.dtype).reshape(len(t), -1)
            total += rows @ jnp.cos(jnp.arange(rows.shape[1], dtype=t.dtype))
    return jnp.sqrt(1 + total**2)


def _reduced(errors: jax.Array, targets: PyTree, reduction: str) -> Any:
    if reduction == "weighted":
        weights = targets["counts"].astype(errors.dtype)
        return jnp.sum(errors * weights), jnp.sum(weights)
    return jnp.sum(errors) if reduction == "sum" else jnp.mean(errors)


def _loss(reduction: str, has_aux: bool) -> Callable[..., Any]:
    """The loss function of a pipeline."""

    def loss(y: PyTree, targets: PyTree) -> Any:
        errors = _errors(y, targets)
        value = _reduced(errors, targets, reduction)
        return (value, _aux(errors)) if has_aux else value

    return loss


def _aux(errors: jax.Array) -> PyTree:
    return {"worst": errors.max(), "count": jnp.int32(len(errors))}


def _whole_loss(reduction: str, sizes: Sequence[int]) -> hand.Loss:
    """That of a mini-batch by hand; its aux has an entry for each micro-batch."""

    def loss(y: PyTree, targets: PyTree) -> Any:
        errors = _errors(y, targets)
        value = _reduced(errors, targets, reduction)
        value = value[0] / value[1] if reduction == "weighted" else value
        parts = [_aux(part) for part in jnp.split(errors, np.cumsum(sizes)[:-1])]
        return value, jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    return loss


# -------------------------------------------------------------------- the check


def check(
    layers: Sequence[Any],
    batch: Batch,
    num_microbatches: int,
    *,
    balance: Sequence[int],
    devices: Sequence[int],
    schedule: str,
    remat: Any,
    reduction: str,
    has_aux: bool,
    optimizer: str,
    by_hand: str,
    rough: int,
    trainable: hand.Trainable | None = None,
    again: dict[str, Any] | None = None,
    shards: int = 1,
    gather: str | None = None,
) -> None:
    """Asserts that a pipeline of these layers gives the numbers of one device.

    Args:
      layers: the layers.
      batch: the mini-batch.
      num_microbatches: as for `jpipe.pipeline`, and so are the next four.
      balance: layers per stage.
      devices: numbers of devices.
      schedule: a name, or the text of a schedule.
      remat: one setting, or one per stage.
      reduction: as for `jpipe.Pipeline.value_and_grad`.
      has_aux: as for `jpipe.Pipeline.value_and_grad`.
      optimizer: a name of `OPTIMIZERS`.
      by_hand: what plain Flax is given in training: the mini-batch as a "whole"; each
        of its "microbatches", where layers look at all examples; or "nothing", where
        they draw random numbers, or have too few bits for sums in another order.
      rough: how many norms there are, or one in few bits. Before a norm a gradient may
        be nothing but rounding errors, as that of a bias is: if there is one, errors
        are relative to the largest entry of all leaves.
      trainable: as for `jpipe.Pipeline.value_and_grad`, as a function; all parameters
        are trained if there are none that it chooses.
      again: settings with which another pipeline gives the same bits.
      shards: over how many devices of each rank, one after the other, examples are
        spread; if one, ranks are on ``devices``.
      gather: as for `jpipe.pipeline`, of parameters that are cut over these.
    """
    if shards * len(devices) > jax.device_count():  # as on one accelerator
        shards, gather = 1, None
    parts_of_all = num_microbatches * shards
    settings = {
        "balance": balance,
        "devices": devices,
        "schedule": schedule,
        "remat": remat,
        "in_axes": batch.in_axes,
        "shards": shards,
        "gather": gather,
    }
    pipe = _pipeline(layers, num_microbatches, settings)
    twin = jpipe.sequential(layers, parts_of_all, in_axes=batch.in_axes)
    variables = pipe.init(KEY(0), batch.x)
    alone = twin.init(KEY(0), batch.x)
    ref.assert_equal(variables, alone)

    loss = _loss(reduction, has_aux)
    options: dict[str, Any] = {"reduction": reduction, "has_aux": has_aux}
    params = ref.params_of(variables)
    if not _largest(hand.selected(params, trainable)):
        trainable = None
    chosen = {} if trainable is None else {"trainable": trainable}

    def close(
        what: str, actual: PyTree, expected: PyTree, grown: int = 1, size: float = 0.0
    ) -> None:
        # Of a tanh near one, 1 - tanh**2 has lost as many bits as it is small.
        largest = _largest(expected)
        scale = max(largest, size) if rough else largest / 1000
        within = CLOSE[batch.dtype]
        ref.assert_close({what: actual}, {what: expected}, grown * within, scale)

    def gradient(pipe: jpipe.Pipeline, variables: PyTree) -> Any:
        value = pipe.value_and_grad(loss, **options, **chosen)
        return value(variables, batch.x, batch.targets, rngs=KEY(3))

    # What is constant but for rounding a norm divides by the root of its epsilon, 1e-5
    # or 1e-6: each that follows on one makes the errors larger. Of 2,000 programs one
    # was more than 16 times as far off as others may be: 1,300 times, with three norms.
    more = 30 ** max(rough - 1, 0)
    found = gradient(pipe, variables)
    # A norm over one or two examples divides by the root of its epsilon: there one more
    # bit of an input moves a gradient by 3e-12 of the largest.
    close("gradient", found, gradient(twin, alone), grown=16 * more if rough else 1)
    ref.assert_equal(gradient(pipe, variables), found)
    if again is not None:
        other = _pipeline(layers, num_microbatches, {**settings, **again})
        ref.assert_equal(gradient(other, other.place(variables)), found)

    y = pipe.apply(variables, batch.x)
    variables = hand.on_host(variables)
    composed = hand.compose(layers, variables, batch.x)[0]
    # What a norm makes of a constant is nothing but rounding errors of terms of one.
    close("output", y, composed, size=1.0)

    tx = OPTIMIZERS[optimizer]()

    def train(pipe: jpipe.Pipeline) -> tuple[list[Any], PyTree, PyTree]:
        """The losses, the variables and the optimizer's state after some steps."""
        state = pipe.init_train_state(KEY(0), batch.x, tx, **chosen)
        step = pipe.train_step(loss, tx, **options, **chosen)
        losses = []
        for _ in range(STEPS):
            state, metrics = step(state, batch.x, batch.targets)
            losses.append(metrics["loss"])
        return losses, state.variables, state.opt_state

    trained = train(pipe)
    # There a step more makes a bit of a parameter 6e-12 of the loss.
    close("training", trained, train(twin), grown=100 * more if rough else 1)
    if by_hand == "nothing":
        return
    sizes = [len(part) for part in np.array_split(range(batch.size), parts_of_all)]
    cut = sizes if by_hand == "microbatches" else [batch.size]
    ends = [0, *itertools.accumulate(cut)]
    parts = [batch.part(a, b) for a, b in itertools.pairwise(ends)]
    whole = _whole_loss(reduction, sizes)
    value, aux, grads, _ = hand.value_and_grad(
        layers, variables, parts, whole, trainable
    )
    expected = ((value, aux) if has_aux else value), grads
    # By other operations: examples that are almost equal are so by other errors.
    close("gradient by hand", found, expected, grown=1000 * more if rough else 1)
    expected = hand.steps(layers, variables, parts, whole, tx, STEPS, trainable)
    # Each step starts from the errors of the one before.
    grown = 1000 * more if rough else 2**STEPS
    close("training by hand", trained, expected, grown)


def _pipeline(layers: Sequence[Any], number: int, settings: Any) -> jpipe.Pipeline:
    schedule, places = settings["schedule"], jax.devices()
    if schedule not in jpipe.schedules.BY_NAME:
        schedule = jpipe.schedules.Schedule.from_text(schedule)
    settings = {**settings, "schedule": schedule}
    numbers, shards = settings.pop("devices"), settings.pop("shards")
    gather = settings.pop("gather")
    if shards == 1:
        settings["devices"] = [places[i % len(places)] for i in numbers]
        return jpipe.pipeline(layers, number, **settings)
    along = np.array(places[: len(numbers) * shards]).reshape(-1, shards)
    settings["mesh"] = jax.sharding.Mesh(along, ("stage", "data"))
    if gather is not None:
        settings |= {"gather": gather, "sharding": functools.partial(_cut, shards)}
    return jpipe.pipeline(layers, number, **settings)


def _cut(shards: int, _: Any, leaf: Any) -> P | None:
    """Along the last axis that the shards divide."""
    for axis in reversed(range(leaf.ndim)):
        if leaf.shape[axis] % shards == 0:
            return P(*[None] * axis, "data")
    return None


def _largest(tree: PyTree) -> float:
    """The largest of all entries."""
    floating = [
        np.abs(leaf.astype(np.float64)).max(initial=0.0)
        for leaf in jax.tree.leaves(ref.on_host(tree))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return float(max(floating, default=0.0))

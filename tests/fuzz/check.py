"""The properties of a program in a pipeline, each against the same on one device.

Its names, and those of `layers`, are all that the text of a program needs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jpipe
from jpipe.schedules import BY_NAME, Schedule

from .. import listing
from .. import reference as ref
from . import by_hand as hand
from .asserting import (
    assert_beside,
    assert_close,
    assert_in_place,
    asserting,
    compiling_nothing,
    largest_entry,
)
from .batches import (
    Batch,
    floats,
    loss_of,
    time_major,
    tokens,
    tree,
    whole_loss,
    with_memory,
)
from .layers import *  # noqa: F403
from .layers import __all__ as vocabulary
from .penalties import PENALTIES
from .whole import by_number, check_loss, in_list, out_of_list, whole

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
    shards: int = 1,
    gather: str | None = None,
    api: str = "list",
    penalty: str | None = None,
) -> None:
    """Asserts that a pipeline of these layers gives the results of one device.

    They are also the same bits twice, on the devices of the stages, from a second step
    that traces nothing; and the bytes of a step are those of its instructions.

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
        they draw random numbers, or have too few bits for sums in another order: the
        reference is `jpipe.sequential` then.
      rough: how many norms there are, or one in few bits. Before a norm a gradient may
        be nothing but rounding errors, as that of a bias is: if there is one, errors
        are relative to the largest entry of all leaves.
      trainable: as for `jpipe.Pipeline.value_and_grad`, as a function; all parameters
        are trained if there are none that it chooses.
      shards: over how many devices of each rank, one after the other, examples are
        spread; if one, ranks are on ``devices``.
      gather: as for `jpipe.pipeline`, of parameters that are cut over these.
      api: how the layers are given: as a "list"; as one "model", which is divided in
        as many stages as the list; or in a "loss" function of `jpipe.value_and_grad`.
      penalty: a name of `PENALTIES`, the way in which a loss function adds one.
    """
    if shards * len(devices) > jax.device_count():  # as on one accelerator
        shards, gather = 1, None
    parts_of_all = num_microbatches * shards
    sizes = [len(part) for part in np.array_split(range(batch.size), parts_of_all)]
    ranks = _ranks(devices, shards)
    where: dict[str, Any] = {
        "schedule": schedule if schedule in BY_NAME else Schedule.from_text(schedule),
        "remat": remat,
        **_where(ranks, gather),
    }
    where |= {"balance": balance} if api == "list" else {"num_stages": len(balance)}
    tx = OPTIMIZERS[optimizer]()
    if api == "loss":
        check_loss(
            layers,
            batch,
            num_microbatches,
            sizes=sizes,
            where=where,
            reduction=reduction,
            has_aux=has_aux,
            trainable=trainable,
            tx=tx,
            num_steps=STEPS,
            rough=rough,
            add_penalty=PENALTIES[penalty] if penalty else None,
        )
        return
    model = layers if api == "list" else whole(layers)
    pipe = jpipe.pipeline(model, num_microbatches, in_axes=batch.in_axes, **where)
    twin = jpipe.sequential(model, parts_of_all, in_axes=batch.in_axes)
    variables = pipe.init(KEY(0), batch.x)
    alone = twin.init(KEY(0), batch.x)
    in_place = functools.partial(assert_in_place, ranks, pipe, balance)
    own, as_list, as_model = trainable, tuple, tuple
    if api == "model":  # by hand it is a list of one
        layers, as_list, as_model = [model], in_list, out_of_list
        own, trainable = by_number(trainable)
        params = variables.get("params", {})
        in_place = functools.partial(assert_beside, {**params, **variables})
    with asserting("variables are those of one device"):
        ref.assert_equal(variables, alone)
    with asserting("variables are on the devices of their stages"):
        in_place(variables)

    if not largest_entry(hand.selected(ref.params_of(as_list(variables)), trainable)):
        trainable = None
    options: dict[str, Any] = {"reduction": reduction, "has_aux": has_aux}
    if trainable is not None:
        options["trainable"] = own
    loss = loss_of(reduction, has_aux)

    find = pipe.value_and_grad(loss, has_state=True, **options)
    given = variables, batch.x, batch.targets
    found = find(*given, rngs=KEY(3))
    with asserting("gradients are the same bits twice"):
        ref.assert_equal(find(*given, rngs=KEY(3)), found)
    with asserting("gradients are on the devices of their stages"):
        in_place(found[1])
    with asserting("bytes are those of the instructions"):
        program = listing.program_of(find, *given, rngs=KEY(3))
        leaves = listing.leaves_of((*given, KEY(3)))
        assert listing.counted(program, leaves) == listing.live(program)[1:]
    y = pipe.apply(variables, batch.x)
    trained = _train(pipe, batch, loss, tx, options, remat)
    with asserting("trained variables are on the devices of their stages"):
        in_place(trained[1])

    # What is constant but for rounding a norm divides by the root of its epsilon, 1e-5
    # or 1e-6: each that follows on one makes the errors larger. Of 2,000 programs one
    # was more than 16 times as far off as others may be: 1,300 times, with three norms.
    more = 30 ** max(rough - 1, 0)
    on_host = hand.on_host(as_list(variables))
    if by_hand == "nothing":
        alone = twin.value_and_grad(loss, has_state=True, **options)(
            alone, *given[1:], rngs=KEY(3)
        )
        expected = alone, _train(twin, batch, loss, tx, options, remat)
        # A norm over one or two examples divides by the root of its epsilon: there one
        # more bit of an input moves a gradient by 3e-12 of the largest, and one more of
        # a parameter the loss by 6e-12.
        grown = (16 * more, 100 * more) if rough else (1, 1)
    else:
        cut = sizes if by_hand == "microbatches" else [batch.size]
        ends = [0, *itertools.accumulate(cut)]
        parts = [batch.part(a, b) for a, b in itertools.pairwise(ends)]
        by_flax = hand.value_and_grad(layers, whole_loss(reduction, sizes), trainable)
        (value, aux, after), grads = by_flax(on_host, parts)
        beside = (aux, _state(after)) if has_aux else (_state(after),)
        steps = hand.steps(by_flax, on_host, parts, tx, STEPS, trainable)
        expected = as_model((((value, *beside), grads), steps))
        # By other operations: examples that are almost equal are so by other errors,
        # and each step starts from the errors of the one before.
        grown = (1000 * more, 1000 * more) if rough else (1, 2**STEPS)

    close = functools.partial(assert_close, batch.dtype, rough)
    composed = jax.jit(functools.partial(hand.compose, layers))
    close("output", y, composed(on_host, batch.x)[0])
    close("gradient", found, expected[0], grown[0])
    close("training", trained, expected[1], grown[1])


def _train(
    pipe: jpipe.Pipeline,
    batch: Batch,
    loss: Callable[..., Any],
    tx: optax.GradientTransformation,
    options: dict[str, Any],
    remat: Any,
) -> tuple[list[Any], PyTree, PyTree]:
    """The losses, the variables and the optimizer's state after some steps."""
    chosen = {"trainable": options["trainable"]} if "trainable" in options else {}
    state = pipe.init_train_state(KEY(0), batch.x, tx, **chosen)
    step = pipe.train_step(loss, tx, **options)
    losses = []
    for number in range(STEPS):
        with compiling_nothing(remat) if number else nullcontext():
            state, metrics = step(state, batch.x, batch.targets)
        losses.append(metrics["loss"])
    assert int(state.step) == STEPS
    return losses, state.variables, state.opt_state


def _state(variables: Sequence[PyTree]) -> tuple[PyTree, ...]:
    return tuple(
        {name: value for name, value in entry.items() if name != "params"}
        for entry in variables
    )


def _ranks(numbers: Sequence[int], shards: int) -> list[list[jax.Device]]:
    """The devices of each rank."""
    places = jax.devices()
    if shards == 1:
        return [[places[number % len(places)]] for number in numbers]
    firsts = range(0, len(numbers) * shards, shards)
    return [places[first : first + shards] for first in firsts]


def _where(ranks: list[list[jax.Device]], gather: str | None) -> dict[str, Any]:
    """How a pipeline is told its devices, and that parameters are cut over them."""
    shards = len(ranks[0])
    if shards == 1:
        return {"devices": [device for (device,) in ranks]}
    mesh = {"mesh": jax.sharding.Mesh(np.array(ranks), ("stage", "data"))}
    if gather is None:
        return mesh
    return mesh | {"gather": gather, "sharding": functools.partial(_cut, shards)}


def _cut(shards: int, _: Any, leaf: Any) -> P | None:
    """Along the last axis that the shards divide."""
    for axis in reversed(range(leaf.ndim)):
        if leaf.shape[axis] % shards == 0:
            return P(*[None] * axis, "data")
    return None

"""A balance by name: equal times, operations, parameters or bytes."""

from collections.abc import Sequence
from typing import Any

import jax

from .._layers._layer import adapt_layers
from .._processes._group import group
from ..schedules import Schedule, named
from ._layer import MODES
from ._partition import NoCut, partition
from ._profile import Profile
from ._profiler import profile

KINDS = ("time", "flops", "params", "memory")


def balanced(
    kind: str,
    layers: Any,
    num_microbatches: int,
    sample: Any,
    devices: Sequence[Any] | None,
    schedule: Any,
    remat: Any,
    in_axes: Any,
) -> list[int]:
    """How many layers each stage takes, as many stages as devices have room for.

    Args:
      kind: what is to be equal; ``"memory"``: what ranks hold at their peaks under the
        schedule, of parameters, gradients, other state and activations: the fullest
        holds the least that any cut allows, and of such cuts the fastest is taken.
      layers: as `jpipe.pipeline` takes them.
      num_microbatches: of a mini-batch.
      sample: an input of a mini-batch, or a profile of a micro-batch.
      devices: as `jpipe.pipeline` takes them.
      schedule: likewise.
      remat: likewise.
      in_axes: likewise.

    Returns:
      The balance.

    Raises:
      ValueError: if the kind is unknown, there is no sample, there are too few
        layers, or the profile is of others.
    """
    if kind not in KINDS:
        raise ValueError(
            f"balance={kind!r} is unknown: choose {', '.join(map(repr, KINDS))}, or "
            f"give the number of layers of each stage"
        )
    if sample is None:
        raise ValueError(
            f"balance={kind!r} needs sample=, an input of a mini-batch or a profile of "
            f"a micro-batch"
        )
    given = jax.devices() if devices is None else list(devices)
    if isinstance(schedule, str):
        schedule = named(schedule)
    if not isinstance(schedule, Schedule):
        schedule = schedule(len(given), num_microbatches)
    if isinstance(sample, Profile):
        costs = sample
        _check(costs, layers)
    else:
        split = {"num_microbatches": num_microbatches, "in_axes": in_axes}
        costs = profile(layers, sample, measure=kind == "time", **split)
    count = schedule.num_stages
    if kind in ("params", "flops"):
        sizes = [(layer.param_bytes, layer.flops or 0.0) for layer in costs.layers]
        return partition([own[kind == "flops"] for own in sizes], count)
    run = {"schedule": schedule, "num_microbatches": num_microbatches}
    run["remat"] = _modes(remat)
    if kind == "time":
        return _of_first(partition(costs, count, objective="step", **run), given)
    try:
        return partition(costs, count, max_bytes=1, **run)
    except NoCut as refusal:  # which says what would do
        return partition(costs, count, max_bytes=1 + refusal.short, **run)


def _of_first(balance: list[int], devices: Sequence[Any]) -> list[int]:
    """Of several processes, each of which has measured, what the first has found."""
    if len({device.process_index for device in devices}) == 1:
        return balance
    every = group().gather({"balance": balance}, "jpipe.pipeline, balance='time'")
    return every[0]["balance"]


def _modes(remat: Any) -> Any:
    """What stages store, by the modes that a profile knows; of a policy a guess."""
    if not isinstance(remat, str) and isinstance(remat, Sequence):
        return [_modes(each) for each in remat]
    if remat == "except_last":  # of all micro-batches but one
        return "full"
    return remat if remat in MODES else "min_cut"


def _check(profile: Profile, layers: Any) -> None:
    """Raises if a profile is of other layers; one made by hand may name them otherwise.

    Raises:
      ValueError: with the layers of both.
    """
    names = [layer.name for layer in adapt_layers(layers)]
    others = [layer.name for layer in profile.layers]
    if len(names) != len(others) or (profile.fingerprint and names != others):
        raise ValueError(
            f"sample= is a profile of something else: it is of {others}, the layers "
            f"are {names}. Give a profile of these layers, or an input of a mini-batch"
        )

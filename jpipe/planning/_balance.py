"""A balance by name: equal times, operations, parameters or bytes."""

from collections.abc import Sequence
from typing import Any

import jax

from ..schedules import Schedule, named
from ._partition import partition
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
) -> list[int]:
    """How many layers each stage takes, as many stages as devices have room for.

    Args:
      kind: what is to be equal.
      layers: as `jpipe.pipeline` takes them.
      num_microbatches: of a mini-batch.
      sample: an input of a mini-batch, or a profile of a micro-batch.
      devices: as `jpipe.pipeline` takes them.
      schedule: likewise.
      remat: likewise.

    Returns:
      The balance.

    Raises:
      ValueError: if the kind is unknown, there is no sample, or there are too few
        layers.
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
    ranks = len(jax.devices() if devices is None else devices)
    if isinstance(schedule, str):
        schedule = named(schedule)
    if not isinstance(schedule, Schedule):
        schedule = schedule(ranks, num_microbatches)
    costs = sample
    if not isinstance(sample, Profile):
        costs = profile(
            layers, sample, num_microbatches=num_microbatches, measure=kind == "time"
        )
    count = schedule.num_stages
    if kind == "time":
        return partition(
            costs,
            count,
            objective="step",
            num_microbatches=num_microbatches,
            schedule=schedule,
            remat=remat if isinstance(remat, str) else "min_cut",
        )
    return partition([_weight(layer, kind) for layer in costs.layers], count)


def _weight(layer: Any, kind: str) -> float:
    """What is to be equal, of one layer."""
    if kind == "flops":
        return layer.flops or 0.0
    if kind == "params":
        return layer.param_bytes
    return layer.param_bytes * 2 + layer.kept_bytes.get("min_cut", 0)

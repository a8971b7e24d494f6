"""The arguments of `jpipe.partition`, checked, as a value."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schedules import Schedule, one_f_one_b
from ..schedules._choose import choose_schedule
from ..schedules._simulate import TOO_LONG
from ._chain import Chain, InFlight, in_flight
from ._layer import MODES, LayerProfile, unknown_mode
from ._profile import Profile, speed_faults

OBJECTIVES = ("max", "step")


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """What is to be cut, and what is sought.

    Attributes:
      chain: the layers.
      objective: ``"max"`` or ``"step"``.
      num_microbatches: of one step; ``None`` if it was not given.
      schedule: what runs the stages; 1F1B if none was given.
      has_schedule: whether one was given.
      max_bytes: of each rank; ``None``: no limit.
    """

    chain: Chain
    objective: str
    num_microbatches: int | None
    schedule: Schedule
    has_schedule: bool
    max_bytes: tuple[float, ...] | None

    @property
    def has_one_each(self) -> bool:
        """Whether each rank has one stage."""
        return self.schedule.num_ranks == self.chain.num_stages

    @functools.cached_property
    def in_flight(self) -> tuple[InFlight, ...]:
        """What each rank has in flight."""
        return in_flight(self.schedule)


def problem(
    costs: Any,
    num_stages: int,
    *,
    objective: str = "max",
    num_microbatches: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    max_bytes: Any = None,
    schedule: Any = None,
    remat: Any = "min_cut",
) -> PartitionProblem:
    """The arguments of `partition`.

    Raises:
      ValueError: with what makes no sense.
    """
    profile = _profile(costs)
    count = operator.index(num_stages)
    modes = profile.modes(remat, count)
    if num_microbatches is None and isinstance(schedule, Schedule):
        num_microbatches = schedule.num_microbatches
    faults = [*speed_faults(bandwidth, latency)]
    if not 1 <= count <= len(profile.layers):
        faults.append(
            f"num_stages={count}; needs 1 to {len(profile.layers)}, a layer each"
        )
    if objective not in OBJECTIVES:
        faults.append(
            f"objective={objective!r}; needs {' or '.join(map(repr, OBJECTIVES))}"
        )
    if num_microbatches is None and (schedule is not None or objective == "step"):
        faults.append("a step or a schedule needs num_microbatches=")
    elif num_microbatches is not None and num_microbatches < 1:
        faults.append(f"num_microbatches={num_microbatches}; needs at least 1")
    faults += [unknown_mode(mode) for mode in dict.fromkeys(modes) if mode not in MODES]
    # Modes of which a profile has no bytes are of no matter without a limit.
    if isinstance(costs, Profile):
        faults += profile.unknown(modes) if max_bytes is not None else ()
    elif "full" in modes or not bandwidth is max_bytes is None:
        faults.append(
            "bandwidth=, max_bytes= and remat='full' need a Profile: the costs are "
            "numbers, without bytes and forwards"
        )
    if faults:
        raise ValueError(f"partition: {'; '.join(faults)}")
    chosen = one_f_one_b(count, min(num_microbatches or count, count))
    if schedule is not None:
        assert num_microbatches is not None
        chosen = choose_schedule(schedule, count, num_microbatches)
        if chosen.forward_only:
            raise ValueError(f"partition: schedule {chosen.name!r} has no backward")
    chain = Chain(profile, modes, bandwidth, latency)
    if not math.isfinite(chain.total * (num_microbatches or 1)):
        raise ValueError(f"partition: {TOO_LONG}")
    limits = None if max_bytes is None else _limits(max_bytes, chosen.num_ranks)
    run = num_microbatches, chosen, schedule is not None
    return PartitionProblem(chain, objective, *run, limits)


def _profile(costs: Sequence[float] | Profile) -> Profile:
    """The layers; of a number, a third is taken to be forward."""
    if not isinstance(costs, Profile):
        times = [float(time) for time in costs]
        halves = enumerate((time / 3, time - time / 3) for time in times)
        costs = Profile(tuple(LayerProfile(str(i), *each) for i, each in halves))
    if faults := costs.faults():
        raise ValueError(f"partition: {'; '.join(faults)}")
    return costs


def _limits(max_bytes: Any, num_ranks: int) -> tuple[float, ...]:
    """One number per rank."""
    limits = list(max_bytes) if hasattr(max_bytes, "__iter__") else [max_bytes]
    limits = limits * num_ranks if len(limits) == 1 else limits
    if len(limits) != num_ranks or not all(limit > 0 for limit in limits):
        raise ValueError(
            f"partition: max_bytes={max_bytes!r}; needs bytes, more than 0, for all of "
            f"{num_ranks} ranks or for each"
        )
    return tuple(map(float, limits))

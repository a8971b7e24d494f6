"""Cuts, micro-batches, schedules, what stages keep: all tried on paper."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import schedules
from ..schedules import BY_NAME, Schedule, ScheduleError
from ._forecast import Candidate, Hardware, evaluate
from ._partition import partition
from ._profile import Profile

# From fast and large to slow and small. What "none" keeps more saves no time.
REMATS = ("min_cut", "full")
# How many of the best get a schedule made to measure.
_REFINED = 3


@dataclass(frozen=True)
class Space:
    """What a plan may choose from.

    Attributes:
      profiles: of a micro-batch, by the number of micro-batches.
      optimizer_bytes: the optimizer's state of each layer.
      hardware: the devices.
      names: of schedules; see `jpipe.schedules.BY_NAME`.
      remats: modes that a stage may have, the one that keeps most first.
      made: whether schedules are made to measure too.
    """

    profiles: Mapping[int, Profile]
    optimizer_bytes: Sequence[int]
    hardware: Hardware
    names: tuple[str, ...]
    remats: tuple[str, ...]
    made: bool = True


def search(space: Space) -> list[Candidate]:
    """All candidates, those that fit first, the fastest of them first.

    Args:
      space: what to choose from.

    Returns:
      The candidates; several may be the same.
    """
    found = _ranked(_candidates(space), space.hardware)
    if space.made:
        best = found[:_REFINED]
        found += [refined for each in best for refined in _refined(each, space)]
    return _ranked(found, space.hardware)


def _candidates(space: Space) -> Iterator[Candidate]:
    """Each number of micro-batches and ranks with each schedule of the catalogue."""
    for microbatches, profile in space.profiles.items():
        most = min(space.hardware.num_devices, len(profile.layers))
        for ranks, name in itertools.product(range(most, 0, -1), space.names):
            schedule = _built(name, ranks, microbatches)
            if schedule and schedule.num_stages <= len(profile.layers):
                yield from _cuts(profile, schedule, space)


def _built(name: str, num_ranks: int, num_microbatches: int) -> Schedule | None:
    """A schedule of the catalogue; none where it has no order for these numbers."""
    try:
        return BY_NAME[name](num_ranks, num_microbatches)
    except ScheduleError:
        return None


def _cuts(profile: Profile, schedule: Schedule, space: Space) -> Iterator[Candidate]:
    """The best cut with each remat mode, and what it takes to make it fit."""
    for mode in space.remats:
        balance = _cut(profile, schedule, mode, space.hardware, capped=False)
        if balance is None:
            continue
        candidate = _evaluated(profile, balance, [mode] * len(balance), schedule, space)
        yield candidate
        if candidate.fits(space.hardware):
            # Other modes keep less and take longer.
            return
        yield from _fitted(profile, candidate, space)
        other = _cut(profile, schedule, mode, space.hardware, capped=True)
        if other not in (None, balance):
            yield _evaluated(profile, other, [mode] * len(other), schedule, space)


def _cut(
    profile: Profile, schedule: Schedule, mode: str, hardware: Hardware, capped: bool
) -> list[int] | None:
    """The cut with the shortest step; none if no cut keeps within the memory.

    Where a rank has several stages, the one whose busiest rank has least to do.
    """
    several = schedule.num_ranks < schedule.num_stages
    try:
        return partition(
            profile,
            schedule.num_stages,
            objective="max" if several else "step",
            num_microbatches=schedule.num_microbatches,
            bandwidth=hardware.bandwidth,
            latency=hardware.latency,
            schedule=schedule if capped or several else None,
            max_bytes=hardware.memory_limit if capped else None,
            remat=mode,
        )
    except ValueError:
        return None


def _fitted(
    profile: Profile, candidate: Candidate, space: Space
) -> Iterator[Candidate]:
    """Keeps less and less in the stages of ranks that need more than they have."""
    limit = space.hardware.memory_limit
    assert limit is not None
    following = dict(itertools.pairwise(space.remats))
    while not candidate.fits(space.hardware):
        remat, placement = list(candidate.remat), candidate.schedule.placement
        over = [
            s
            for s, rank in enumerate(placement)
            if candidate.memory[rank].total > limit
        ]
        changed = [s for s in over if remat[s] in following]
        if not changed:
            return
        for stage in changed:
            remat[stage] = following[remat[stage]]
        candidate = _evaluated(
            profile, candidate.balance, remat, candidate.schedule, space
        )
        yield candidate


def _refined(candidate: Candidate, space: Space) -> Iterator[Candidate]:
    """The same stages under a schedule made to measure, if there is one that fits."""
    hardware = space.hardware
    microbatches = candidate.schedule.num_microbatches
    profile = space.profiles[microbatches]
    costs = profile.costs(
        candidate.balance,
        remat=candidate.remat,
        bandwidth=hardware.bandwidth,
        latency=hardware.latency,
    )
    room = None
    if hardware.memory_limit is not None:
        room = [
            hardware.memory_limit - memory.optimizer - memory.workspace
            for memory in candidate.memory
        ]
    try:
        schedule = schedules.fit(
            costs, candidate.schedule.num_ranks, microbatches, max_bytes=room
        )
    except ScheduleError:
        return
    yield _evaluated(profile, candidate.balance, candidate.remat, schedule, space)


def _evaluated(
    profile: Profile,
    balance: Sequence[int],
    remat: Sequence[str],
    schedule: Schedule,
    space: Space,
) -> Candidate:
    return evaluate(
        profile, space.optimizer_bytes, balance, remat, schedule, space.hardware
    )


def _ranked(found: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    def key(candidate: Candidate) -> tuple[float, ...]:
        if not candidate.fits(hardware):
            return 1, candidate.most_bytes, candidate.seconds
        # Of two as fast, the smaller.
        return 0, candidate.seconds, candidate.most_bytes

    return sorted(found, key=key)

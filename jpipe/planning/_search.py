"""Cuts, micro-batches, schedules, what stages keep: all tried on paper."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import schedules
from .._instructions._progress import Progress, counted
from ..schedules import BY_NAME, Schedule, ScheduleError
from ._better import bettered, promising, ranked
from ._forecast import Candidate, Hardware, evaluate, stage_costs
from ._partition import NoCut, partition
from ._profile import Profile
from ._shapes import Shape

# From fast and large to slow and small. What "none" keeps more saves no time.
REMATS = ("min_cut", "full")
# How many of the best get a schedule made to measure.
_REFINED = 3
# How many cuts are made for a limit, until one fits.
_CAPPED = 5
_ROUNDING = 1e-12
# Of shapes, placements and modes.
_Cuts = dict[tuple[Shape, tuple[int, ...], str], list[int] | None]


@dataclass(frozen=True)
class Space:
    """What a plan may choose from.

    Attributes:
      profiles: of a micro-batch of one shard, by the number of such parts.
      optimizer_bytes: the optimizer's state of each layer.
      hardware: the devices.
      names: of schedules; see `jpipe.schedules.BY_NAME`.
      remats: modes that a stage may have, the one that keeps most first.
      made: whether schedules are made to measure too.
      balance: the only cut that is meant, if any.
      given: the numbers of micro-batches, each with the number of devices that share
        one; default: a profile for each, on one device.
    """

    profiles: Mapping[int, Profile]
    optimizer_bytes: Sequence[int]
    hardware: Hardware
    names: tuple[str, ...]
    remats: tuple[str, ...]
    made: bool = True
    balance: tuple[int, ...] | None = None
    given: tuple[Shape, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Into how many micro-batches, on how many devices each."""
        return self.given or tuple(map(Shape, self.profiles))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.optimizer_bytes)

    @property
    def limit(self) -> int | None:
        """Bytes of a device."""
        return self.hardware.memory_limit

    def fixed_bytes(self, profile: Profile) -> int:
        """What all ranks hold together, whatever they keep of micro-batches."""
        layers = profile.layers
        own = sum(2 * layer.param_bytes + layer.state_bytes for layer in layers)
        return own + sum(self.optimizer_bytes)

    @functools.cached_property
    def whole(self) -> dict[int, Profile]:
        """The profiles with the optimizer's state as a part of that of the layers."""
        return {number: self._whole(each) for number, each in self.profiles.items()}

    def _whole(self, profile: Profile) -> Profile:
        layers = tuple(
            dataclasses.replace(layer, state_bytes=layer.state_bytes + own)
            for layer, own in zip(profile.layers, self.optimizer_bytes, strict=True)
        )
        return dataclasses.replace(profile, layers=layers)


def search(space: Space) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first.

    What can be none of the best, whatever its cut and its schedule, is not tried.

    Args:
      space: what to choose from.

    Returns:
      The candidates; several may be the same.
    """
    found = ranked(_candidates(space), space.hardware)
    if space.balance is None:
        given = space.optimizer_bytes, space.hardware
        for each in counted("partitions improved", list(promising(found))):
            other = bettered(each, *given)
            if other.balance != each.balance:
                found.append(other)
        found = ranked(found, space.hardware)
    if space.made:
        best = found[:_REFINED]
        for each in counted("schedules made to measure", best):
            found += _refined(each, space)
        found += _rivals(found, {each.data for each in best}, space)
    return ranked(found, space.hardware)


def _rivals(
    found: Sequence[Candidate], known: set[int], space: Space
) -> Iterator[Candidate]:
    """The best of other shapes under schedules made to measure, if they may be best.

    Args:
      found: the candidates, of a shape the best first.
      known: on how many devices the examples of those are spread that were refined.
      space: what to choose from.
    """
    fast = min((c.seconds for c in found if c.fits(space.hardware)), default=math.inf)
    for data in {shape.data for shape in space.shapes} - known:
        for candidate in [c for c in found if c.data == data][:_REFINED]:
            schedule = candidate.schedule
            sizes = schedule.num_ranks, schedule.num_microbatches
            if _least(candidate.profile, *sizes) < fast:
                yield from _refined(candidate, space)


def _candidates(space: Space) -> list[Candidate]:
    """Numbers of micro-batches and of ranks, with each schedule of the catalogue."""
    most = space.hardware.num_devices
    hopes = [
        (_least(space.profiles[shape.parts], ranks, shape.microbatches), -ranks, shape)
        for shape in space.shapes
        for ranks in range(1, min(most // shape.data, space.num_layers) + 1)
    ]
    found = _Found(space.hardware)
    cuts: _Cuts = {}
    # The most hopeful first: beside them others need not be tried.
    with Progress("numbers of devices and micro-batches planned") as progress:
        for done, (least, ranks, shape) in enumerate(sorted(hopes)):
            progress.say(done, len(hopes))
            if least >= found.to_beat(-ranks, shape.data):
                continue
            for name in space.names:
                progress.say(done, len(hopes))
                schedule = _built(name, -ranks, shape.microbatches)
                if schedule and schedule.num_stages <= space.num_layers:
                    for candidate in _cut_for(schedule, shape.data, space, cuts, found):
                        found.add(candidate)
    return found.all


class _Found:
    """What was found so far.

    Args:
      hardware: what it runs on.

    Attributes:
      all: the candidates.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._best = [math.inf] * _REFINED
        self._best_of: dict[str, float] = {}
        self.all: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        """Takes a candidate."""
        self.all.append(candidate)
        if candidate.fits(self._hardware):
            seconds = candidate.seconds
            self._best = sorted([*self._best, seconds])[:_REFINED]
            for kind in self._kinds(candidate.schedule.num_ranks, candidate.data):
                self._best_of[kind] = min(self._best_of.get(kind, math.inf), seconds)

    def to_beat(self, num_ranks: int, data: int) -> float:
        """What takes longer is none of the best, nor the best of its kind."""
        kinds = self._kinds(num_ranks, data)
        return max(
            [self._best[-1], *(self._best_of.get(kind, math.inf) for kind in kinds)]
        )

    def _kinds(self, num_ranks: int, data: int) -> Iterator[str]:
        """Of which kinds the reasons name the best."""
        yield "shared" if data > 1 else "alone"
        if num_ranks * data == self._hardware.num_devices:
            yield "none is idle"


def _least(profile: Profile, num_ranks: int, num_microbatches: int) -> float:
    """Seconds that no step beats, whatever its cut and its schedule.

    The busiest rank has as much to do as all have on average, or what cannot be cut;
    and one thread has at least a forward of each rank run, and its transfer.
    """
    each = [layer.least for layer in profile.layers]
    busy = max(sum(each) / num_ranks, *each) + profile.action_seconds
    host = (2 * num_ranks - 1) * profile.action_seconds
    # Sums in another order are a little other.
    return num_microbatches * max(busy, host) * (1 - _ROUNDING)


def _built(name: str, num_ranks: int, num_microbatches: int) -> Schedule | None:
    """A schedule of the catalogue; none where it has no order for these numbers."""
    try:
        return BY_NAME[name](num_ranks, num_microbatches)
    except ScheduleError:
        return None


def _cut_for(
    schedule: Schedule, data: int, space: Space, cuts: _Cuts, found: _Found
) -> Iterator[Candidate]:
    """The best cut with each remat mode, and what it takes to make it fit."""
    shape = Shape(schedule.num_microbatches, data)
    profile = space.profiles[shape.parts]
    for mode in space.remats:
        # Without a limit, schedules with the same placement have the same cut.
        key = shape, schedule.placement, mode
        if key not in cuts:
            cuts[key] = _cut(schedule, data, mode, space)
        balance = cuts[key]
        if balance is None:
            continue
        modes = [mode] * len(balance)
        candidate = _evaluated(profile, balance, modes, schedule, data, space)
        yield candidate
        slow = candidate.seconds >= found.to_beat(schedule.num_ranks, data)
        if slow or candidate.fits(space.hardware):
            # As a rule other modes and other cuts take longer. Where a limit made the
            # cut another, some are a few per cent faster.
            return
        if space.fixed_bytes(profile) > schedule.num_ranks * (space.limit or 0):
            # What stages keep is no matter.
            continue
        less = list(_fitted(profile, candidate, space))
        yield from less
        several = schedule.num_ranks < schedule.num_stages
        if several and any(each.fits(space.hardware) for each in less):
            # To look for a cut that fits takes long there.
            continue
        yield from _capped(candidate, mode, space)


def _capped(candidate: Candidate, mode: str, space: Space) -> Iterator[Candidate]:
    """Other cuts of the same schedule, until one fits.

    A cut is made by what stages have and keep. What a rank needs beside that, such as
    workspace and what is on its way to it, is taken off its limit for the next one.
    """
    schedule, limit = candidate.schedule, space.limit
    assert limit is not None
    profile, data = candidate.profile, candidate.data
    room = [float(limit)] * schedule.num_ranks
    for _ in range(_CAPPED):
        balance = _cut(schedule, data, mode, space, room)
        if balance is None:
            return
        modes = [mode] * len(balance)
        other = _evaluated(profile, balance, modes, schedule, data, space)
        yield other
        if other.fits(space.hardware):
            return
        over = [max(memory.total - limit, 0) for memory in other.memory]
        room = [own - more for own, more in zip(room, over, strict=True)]
        if min(room) <= 0:
            return


def _cut(
    schedule: Schedule,
    data: int,
    mode: str,
    space: Space,
    room: Sequence[float] | None = None,
) -> list[int] | None:
    """The cut with the shortest step; none if no cut keeps within the memory.

    Where a rank has several stages, the one whose busiest rank has least to do.

    Args:
      schedule: for as many stages.
      data: over how many devices each micro-batch is spread.
      mode: what stages keep.
      space: what to choose from.
      room: the bytes of each rank, if they matter.
    """
    if space.balance is not None:
        own = len(space.balance) == schedule.num_stages
        return list(space.balance) if own else None
    hardware = space.hardware
    several = schedule.num_ranks < schedule.num_stages
    try:
        return partition(
            space.whole[schedule.num_microbatches * data],
            schedule.num_stages,
            objective="max" if several else "step",
            num_microbatches=schedule.num_microbatches,
            bandwidth=hardware.bandwidth,
            latency=hardware.latency,
            schedule=schedule if room or several else None,
            max_bytes=room,
            remat=mode,
        )
    except NoCut:
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
        schedule, data = candidate.schedule, candidate.data
        candidate = _evaluated(profile, candidate.balance, remat, schedule, data, space)
        yield candidate


def _refined(candidate: Candidate, space: Space) -> Iterator[Candidate]:
    """The same stages under a schedule made to measure, if there is one that fits."""
    hardware = space.hardware
    microbatches = candidate.schedule.num_microbatches
    stages = candidate.profile, candidate.balance, candidate.remat
    costs = stage_costs(*stages, candidate.schedule, hardware, candidate.data)
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
    yield _evaluated(*stages, schedule, candidate.data, space)


def _evaluated(
    profile: Profile,
    balance: Sequence[int],
    remat: Sequence[str],
    schedule: Schedule,
    data: int,
    space: Space,
) -> Candidate:
    held = space.optimizer_bytes
    return evaluate(profile, held, balance, remat, schedule, space.hardware, data)

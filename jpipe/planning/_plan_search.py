"""Cuts, micro-batches, schedules, residuals: all tried on paper."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from .. import schedules
from .._instructions._progress import count_items
from ..schedules import BY_NAME, Schedule, ScheduleError
from ._climb import Cuts, climb
from ._forecast import Candidate, Choice, evaluate, stage_costs
from ._layer_partition import NoCut, partition
from ._mesh_shapes import MeshShape
from ._profile import Profile
from ._space import Hardware, SearchSpace

# From fast and large to slow and small. What "none" stores more saves no time.
REMATS = ("min_cut", "full")
# So many of the best, on as many devices per stage, get a better cut and a schedule
# made to measure; so many actions are simulated for each cut.
_IMPROVED, _ACTIONS = 3, 20_000
# How many cuts are made for a limit, until one fits.
_CUTS = 6
_ROUNDING = 1e-12


def search(space: SearchSpace) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first.

    What can be none of the best, whatever its cut and its schedule, is not tried.

    Args:
      space: what to choose from.

    Returns:
      The candidates; several may be the same.
    """
    found = ranked(_candidates(space), space.hardware)
    for candidate in count_items("candidates improved", list(_top(found))):
        better = candidate if space.balance else _local_search(candidate, space)
        found.append(better)
        if space.fits_schedules:
            found += _with_fitted_schedule(better, space)
    return ranked(found, space.hardware)


def ranked(found: Iterable[Candidate], hardware: Hardware) -> list[Candidate]:
    """Candidates, those that fit first, the fastest of them first."""
    return sorted(found, key=lambda candidate: candidate.objective(hardware))


def _candidates(space: SearchSpace) -> list[Candidate]:
    """Numbers of micro-batches and of ranks, with each schedule of the catalogue."""
    most = space.hardware.num_devices
    branches = [
        (_least(space.profiles[shape.parts], ranks, shape.microbatches), -ranks, shape)
        for shape in space.shapes
        for ranks in range(1, min(most // shape.data, space.num_layers) + 1)
    ]
    found: list[Candidate] = []
    # The most hopeful first: beside them others need not be tried.
    in_order = count_items(
        "numbers of devices and micro-batches planned", sorted(branches)
    )
    for least, ranks, shape in in_order:
        fitting = (x.seconds for x in found if x.fits(space.hardware))
        to_beat = min(fitting, default=math.inf)
        if least < to_beat:
            found += _of_branch(-ranks, shape, space, to_beat)
    return found


def _least(profile: Profile, num_ranks: int, num_microbatches: int) -> float:
    """Seconds that no step beats, whatever its cut and its schedule.

    The busiest rank has as much to do as all have on average, or what cannot be cut;
    and one thread has at least a forward of each rank run, and its transfer.
    """
    each = [layer.least_seconds for layer in profile.layers]
    busy = max(sum(each) / num_ranks, *each) + profile.action_seconds
    host = (2 * num_ranks - 1) * profile.action_seconds
    # Sums in another order are a little other.
    return num_microbatches * max(busy, host) * (1 - _ROUNDING)


def _of_branch(
    num_ranks: int, shape: MeshShape, space: SearchSpace, to_beat: float
) -> Iterator[Candidate]:
    """Each schedule of the catalogue, with the cuts that suit it."""
    # By placement and mode: without a limit their schedules have the same cut.
    cuts: dict[tuple[tuple[int, ...], str], tuple[int, ...] | None] = {}
    for name in space.names:
        try:
            schedule = BY_NAME[name](num_ranks, shape.microbatches)
        except ScheduleError:  # it has no order for these numbers
            continue
        if schedule.num_stages > space.num_layers:
            continue
        for mode in space.remats:
            key = schedule.placement, mode
            if key not in cuts:
                cuts[key] = _cut(schedule, shape.data, mode, space)
            if (balance := cuts[key]) is None:
                continue
            modes = (mode,) * len(balance)
            candidate = evaluate(space, Choice(balance, modes, schedule, shape.data))
            yield candidate
            if candidate.fits(space.hardware) or candidate.seconds >= to_beat:
                # As a rule other modes and other cuts take longer.
                break
            yield from _under_limit(candidate, mode, space)


def _under_limit(
    candidate: Candidate, mode: str, space: SearchSpace
) -> Iterator[Candidate]:
    """What makes a candidate fit: stages that store less, or another cut.

    A cut is made by what stages have and store. What a rank needs besides that, such as
    workspace and what is on its way to it, is taken off its limit for the next one.
    """
    limit, data = space.hardware.memory_limit, candidate.data
    assert limit is not None
    schedule, memory = candidate.schedule, candidate.memory
    if sum(m.lasting + m.optimizer for m in memory) > limit * len(memory):
        return  # residuals are no matter
    less = list(_reduced_remat(candidate, space))
    yield from less
    several = schedule.num_ranks < schedule.num_stages
    if several and any(each.fits(space.hardware) for each in less):
        return  # to look for a cut that fits takes long there
    room = [float(limit)] * schedule.num_ranks
    for _ in range(_CUTS):
        balance = _cut(schedule, data, mode, space, room) if min(room) > 0 else None
        if balance is None:
            return
        modes = (mode,) * len(balance)
        other = evaluate(space, Choice(balance, modes, schedule, data))
        yield other
        if other.fits(space.hardware):
            return
        over = [max(own.total - limit, 0) for own in other.memory]
        room = [own - more for own, more in zip(room, over, strict=True)]


def _reduced_remat(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Stores less and less in the stages of ranks that need more than they have."""
    limit = space.hardware.memory_limit
    assert limit is not None
    following = dict(itertools.pairwise(space.remats))
    while not candidate.fits(space.hardware):
        schedule = candidate.schedule
        remat = tuple(
            following.get(mode, mode) if candidate.memory[rank].total > limit else mode
            for mode, rank in zip(candidate.remat, schedule.placement, strict=True)
        )
        if remat == candidate.remat:
            return
        way = Choice(candidate.balance, remat, schedule, candidate.data)
        candidate = evaluate(space, way)
        yield candidate


def _cut(
    schedule: Schedule,
    data: int,
    mode: str,
    space: SearchSpace,
    room: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """The cut with the shortest step; none if no cut keeps within the memory.

    Where a rank has several stages, the one whose busiest rank has least to do.

    Args:
      schedule: for as many stages.
      data: over how many devices each micro-batch is spread.
      mode: which residuals stages store.
      space: what to choose from.
      room: the bytes of each rank, if they matter.
    """
    if space.balance is not None:
        return space.balance if len(space.balance) == schedule.num_stages else None
    hardware = space.hardware
    several = schedule.num_ranks < schedule.num_stages
    try:
        cut = partition(
            space.profile(schedule, data),
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
    return tuple(cut)


def _top(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best, one of each schedule, for each number of devices per stage."""
    for data in sorted({each.data for each in found}):
        best: dict[Schedule, Candidate] = {}
        for candidate in found:
            if candidate.data == data and len(candidate.balance) > 1:
                best.setdefault(candidate.schedule, candidate)
        yield from itertools.islice(best.values(), _IMPROVED)


def _local_search(candidate: Candidate, space: SearchSpace) -> Candidate:
    """The best of a candidate's cut and those around it, by their simulated steps.

    A cut is made by what stages take, one after another: not by where its schedule
    waits, nor by how long gradients are exchanged.
    """
    schedule, seen = candidate.schedule, {}

    def keys(cuts: Cuts) -> list[tuple[float, ...]]:
        each = list(map(tuple, cuts.tolist()))
        for ends in each:
            balance = tuple(b - a for a, b in itertools.pairwise(ends))
            way = Choice(balance, candidate.remat, schedule, candidate.data)
            seen[ends] = evaluate(space, way)
        return [seen[ends].objective(space.hardware) for ends in each]

    most = max(_ACTIONS // sum(map(len, schedule.rows)), 1)
    return seen[climb([(0, *itertools.accumulate(candidate.balance))], keys, most)[0]]


def _with_fitted_schedule(
    candidate: Candidate, space: SearchSpace
) -> Iterator[Candidate]:
    """The same stages under a schedule made to measure, if there is one that fits."""
    limit, schedule = space.hardware.memory_limit, candidate.schedule
    room = None
    if limit is not None:
        room = [limit - memory.workspace for memory in candidate.memory]
    sizes = schedule.num_ranks, schedule.num_microbatches
    try:
        fitted = schedules.fit(stage_costs(space, candidate), *sizes, max_bytes=room)
    except ScheduleError:
        return
    way = Choice(candidate.balance, candidate.remat, fitted, candidate.data)
    yield evaluate(space, way)

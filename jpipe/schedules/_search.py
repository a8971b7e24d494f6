"""Orders tried for one placement: the catalogue's, list schedules, both shifted."""

import contextlib
import math
from collections.abc import Iterator, Sequence

from ._action import BACKWARD, FORWARD
from ._bound import lower_bound
from ._catalogue import BY_NAME
from ._improve import latest_starts, local_search
from ._list_schedule import list_schedule
from ._schedule import Schedule
from ._simulate import ScheduleError
from ._tables import Numbered, Run, Tables

# So many of the fastest orders are shifted, and of those that fit swapped.
_SHIFTED, _SWAPPED = 4, 3
# So many actions are timed to better one order by swaps.
_TIMED = 20_000
# Sums of the same times in another order differ by less.
_ROUNDING = 1e-12


def orders(
    tables: Tables, most: Sequence[float] | None, known: Sequence[Schedule]
) -> list[Run]:
    """The orders that are tried for one placement, the fastest first.

    Args:
      tables: what actions cost there.
      most: the most bytes of each rank; ``None``: any.
      known: schedules to begin with, of which those of the placement are tried.
    """
    bound = lower_bound(tables) * (1 + _ROUNDING)
    found: list[Run] = []

    def add(rows: Numbered | None) -> None:
        run = tables.run(rows) if rows else None
        if run is not None and run.is_complete:
            found.append(run)
            found.sort(key=lambda run: run.makespan)  # of equals the first

    for schedule in known:
        if schedule.placement == tables.placement:
            add(tables.numbered(schedule.rows))
    add(_one_at_a_time(tables))
    for attempts in (_listed, _shifted, _swapped):
        fitting = (run.makespan for run in found if run.fits(most))
        if next(fitting, math.inf) > bound:
            for rows in [*attempts(tables, most, found)]:
                add(rows)
    return found


def _listed(
    tables: Tables, most: Sequence[float] | None, found: list[Run]
) -> Iterator[Numbered | None]:
    """By simple rules of who goes first: see `list_schedule`."""
    stages = tables.num_stages
    first = [stages - stage for stage in range(stages)]
    second = [stages + place for place in first]
    backward_first = _by_stage(tables, forward=second, backward=first)
    forward_first = _by_stage(tables, forward=first, backward=second)
    for priority, whole, reserves in (
        (backward_first, False, True),
        (backward_first, False, False),
        (forward_first, False, True),
        (forward_first, True, True),
    ):
        yield list_schedule(tables, priority, most, whole, reserves)


def _shifted(
    tables: Tables, most: Sequence[float] | None, found: list[Run]
) -> Iterator[Numbered | None]:
    """The fastest, whether they fit or not, pushed late, then early in that order."""
    for run in _distinct(found, _SHIFTED):
        yield list_schedule(tables, latest_starts(run), most, run.has_whole, False)


def _swapped(
    tables: Tables, most: Sequence[float] | None, found: list[Run]
) -> Iterator[Numbered]:
    """The fastest that fit, with neighbours swapped where that makes them shorter."""
    for run in _distinct([run for run in found if run.fits(most)], _SWAPPED):
        budget = _TIMED // len(run.order) + 1
        yield local_search(run, most, budget).rows


def _one_at_a_time(tables: Tables) -> Numbered:
    """Each micro-batch forward and backward before the next begins.

    With one stage per rank no schedule holds less, on any rank: what is held of a
    micro-batch, and what others bring or leave, is held in each. But what takes no time
    waits for nobody, so it may be more than one at a time; and where the first stage
    stores less than its input, forwards make room.
    """
    rows: Numbered = [[] for _ in range(tables.num_ranks)]
    stages = range(tables.num_stages)
    for i in range(tables.num_microbatches):
        for op, order in ((FORWARD, stages), (BACKWARD, reversed(stages))):
            for stage in order:
                rows[tables.placement[stage]].append(tables.first(op, stage) + i)
    return rows


def _distinct(found: list[Run], most: int) -> list[Run]:
    """The first of each makespan."""
    first: dict[float, Run] = {}
    for run in found:
        first.setdefault(run.makespan, run)
    return list(first.values())[:most]


def _by_stage(
    tables: Tables, forward: Sequence[int], backward: Sequence[int]
) -> list[float]:
    """Priorities by stage, of forwards and of backwards; W comes last."""
    count, stages = tables.num_microbatches, tables.num_stages
    each = [*forward, *backward, *backward, *[3 * stages] * stages]
    return [float(own * count + i) for own in each for i in range(count)]


def catalogue(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Schedule]:
    """Its schedules of so many stages per rank."""
    found = []
    for build in BY_NAME.values():
        # A builder shows how many stages per rank it makes when it makes some.
        small = build(1, 2)
        if small.num_stages == num_chunks and not small.forward_only:
            with contextlib.suppress(ScheduleError):  # not for so few micro-batches
                found.append(build(num_ranks, num_microbatches))
    return found

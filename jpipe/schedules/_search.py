"""Orders tried for one placement: the catalogue's, list schedules, both made better."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ._alone import least
from ._arrange import Limits, arrange
from ._catalogue import BY_NAME
from ._homes import Homes
from ._improve import climb, justify, latest_starts, merge
from ._looped import interleaved, interleaved_zb, looped_bfs
from ._schedule import Schedule
from ._simulate import ScheduleError
from ._tables import Numbered, Rows, Run, Tables

# The name of what is none of the catalogue's.
MADE = "fit"
# So many of the fastest orders are rearranged, and of those that fit bettered.
_REARRANGED, _BETTERED = 4, 3
# So many actions are timed to better one order by swaps.
_TIMED = 20_000
# Sums of the same times in another order differ by less.
_ROUNDING = 1e-12


@dataclass
class Found:
    """An order that was tried.

    Attributes:
      name: of the schedule of the catalogue that it is, or `MADE`.
      run: when it runs what.
      whole: whether its backwards are whole.
    """

    name: str
    run: Run
    whole: bool

    def schedule(self) -> Schedule:
        """It as a schedule."""
        tables = self.run.tables
        return Schedule(
            self.name,
            tables.num_stages,
            tables.num_microbatches,
            tables.placement,
            tables.actions(self.run.rows),
        )


class Search:
    """The fastest order that is found for one placement.

    Args:
      tables: what actions cost there.
      most: the most bytes of each rank; ``None``: any.
      known: schedules to begin with, of which those of the placement are tried.
    """

    def __init__(
        self,
        tables: Tables,
        most: Sequence[float] | None,
        known: Sequence[Schedule],
    ) -> None:
        self._tables, self._most = tables, most
        self._known = [s for s in known if s.placement == tables.placement]
        self._found: list[Found] = []
        self._fits: dict[int, bool] = {}
        bound = least(tables.costs, Homes(tables.placement), tables.num_microbatches)
        self._good = bound * (1 + _ROUNDING)
        # Whether a gradient on its way takes room of its own.
        self._in_transit = most is not None and any(
            tables.costs.cotangent(stage, i)
            for stage in range(1, tables.num_stages)
            for i in range(tables.num_microbatches)
        )

    def begin(self) -> None:
        """Tries what is known, then list schedules."""
        self._add_known()
        if self.fastest > self._good:
            self._add_lists()

    def go_on(self) -> None:
        """Tries to better what was found."""
        if self.fastest > self._good:
            self._add_rearranged()
        if self.fastest > self._good:
            self._add_bettered()

    def peaks(self) -> Iterator[list[float]]:
        """What each of those that were tried holds, fitting or not."""
        return (found.run.peaks() for found in self._found)

    @property
    def fastest(self) -> float:
        """The least makespan of those that fit."""
        return next((found.run.makespan for found in self._fitting()), math.inf)

    def best(self) -> Found:
        """The fastest that fits, the catalogue's where nothing is faster."""
        found = next(self._fitting())
        run = merge(found.run, self._allowed)
        if run is found.run:
            return found
        made = Found(MADE, run, found.whole)
        keeps = found.name != MADE and run.makespan == found.run.makespan
        return found if keeps else made

    def _allowed(self, run: Run) -> bool:
        if self._most is None:
            return True
        return all(
            peak <= most for peak, most in zip(run.peaks(), self._most, strict=True)
        )

    def _fastest(self) -> list[Found]:
        """All, the fastest first, of equals the first tried."""
        return sorted(self._found, key=lambda found: found.run.makespan)

    def _fitting(self) -> Iterator[Found]:
        """Those that fit, likewise; the bytes of no more are counted than asked for."""
        for found in self._fastest():
            key = id(found)
            if key not in self._fits:
                self._fits[key] = self._allowed(found.run)
            if self._fits[key]:
                yield found

    def _add(self, name: str, rows: Numbered | None, whole: bool) -> None:
        run = self._tables.run(rows) if rows else None
        if run is not None:
            self._found.append(Found(name, run, whole))

    def _add_known(self) -> None:
        tables = self._tables
        for schedule in self._known:
            cells = (action for row in schedule.rows for action in row)
            whole = any(action.op == BACKWARD for action in cells)
            self._add(schedule.name, tables.numbered(schedule.rows), whole)
        self._add(MADE, tables.numbered(_one_at_a_time(tables)), True)

    def _add_lists(self) -> None:
        """List schedules by simple rules, with several limits of what is in flight."""
        tables = self._tables
        ranks, last = tables.num_ranks, tables.num_stages
        more = last - ranks  # in flight, for the chunks after the first
        slopes = [
            [more + 1 + slope * (ranks - 1 - rank) for rank in range(ranks)]
            for slope in (1, 2)
        ]
        backward_first = _by_class(
            tables, lambda stage: 2 * last - stage, lambda stage: last - stage
        )
        forward_first = _by_class(
            tables, lambda stage: last - stage, lambda stage: 2 * last - stage
        )
        rules = [
            (backward_first, whole, held, 0.0)
            for whole in (False, True)
            for held in (None, *slopes)
        ]
        rules += [(forward_first, False, held, 0.0) for held in (None, *slopes)]
        rules += [
            (order, False, None, 1.0) for order in (backward_first, forward_first)
        ]
        rules += [(forward_first, False, slopes[0], 1.0)]
        if more:
            first_stages = _by_class(
                tables, lambda stage: 2 * last - stage, lambda stage: stage
            )
            rules += [(first_stages, whole, None, 0.0) for whole in (False, True)]
        for priority, whole, held, patience in rules:
            limits = Limits(self._most, held)
            self._add(MADE, arrange(tables, priority, limits, whole, patience), whole)

    def _add_rearranged(self) -> None:
        """The fastest, whether they fit or not, pushed late and arranged to fit."""
        fitting = [
            found for found, _ in zip(self._fitting(), range(_REARRANGED), strict=False)
        ]
        some = [*_distinct(self._fastest(), _REARRANGED), *fitting]
        for found in {id(found): found for found in some}.values():
            priority = latest_starts(found.run)
            for careful in (True, False) if self._in_transit else (False,):
                limits = Limits(self._most, careful=careful)
                rows = arrange(self._tables, priority, limits, found.whole)
                self._add(MADE, rows, found.whole)

    def _add_bettered(self) -> None:
        for found in _distinct(list(self._fitting()), _BETTERED):
            limits = Limits(self._most)
            run = justify(found.run, limits, self._allowed, found.whole)
            run = climb(run, self._allowed, _TIMED // len(run.order) + 1)
            if run is not found.run:
                self._found.append(Found(MADE, run, found.whole))


def _one_at_a_time(tables: Tables) -> Rows:
    """Each micro-batch forward and backward before the next begins.

    With one stage per rank no schedule holds less, on any rank: what is held of a
    micro-batch, and what others bring or leave, is held in each. But what takes no time
    waits for nobody, so it may be more than one at a time; and where the first stage
    keeps less than its input, forwards make room.
    """
    rows: list[list[Action]] = [[] for _ in range(tables.num_ranks)]
    stages = range(tables.num_stages)
    for i in range(tables.num_microbatches):
        for op, order in ((FORWARD, stages), (BACKWARD, reversed(stages))):
            for stage in order:
                rows[tables.placement[stage]].append(Action(op, stage, i))
    return tuple(map(tuple, rows))


def _distinct(found: list[Found], most: int) -> list[Found]:
    """The first of each makespan."""
    first: dict[float, Found] = {}
    for one in found:
        first.setdefault(one.run.makespan, one)
    return list(first.values())[:most]


def _by_class(tables: Tables, forward, backward) -> list[float]:
    """Priorities that tell stages and ops apart; W comes last."""
    count, stages = tables.num_microbatches, tables.num_stages
    priority = [0.0] * len(tables.seconds)
    for stage in range(stages):
        for op in (FORWARD, BACKWARD, INPUT, WEIGHT):
            if op == FORWARD:
                rank = forward(stage)
            else:
                rank = 3 * stages if op == WEIGHT else backward(stage)
            first = tables.first(op, stage)
            for i in range(count):
                priority[first + i] = float(rank * count + i)
    return priority


def catalogue(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Schedule]:
    """Its schedules of so many stages per rank."""
    # A builder says how many stages per rank it makes when it makes some.
    builders = [
        build
        for build in BY_NAME.values()
        if (small := build(1, 2)).num_stages == num_chunks and not small.forward_only
    ]
    if num_chunks > 2:
        # Of those that take any number.
        builders += [
            lambda p, m, build=build: build(p, m, num_chunks)
            for build in (interleaved, interleaved_zb, looped_bfs)
        ]
    found = []
    for build in builders:
        try:
            found.append(build(num_ranks, num_microbatches))
        except ScheduleError:
            continue  # not for so few micro-batches
    return found

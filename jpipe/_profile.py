"""A step whose actions are timed: ranks work side by side, each action is waited for.

Each rank has a thread. It waits for what an action reads, runs it, waits for what it
makes and notes both times; then it sends. The programs are those of an
ordinary step, which never waits and is therefore a little faster. They are compiled
before, in the thread of the caller: a `with` block around it, such as
`jax.default_matmul_precision`, does not reach other threads.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ._instructions._bytes import live
from ._instructions._instruction import Instruction
from ._slices._built import Built
from ._slices._costs import costs_of
from .schedules import Action, Timeline
from .schedules._timeline import MemoryEvent


@dataclass
class _Clock:
    """When actions ran, in seconds since the first began, and how long moves took."""

    origin: float = field(default_factory=time.perf_counter)
    start: dict[Action, float] = field(default_factory=dict)
    end: dict[Action, float] = field(default_factory=dict)
    moves: list[float] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.origin


def profile(built: Built, leaves: Sequence[Any]) -> Timeline:
    """Runs a mini-batch with each action timed.

    Args:
      built: a mini-batch with a loss.
      leaves: what its program is given.

    Returns:
      What was measured: starts and ends in seconds; the bytes that are held at these
      times; and as ``costs``, for predictions, the median time of each op of each
      stage, with the median time of a transfer as latency.
    """
    program = built.program
    if program.is_shared:
        raise ValueError(
            "profile_step times what one process runs, and this pipeline is in "
            "several; profile it in one, or look at each with jax.profiler.trace"
        )
    jax.block_until_ready(program(leaves))
    slots, clock = program.start(leaves), _Clock()
    ranks, begun = dict[int, ThreadPoolExecutor](), Future[None]()
    made, every = dict[int, Future[None]](), list[Future[None]]()
    with ExitStack() as stack:
        for instruction in program.instructions:
            # The sender waits for a transfer.
            move = instruction.source is not None
            rank = instruction.source if move else instruction.place
            if rank not in ranks:
                ranks[rank] = stack.enter_context(ThreadPoolExecutor(1))
            before = [begun, *(made[x] for x in instruction.reads if x in made)]
            run = ranks[rank].submit(_timed_run, instruction, slots, clock, before)
            made |= dict.fromkeys(instruction.writes, run)
            every.append(run)
        begun.set_result(None)
        for run in every:
            run.result()
    return _timeline(built, clock)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The input and the targets of a batch.

    Raises:
      TypeError: if it is not a pair.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise TypeError(
            f"batch is a {type(batch).__name__}; needs the pair (x, targets)"
        )
    return batch


def _timed_run(
    instruction: Instruction,
    slots: list[Any],
    clock: _Clock,
    before: Sequence[Future[None]],
) -> None:
    """Runs an instruction after those that make what it reads, and waits for it."""
    for run in before:
        run.result()
    given = jax.block_until_ready(instruction.take(slots))
    begin = clock.now()
    results = jax.block_until_ready(instruction.run(*given))
    slots[instruction.into] = results
    del results
    end = clock.now()
    if instruction.source is None:
        clock.start[instruction.label], clock.end[instruction.label] = begin, end
    elif instruction.source >= 0:
        clock.moves.append(end - begin)


def _timeline(built: Built, clock: _Clock) -> Timeline:
    """The timeline of the schedule; what was not run by itself takes no time."""
    schedule = built.pipe.schedule
    start, end = {}, {}
    order = schedule.order()
    first = min(clock.start[action] for action in order if action in clock.start)
    free = [first] * schedule.num_ranks
    for action in order:
        rank = schedule.homes[action.microbatch][action.stage]
        start[action] = clock.start.get(action, free[rank])
        end[action] = clock.end.get(action, free[rank])
        free[rank] = end[action]
    start = {action: time - first for action, time in start.items()}
    end = {action: time - first for action, time in end.items()}
    timeline = Timeline(
        schedule.name,
        schedule.placement,
        schedule.rows,
        start,
        end,
        replicas=schedule.replicas,
    )
    known = costs_of(built.program, built.stages, built.batch, schedule.placement)
    latency = statistics.median(clock.moves) if clock.moves else 0.0
    return replace(
        timeline,
        costs=replace(timeline.median_costs(known), latency=latency, in_seconds=True),
        memory=tuple(_memory(built, timeline)),
    )


def _memory(built: Built, timeline: Timeline) -> Iterable[MemoryEvent]:
    """The bytes of each rank when its actions end.

    Of a device that serves several ranks all is counted as that of the first.
    """
    pipe, program = built.pipe, built.program
    rank_of: dict[int, int] = {}
    for rank in sorted(pipe.schedule.running):
        rank_of.setdefault(pipe.places.index(pipe.ranks[rank]), rank)
    counts = live(program)
    held, now = next(counts), dict.fromkeys(rank_of.values(), 0.0)
    for place, rank in rank_of.items():
        yield MemoryEvent(0.0, rank, float(held[place]))
    for instruction, count in zip(program.instructions, counts, strict=True):
        end = timeline.end.get(instruction.label, 0.0)
        ends = instruction.place, instruction.source
        for place, rank in rank_of.items():
            if place in ends:
                now[rank] = max(now[rank], end)
                yield MemoryEvent(now[rank], rank, float(count[place]))

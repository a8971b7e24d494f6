"""A step whose actions are timed: ranks work side by side, each action is waited for.

Each rank has a thread. It waits for what an action reads, runs it, waits for what it
makes and notes both times; then it frees what an ordinary step frees there, and sends.
The programs are those of such a step, which never waits and is therefore a little
faster. They are compiled before, in the thread of the caller: a `with` block around it,
such as `jax.default_matmul_precision`, does not reach other threads.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax

from ._instructions._bytes import live
from ._instructions._instruction import Instruction
from ._slices._built import Built
from ._slices._costs import costs_of
from .schedules import Action, Timeline
from .schedules._timeline import MemoryEvent

# When each action began and ended, in seconds of any origin.
Spans = dict[Action, tuple[float, float]]


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
    slots, spans, moves = program.start(leaves), Spans(), list[float]()
    begun, made, every = Future[Any](), dict[int, Future[Any]](), list[Future[Any]]()
    # The sender waits for a transfer.
    rows = [i.source if i.is_move else i.place for i in program.instructions]
    with ExitStack() as stack:
        pools = {row: stack.enter_context(ThreadPoolExecutor(1)) for row in set(rows)}
        stack.callback(begun.cancel)  # or they would wait, if this was interrupted
        for row, instruction in zip(rows, program.instructions, strict=True):
            before = [begun, *(made[x] for x in instruction.reads if x in made)]
            # Only the thread of a place reads what is there, in order. What is in no
            # place is an argument, which the caller holds; others may still read it.
            frees = [slot for slot in instruction.frees if program.places[slot] >= 0]
            every.append(pools[row].submit(_timed, instruction, slots, before, frees))
            made |= dict.fromkeys(instruction.writes, every[-1])
        begun.set_result(None)
        for instruction, run in zip(program.instructions, every, strict=True):
            begin, end = run.result()
            if instruction.source is None:
                spans[instruction.label] = begin, end
            elif instruction.source >= 0:
                moves.append(end - begin)
    return _timeline(built, spans, moves)


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


def _timed(
    instruction: Instruction,
    slots: list[Any],
    before: Sequence[Future[Any]],
    frees: Sequence[int],
) -> tuple[float, float]:
    """Runs an instruction after some others, and frees slots.

    Returns:
      When it began, and when it was done.
    """
    for run in before:
        run.result()
    given = jax.block_until_ready(instruction.take(slots))
    begin = time.perf_counter()
    results = jax.block_until_ready(instruction.run(*given))
    end = time.perf_counter()
    slots[instruction.into] = results
    for slot in frees:
        slots[slot] = None
    return begin, end


def _timeline(built: Built, spans: Spans, moves: Sequence[float]) -> Timeline:
    """The timeline of the schedule; what was not run by itself takes no time."""
    schedule = built.pipe.schedule
    start, end = {}, {}
    order = schedule.order()
    first = min(spans[action][0] for action in order if action in spans)
    free = [first] * schedule.num_ranks
    for action in order:
        rank = schedule.rank_of[action.microbatch][action.stage]
        begin, free[rank] = spans.get(action, (free[rank], free[rank]))
        start[action], end[action] = begin - first, free[rank] - first
    timeline = Timeline(
        schedule.name,
        schedule.placement,
        schedule.rows,
        start,
        end,
        replicas=schedule.replicas,
    )
    known = costs_of(built.program, built.stages, built.batch, schedule.placement)
    latency = statistics.median(moves) if moves else 0.0
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
    for rank in sorted(itertools.chain.from_iterable(pipe.schedule.ranks_of)):
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

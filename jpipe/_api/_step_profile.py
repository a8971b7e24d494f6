"""A step whose actions are timed: ranks work side by side, each action is waited for.

Each place has a thread. For an instruction it waits for what the instruction reads,
runs it, waits for the results and notes both times; then it frees what an ordinary step
frees there, and sends. The programs are those of such a step, which never waits and is
therefore a little faster. They are compiled before, in the thread of the caller: a
`with` block around it, such as `jax.default_matmul_precision`, does not reach other
threads.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from .._instructions._instruction import Instruction
from .._instructions._memory import live_bytes
from .._instructions._program import Program
from .._instructions._stage_bytes import stage_costs
from .._pipelined._specialization import Specialization
from ..schedules import Action, Schedule, Timeline
from ..schedules._timeline import MemoryEvent


class Span(NamedTuple):
    """The begin and the end of a run, in seconds of any origin."""

    begin: float
    end: float


@dataclass(frozen=True)
class Measurements:
    """The times of one run of a program.

    Attributes:
      actions: the span of each action that runs a program.
      moves: the seconds of each move between two devices.
    """

    actions: Mapping[Action, Span]
    moves: Sequence[float]


def profile_actions(specialization: Specialization, leaves: Sequence[Any]) -> Timeline:
    """Runs a mini-batch with each action timed.

    Args:
      specialization: the gradients of a loss for the mini-batch.
      leaves: the arguments of its program.

    Returns:
      The measured timeline: starts and ends in seconds; the bytes that are held at
      these times; and as ``costs``, for predictions, the median time of each op of each
      stage, with the median time of a transfer as latency, which is taken to overlap.
    """
    program = specialization.program
    schedule = specialization.placement.schedule
    if program.is_shared:
        raise ValueError(
            "profile times what one process runs, and this pipeline is in "
            "several; profile it in one, or look at each with jax.profiler.trace"
        )
    jax.block_until_ready(program(leaves))
    measurements = _measure(program, leaves)

    timeline = _timeline(schedule, measurements.actions)
    costs = timeline.median_costs(stage_costs(program, schedule))
    latency = statistics.median(measurements.moves) if measurements.moves else 0.0
    return replace(
        timeline,
        costs=replace(costs, latency=latency, in_seconds=True),
        memory=tuple(_memory_events(specialization, timeline)),
    )


def _measure(program: Program, leaves: Sequence[Any]) -> Measurements:
    """Runs a program with a thread for each place."""
    slots = program.initial_slots(leaves)
    may_begin = Future[Any]()
    writer: dict[int, Future[Any]] = {}  # slot -> the run that writes it
    runs: list[Future[Span]] = []
    # A move runs where it comes from: the sender waits for it.
    places = [
        instruction.source if instruction.is_move else instruction.place
        for instruction in program.instructions
    ]

    with ExitStack() as stack:
        threads = {
            place: stack.enter_context(ThreadPoolExecutor(max_workers=1))
            for place in set(places)
        }
        stack.callback(may_begin.cancel)  # or threads would wait after an interrupt
        for place, instruction in zip(places, program.instructions, strict=True):
            awaited = [writer[slot] for slot in instruction.reads if slot in writer]
            # Only the thread of a place reads the slots there, in order. Arguments in
            # no place belong to the caller, and other threads may still read them.
            frees = [slot for slot in instruction.frees if program.places[slot] >= 0]
            run = threads[place].submit(
                _run, instruction, slots, awaited=[may_begin, *awaited], frees=frees
            )
            runs.append(run)
            writer.update(dict.fromkeys(instruction.writes, run))
        may_begin.set_result(None)
        spans = [run.result() for run in runs]

    actions: dict[Action, Span] = {}
    moves: list[float] = []
    for instruction, span in zip(program.instructions, spans, strict=True):
        if instruction.source is None:
            actions[instruction.label] = span
        elif instruction.source >= 0:
            moves.append(span.end - span.begin)
    return Measurements(actions, moves)


def _run(
    instruction: Instruction,
    slots: list[Any],
    *,
    awaited: Sequence[Future[Any]],
    frees: Sequence[int],
) -> Span:
    """Runs an instruction, and frees slots.

    Args:
      instruction: the instruction.
      slots: the arrays of the program.
      awaited: the runs of the instructions that write its operands.
      frees: the slots that no later instruction reads.
    """
    for run in awaited:
        run.result()
    operands = jax.block_until_ready(instruction.take(slots))

    begin = time.perf_counter()
    results = jax.block_until_ready(instruction.run(*operands))
    end = time.perf_counter()

    slots[instruction.result_slots] = results
    for slot in frees:
        slots[slot] = None
    return Span(begin, end)


def _timeline(schedule: Schedule, spans: Mapping[Action, Span]) -> Timeline:
    """The timeline of a schedule; an action without a span takes no time."""
    order = schedule.order()
    first = min(spans[action].begin for action in order if action in spans)
    free_from = [first] * schedule.num_ranks
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for action in order:
        rank = schedule.rank_of[action.microbatch][action.stage]
        now = free_from[rank]
        span = spans.get(action, Span(now, now))
        start[action] = span.begin - first
        end[action] = span.end - first
        free_from[rank] = span.end
    return Timeline(schedule, start, end)


def _memory_events(
    specialization: Specialization, timeline: Timeline
) -> Iterator[MemoryEvent]:
    """The bytes of each rank when its actions end.

    All bytes of a device that serves several ranks count as those of the first.
    """
    placement = specialization.placement
    program = specialization.program
    rank_of: dict[int, int] = {}  # place -> rank
    for rank in sorted(itertools.chain.from_iterable(placement.schedule.ranks_of)):
        rank_of.setdefault(
            placement.devices_of_places.index(placement.ranks[rank]), rank
        )

    # The live bytes of each place: at the start, then after each instruction.
    counts = live_bytes(program)
    nbytes = next(counts)
    time_of_rank = dict.fromkeys(rank_of.values(), 0.0)
    for place, rank in rank_of.items():
        yield MemoryEvent(0.0, rank, float(nbytes[place]))
    for instruction, nbytes in zip(program.instructions, counts, strict=True):
        end = timeline.end.get(instruction.label, 0.0)
        for place, rank in rank_of.items():
            if place in (instruction.place, instruction.source):
                time_of_rank[rank] = max(time_of_rank[rank], end)
                yield MemoryEvent(time_of_rank[rank], rank, float(nbytes[place]))

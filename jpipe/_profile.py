"""A step whose actions are timed: ranks work side by side, each action is waited for.

One thread per rank walks its row. It waits for what an action reads, runs it, waits
for what it makes and notes both times; then it sends. The programs are those of an
ordinary step, which never waits and is therefore a little faster. They are compiled
before, in the thread of the caller: a `with` block around it, such as
`jax.default_matmul_precision`, says nothing to other threads.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ._run._execute import Live, Step, execute
from ._run._memory import costs_of
from ._run._program import Program
from .schedules import Action, Timeline
from .schedules._action import Needs
from .schedules._simulate import memory_events


@dataclass
class _Clock:
    """When actions ran, in seconds since the first began, and how long moves took."""

    origin: float = field(default_factory=time.perf_counter)
    start: dict[Action, float] = field(default_factory=dict)
    end: dict[Action, float] = field(default_factory=dict)
    moves: list[float] = field(default_factory=list)

    def now(self) -> float:
        return time.perf_counter() - self.origin


def profile(program: Program, feed: Callable[[], Live]) -> Timeline:
    """Runs a mini-batch with each action timed.

    Args:
      program: a compiled mini-batch with a loss.
      feed: gives what the executor starts from; called twice, since the first run
        compiles.

    Returns:
      What was measured: starts and ends in seconds; the bytes that the executor holds
      at these times; and as ``costs``, for predictions, the median time of each op of
      each stage, with the median time of a transfer as latency.
    """
    compiled = _compiled(program.steps, feed())
    live = feed()
    jax.block_until_ready((live.x, live.extra, live.grads, live.tally))
    placement, clock = program.schedule.placement, _Clock()
    done = {step.action: threading.Event() for step in compiled}
    needs = Needs(program.schedule.rows, len(placement))
    failed = threading.Event()

    def work(steps: Sequence[Step]) -> None:
        try:
            for step in steps:
                for need in _waits(step.action, needs, program.ran):
                    while not done[need].wait(0.1):
                        if failed.is_set():
                            return
                _timed_run(step, live, clock)
                done[step.action].set()
        except BaseException:
            failed.set()
            raise

    ranks = range(program.schedule.num_ranks)
    rows = [[s for s in compiled if placement[s.stage] == rank] for rank in ranks]
    with ThreadPoolExecutor(len(rows)) as pool:
        for future in [pool.submit(work, row) for row in rows]:
            future.result()
    return _timeline(program, clock)


def _compiled(steps: Sequence[Step], live: Live) -> list[Step]:
    """Runs a mini-batch; the same steps with what `jax.jit` made of each for it."""
    compiled = []

    def noting(step: Step) -> Step:
        def program(*args: Any) -> Any:
            ahead: Any = step.program
            compiled.append(step._replace(program=ahead.lower(*args).compile()))
            return ahead(*args)

        return step._replace(program=program)

    execute([noting(step) for step in steps], live)
    return compiled


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The input and the targets of a batch.

    Raises:
      TypeError: if it is no pair.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise TypeError(
            f"batch is a {type(batch).__name__}; needs the pair (x, targets)"
        )
    return batch


def _waits(
    action: Action,
    needs: Callable[[Action], tuple[Action, ...]],
    ran: Mapping[Action, Action],
) -> list[Action]:
    """The steps that an action waits for, through those that were not run alone."""
    waits, todo = [], list(needs(action))
    while todo:
        need = todo.pop()
        if need in ran:
            waits.append(ran[need])
        else:
            todo += needs(need)
    return [need for need in waits if need != action]


def _timed_run(step: Step, live: Live, clock: _Clock) -> None:
    def program(*args: Any) -> Any:
        jax.block_until_ready(args)
        clock.start[step.action] = clock.now()
        result = jax.block_until_ready(step.program(*args))
        clock.end[step.action] = clock.now()
        return result

    def send(cells: Any, microbatch: int, leaves: Any) -> None:
        begin = clock.now()
        step.send(cells, microbatch, leaves)
        jax.block_until_ready([cells[route.stage][microbatch] for route in step.routes])
        if any(r.size and str(r.device) != step.device for r in step.routes):
            clock.moves.append(clock.now() - begin)

    timed = step._replace(program=program, send=send)
    timed.run(timed, live)


def _timeline(program: Program, clock: _Clock) -> Timeline:
    """The timeline of the schedule; what was not run alone takes no time."""
    schedule = program.schedule
    start, end = {}, {}
    free = [0.0] * schedule.num_ranks
    for action in schedule.simulate().order():
        rank = schedule.placement[action.stage]
        real = program.ran.get(action)
        start[action] = clock.start[real] if real else free[rank]
        end[action] = clock.end[real] if real else free[rank]
        free[rank] = end[action]
    timeline = Timeline(schedule.name, schedule.placement, schedule.rows, start, end)
    costs = timeline.median_costs(costs_of(program))
    latency = statistics.median(clock.moves) if clock.moves else 0.0
    return replace(
        timeline,
        costs=replace(costs, latency=latency),
        memory=tuple(memory_events(timeline, costs)),
    )

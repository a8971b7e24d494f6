"""A lower bound of the makespan: each rank alone, with the freedom to interrupt.

For each action of a rank, over the longest chains of dependencies before and after it:

    head[a] = max over what a depends on of (head + duration + delay), or 0
    tail[a] = max over what depends on a of (delay + duration + tail), or the exchange

One machine that may interrupt its work and runs, of what has arrived, the action with
the longest tail reaches the least possible ``max(end + tail)``: Jackson's preemptive
schedule. No schedule of the pipeline is faster than that of any rank.
"""

import heapq
from typing import NamedTuple

from ._action import BACKWARD, INPUT, WEIGHT
from ._action_tables import ActionTables

# Sums of the same times in another order differ by a smaller part.
ROUNDING = 1e-12


class _Job(NamedTuple):
    """An action as one machine sees it: earliest start, duration, what must follow."""

    head: float
    duration: float
    tail: float


def compute_lower_bound(tables: ActionTables) -> float:
    """A time that no schedule of these stages beats, whatever it may hold.

    Each rank is looked at alone: all its actions, each not before the stages before it
    can have run, and after each action the stages that follow and the exchange of
    gradients. Backwards are whole or split, whichever is less. The longest chain of one
    micro-batch, and the work of the busiest rank with its warm-up and drain, are
    included.

    References:
      Carlier, The one-machine sequencing problem (1982).
    """
    count = tables.num_microbatches
    duration = [*tables.durations]
    tail = [*tables.exchange_times]
    earliest_end = [0.0] * len(duration)
    first_backward = tables.first_id(BACKWARD, 0)
    first_input = tables.first_id(INPUT, 0)
    first_weight = tables.first_id(WEIGHT, 0)

    # I takes the least time until the gradient of a backward can go on, whole or split;
    # W the least time that is left after it.
    for offset in range(count * tables.num_stages):
        whole = duration[first_backward + offset]
        input_grad = duration[first_input + offset]
        weight_grad = duration[first_weight + offset]
        total = min(whole, input_grad + weight_grad)
        first_half = min(whole, input_grad)
        duration[first_input + offset] = first_half
        duration[first_weight + offset] = max(total - first_half, 0.0)

    # In an order of execution: F by stage, I by stage from the last, W.
    order = [*range(first_backward)]
    if tables.has_backwards:
        order += reversed(range(first_input, first_weight))
        order += range(first_weight, len(duration))

    for action_id in reversed(order):
        chain = duration[action_id] + tail[action_id]
        for ids, delays in tables.dependencies:
            before = ids[action_id]
            if before >= 0:
                tail[before] = max(tail[before], delays[action_id] + chain)

    jobs: list[list[_Job]] = [[] for _ in range(tables.num_ranks)]
    for action_id in order:
        head = 0.0
        for ids, delays in tables.dependencies:
            before = ids[action_id]
            if before >= 0:
                head = max(head, earliest_end[before] + delays[action_id])
        earliest_end[action_id] = head + duration[action_id]
        rank = tables.rank_of[action_id % count][tables.stage(action_id)]
        jobs[rank].append(_Job(head, duration[action_id], tail[action_id]))
    return max(map(_least_time, jobs), default=0.0)


def _least_time(jobs: list[_Job]) -> float:
    """The least time of one rank that may interrupt its work."""
    arriving = sorted(jobs, reverse=True)  # the next one is the last
    ready: list[tuple[float, float]] = []  # (-tail, duration that is left)
    now = 0.0
    makespan = 0.0
    while arriving or ready:
        if not ready:
            now = max(now, arriving[-1].head)
        while arriving and arriving[-1].head <= now:
            job = arriving.pop()
            heapq.heappush(ready, (-job.tail, job.duration))

        negative_tail, duration = heapq.heappop(ready)
        until = arriving[-1].head if arriving else now + duration
        if now + duration <= until:
            now += duration
            makespan = max(makespan, now - negative_tail)
        else:
            heapq.heappush(ready, (negative_tail, duration - (until - now)))
            now = until
    return makespan

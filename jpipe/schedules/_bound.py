"""What no order of the same actions can beat: each rank alone."""

import heapq

from ._action import BACKWARD, INPUT, WEIGHT
from ._tables import Tables

# When a part may begin, how long it takes, and what must still follow it.
_Part = tuple[float, float, float]


def lower_bound(tables: Tables) -> float:
    """A time that no schedule of these stages beats, whatever it may hold.

    Each rank is looked at alone: everything it has to do, nothing before the stages
    before it can have been run, and after each action the stages that follow, and the
    exchange of gradients. It may even interrupt its work; the best order is then known.
    Backwards are whole or split, whichever is less. The longest chain of one
    micro-batch and the work of the busiest rank with its warm-up and drain are among
    what is counted.

    References:
      Carlier, The one-machine sequencing problem (1982).
    """
    parts: list[list[_Part]] = [[] for _ in range(tables.num_ranks)]
    count = tables.num_microbatches
    seconds, tail = [*tables.seconds], [*tables.exchange]
    whole, half, rest = (tables.first(op, 0) for op in (BACKWARD, INPUT, WEIGHT))
    for at in range(count * tables.num_stages):
        # Of a backward the least before its gradient goes on, and the least after that.
        both = min(seconds[whole + at], seconds[half + at] + seconds[rest + at])
        seconds[half + at] = min(seconds[whole + at], seconds[half + at])
        seconds[rest + at] = max(both - seconds[half + at], 0.0)
    order = [*range(whole)]
    if tables.training:
        order += [*reversed(range(half, rest)), *range(rest, len(seconds))]
    for number in reversed(order):
        long = seconds[number] + tail[number]
        for read, delay in tables.reads:
            if (before := read[number]) >= 0:
                tail[before] = max(tail[before], delay[number] + long)
    end = [0.0] * len(seconds)
    for number in order:
        arrivals = (
            end[read[number]] + delay[number]
            for read, delay in tables.reads
            if read[number] >= 0
        )
        head = max(arrivals, default=0.0)
        end[number] = head + seconds[number]
        rank = tables.rank_of[number % count][tables.stage(number)]
        parts[rank].append((head, seconds[number], tail[number]))
    return max(map(_one_rank, parts), default=0.0)


def _one_rank(parts: list[_Part]) -> float:
    """The least time of one rank that may interrupt its work.

    Of what has arrived it does what has the longest to follow.
    """
    waiting = sorted(parts, reverse=True)
    ready: list[tuple[float, float]] = []
    now = most = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, seconds, follow = waiting.pop()
            heapq.heappush(ready, (-follow, seconds))
        follow, seconds = heapq.heappop(ready)
        until = waiting[-1][0] if waiting else now + seconds
        if now + seconds <= until:
            now += seconds
            most = max(most, now - follow)
        else:
            heapq.heappush(ready, (follow, seconds - (until - now)))
            now = until
    return most

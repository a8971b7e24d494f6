"""Each rank alone: the least time of what it has to do."""

import heapq
from collections import defaultdict

from ._action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ._costs import Costs, at
from ._homes import Homes

# When a part may begin, how long it takes, and what must still follow it.
_Part = tuple[float, float, float]


def one_machine_bound(
    costs: Costs,
    homes: Homes,
    num_microbatches: int,
    forward_only: bool = False,
) -> float:
    """The least time of the rank that needs most, nobody keeping it waiting.

    See `lower_bound`.
    """
    parts = _parts(costs, homes, num_microbatches, forward_only)
    return max(map(_one_rank, parts.values()), default=0.0)


def _parts(
    costs: Costs, homes: Homes, num_microbatches: int, forward_only: bool
) -> dict[int, list[_Part]]:
    """What each rank has to do."""
    found: dict[int, list[_Part]] = defaultdict(list)
    last = homes.num_stages - 1
    # Ranks go on meanwhile; the step does not end before.
    exchange = [at(costs.exchange, stage) for stage in range(last + 1)]

    def travel(op: str, stage: int, i: int, to: int) -> float:
        if homes[i][stage] == homes[i][to]:
            return 0.0
        return costs.transfer(Action(op, stage, i))

    for i in range(num_microbatches):
        # Of a backward, whole or split, the least before its gradient goes on, and the
        # least after that.
        first, rest = [], []
        for stage in range(last + 1):
            whole, half, other = (
                costs.of(Action(op, stage, i)) for op in (BACKWARD, INPUT, WEIGHT)
            )
            first.append(min(whole, half))
            rest.append(max(min(whole, half + other) - first[-1], 0.0))
        after = [0.0] * (last + 1)  # the first part of a backward
        for stage in range(last + 1):
            after[stage] = rest[stage] + exchange[stage]
            if stage:
                later = travel(INPUT, stage, i, stage - 1) + first[stage - 1]
                after[stage] = max(after[stage], later + after[stage - 1])
        forward = [costs.of(Action(FORWARD, stage, i)) for stage in range(last + 1)]
        follows = [0.0] * (last + 1)
        follows[last] = 0.0 if forward_only else first[last] + after[last]
        for stage in reversed(range(last)):
            there = travel(FORWARD, stage, i, stage + 1)
            follows[stage] = there + forward[stage + 1] + follows[stage + 1]
        now = 0.0
        for stage, rank in enumerate(homes[i]):
            found[rank].append((now, forward[stage], follows[stage]))
            now += forward[stage]
            now += travel(FORWARD, stage, i, stage + 1) if stage < last else 0.0
        for stage in reversed(range(0 if forward_only else last + 1)):
            rank = homes[i][stage]
            found[rank].append((now, first[stage], after[stage]))
            now += first[stage]
            found[rank].append((now, rest[stage], exchange[stage]))
            now += travel(INPUT, stage, i, stage - 1) if stage else 0.0
    return found


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

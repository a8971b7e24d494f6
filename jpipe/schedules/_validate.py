"""Whether a schedule can run: every fault found, by rule, with its place."""

import itertools
import reprlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, LOCAL_READS, OPS, Action

# How many cells of a row are shown on each side of the one at fault.
_AROUND = 4
# So many faults are read; a text that is not a schedule at all has one for each word.
_MOST = 50


def refusal(name: Any, faults: Iterable[str]) -> str:
    """The message of all faults of a schedule."""
    lines = [f"  * {fault}" for fault in itertools.islice(faults, _MOST + 1)]
    if len(lines) > _MOST:
        lines[_MOST:] = ["  * and more"]
    return "\n".join([f"schedule {name!r} cannot run:", *lines])


def faults(schedule: Any) -> list[str]:
    """What is wrong with a schedule, apart from ranks that wait for each other.

    Losses are summed in the order of the forwards and gradients in that of the
    backwards, so both must ascend in each stage: then every schedule gives the same
    bits.

    Args:
      schedule: a `Schedule`, with anything in its fields.

    Returns:
      A line or more for each fault, beginning with the number of its rule.
    """
    # Each needs what those before it have checked.
    for rules in (_malformed, _miscounted, _misordered):
        if found := [*itertools.islice(rules(schedule), _MOST + 1)]:
            return found
    for rank, row in enumerate(schedule.rows):
        if not row:
            warnings.warn(f"E9 rank {rank} runs nothing", stacklevel=3)
    return []


def _malformed(schedule: Any) -> Iterator[str]:
    """Sizes, ranks of stages and cells that are none."""
    stages, placement, rows = schedule.num_stages, schedule.placement, schedule.rows
    sizes, replicas = (stages, schedule.num_microbatches), schedule.replicas
    ranks = range(len(rows))
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        yield (
            f"E0 num_stages={sizes[0]!r}, num_microbatches={sizes[1]!r}: must be ints "
            f"of at least 1"
        )
    elif {len(placement), len(replicas or placement)} != {stages}:
        yield (
            f"E4 placement has {len(placement)} entries, replicas {len(replicas)}, for "
            f"{stages} stages"
        )
    else:
        for stage, own in enumerate(schedule.ranks_of):
            if not all(rank in ranks for rank in own):
                yield f"E4 stage {stage} is on ranks {own}, there are {len(ranks)}"
            if len({*own}) != len(own) or [*own[:1]] != [placement[stage]]:
                yield (
                    f"E4 replicas[{stage}]={tuple(own)}: needs different ranks, "
                    f"placement[{stage}]={placement[stage]} first"
                )
    if not isinstance(schedule.forward_only, bool):
        flag = reprlib.repr(schedule.forward_only)
        yield f"E0 forward_only={flag}: must be True or False"
    for rank, position, cell in _cells(schedule):
        if not isinstance(cell, Action):
            yield (
                f"E0 rows[{rank}][{position}] is a {type(cell).__name__}, needs a "
                f"jpipe.schedules.Action, such as Action.parse('2F0')"
            )


def _miscounted(schedule: Any) -> Iterator[str]:
    """What does not exist, runs in the wrong place, is missing, or appears twice."""
    last, count = schedule.num_stages - 1, schedule.num_microbatches
    ranks_of = schedule.ranks_of
    cells = [*_cells(schedule)] if schedule.replicas else []
    rank_of = {action: rank for rank, _, action in cells}
    ran: dict[tuple[int, int], list[str]] = defaultdict(list)
    for _, _, action in _cells(schedule):
        ran[action.stage, action.microbatch].append(action.op)
    for rank, position, action in _cells(schedule):
        op, stage, microbatch = action
        if op not in OPS:
            message = f"E1 {action}: the ops are {', '.join(OPS)}"
        elif not 0 <= stage <= last:
            message = f"E2 {action}: the stages are 0 to {last}"
        elif not 0 <= microbatch < count:
            message = f"E3 {action}: the micro-batches are 0 to {count - 1}"
        elif rank not in ranks_of[stage]:
            listed = " or ".join(map(str, ranks_of[stage]))
            message = f"E4 {action}: stage {stage} is placed on rank {listed}"
        elif (of_forward := rank_of.get(action._replace(op=FORWARD), rank)) != rank:
            message = f"E8 {action}: its forward runs on rank {of_forward}"
        else:
            continue
        yield _shown(message, schedule.rows[rank], rank, position)
    complete = ["F"] if schedule.forward_only else ["F B", "F I W"]
    alone = " alone: it is forward_only" if schedule.forward_only else ""
    for stage in range(last + 1):
        for i in range(count):
            ops = " ".join(sorted(ran[stage, i], key="FBIW".find))
            if ops not in complete:
                yield (
                    f"E5 stage {stage} runs {ops or 'nothing'} on micro-batch {i}, "
                    f"needs {' or '.join(complete)}{alone}"
                )


def _misordered(schedule: Any) -> Iterator[str]:
    """What runs before what it reads on its own rank, and sums that do not ascend."""
    for rank, row in enumerate(schedule.rows):
        position = {action: i for i, action in enumerate(row)}
        last: dict[tuple[str, int], Action] = {}
        for at, action in enumerate(row):
            first = action._replace(op=LOCAL_READS.get(action.op, action.op))
            if position[first] > at:
                yield _shown(f"E6 {action} runs before {first}", row, rank, at)
            if action.op == INPUT:
                continue
            kind = FORWARD if action.op == FORWARD else BACKWARD
            before = last.get((kind, action.stage))
            if before is not None and before.microbatch > action.microbatch:
                message = (
                    f"E6 {action} runs after {before}: losses and gradients are summed "
                    f"in ascending order of micro-batches"
                )
                yield _shown(message, row, rank, at)
            last[kind, action.stage] = action


def _cells(schedule: Any) -> Iterator[tuple[int, int, Action]]:
    """The rank and the position of each action."""
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            yield rank, position, action


def _shown(message: str, row: tuple[Action, ...], rank: int, position: int) -> str:
    """A fault with its place: the cells around it, and a mark below."""
    begin, end = max(position - _AROUND, 0), position + _AROUND + 1
    left = ["..."] if begin else []
    cells = [*left, *map(str, row[begin:end]), *(["..."] if end < len(row) else [])]
    at = position - begin + len(left)
    indent = len(" ".join(cells[:at])) + (1 if at else 0)
    prefix = f"rank {rank}: "
    return (
        f"{message} (rank {rank}, position {position})\n"
        f"      {prefix}{' '.join(cells)}\n"
        f"      {' ' * (len(prefix) + indent)}{'^' * len(cells[at])}"
    )

"""Whether a schedule can run: every fault found, by rule, with its place."""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, LOCAL_READS, OPS, Action

Rows = tuple[tuple[Action, ...], ...]

# How many cells of a row are shown on each side of the one at fault.
_AROUND = 4
# So many faults are read; a text that is not a schedule at all has one for each word.
_MOST = 50


def refusal(name: Any, faults: Iterable[str]) -> str:
    """The message of all faults of a schedule."""
    every = list(faults)
    lines = [f"  * {fault}" for fault in every[:_MOST]]
    if more := len(every) - len(lines):
        lines.append(f"  * and {more} more")
    return "\n".join([f"schedule {name!r} cannot run:", *lines])


def malformed(
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int],
    rows: Rows,
    replicas: Sequence[Sequence[int]],
) -> Iterator[str]:
    """Sizes, cells and ranks of stages that are none."""
    sizes = num_stages, num_microbatches
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        yield (
            f"E0 num_stages={num_stages!r}, num_microbatches={num_microbatches!r}: "
            f"must be ints of at least 1"
        )
    elif {len(placement), len(replicas or placement)} != {num_stages}:
        yield (
            f"E4 placement has {len(placement)} entries, replicas {len(replicas)}, for "
            f"{num_stages} stages"
        )
    else:
        for stage, ranks in enumerate(replicas):
            if len({*ranks}) != len(ranks) or [*ranks[:1]] != [placement[stage]]:
                yield (
                    f"E4 replicas[{stage}]={tuple(ranks)}: needs different ranks, "
                    f"placement[{stage}]={placement[stage]} first"
                )
    for rank, position, cell in _cells(rows):
        if not isinstance(cell, Action):
            yield (
                f"E0 rows[{rank}][{position}] is a {type(cell).__name__}, needs a "
                f"jpipe.schedules.Action, such as Action.parse('2F0')"
            )


def too_large(num_stages: int, num_microbatches: int, num_cells: int) -> str:
    """That more is missing than anybody would read, if so; else empty."""
    pairs = num_stages * num_microbatches
    return (
        f"E5 stages 0 to {num_stages - 1} and micro-batches 0 to "
        f"{num_microbatches - 1} are {pairs} pairs, there are {num_cells} cells: if "
        f"that is more than was meant, a number is too large"
    ) * (pairs > num_cells + _MOST)


def faults(
    rows: Rows,
    placement: tuple[int, ...],
    num_microbatches: int,
    forward_only: bool,
    replicas: tuple[tuple[int, ...], ...],
) -> list[str]:
    """What is wrong with a schedule, apart from ranks that wait for each other.

    Losses are summed in the order of the forwards and gradients in that of the
    backwards, so both must ascend in each stage: then every schedule gives the same
    bits.

    Args:
      rows: the actions of each rank.
      placement: the rank of each stage.
      num_microbatches: the number of micro-batches.
      forward_only: whether there is nothing but forwards.
      replicas: the ranks of each stage, where several take turns.

    Returns:
      A line or more for each fault, beginning with the number of its rule.
    """
    found = [
        *_out_of_place(rows, placement, num_microbatches, replicas),
        *_miscounted(rows, len(placement), num_microbatches, forward_only),
    ]
    found += [] if found else _misordered(rows)
    for rank, row in enumerate(rows):
        if not row and not found:
            warnings.warn(f"E9 rank {rank} runs nothing", stacklevel=4)
    return found


def _out_of_place(
    rows: Rows,
    placement: tuple[int, ...],
    num_microbatches: int,
    replicas: tuple[tuple[int, ...], ...],
) -> Iterator[str]:
    """Actions that name something that does not exist or run in the wrong place."""
    last = len(placement) - 1
    ranks_of = replicas or [(rank,) for rank in placement]
    there = range(len(rows))
    wrong = [s for s, own in enumerate(ranks_of) if not set(own) <= set(there)]
    if wrong:
        yield f"E4 stages {wrong} are placed on ranks that are not 0 to {len(rows) - 1}"
    rank_of = {action: rank for rank, _, action in _cells(rows)} if replicas else {}
    for rank, position, action in _cells(rows):
        op, stage, microbatch = action
        if op not in OPS:
            message = f"E1 {action}: the ops are {', '.join(OPS)}"
        elif not 0 <= stage <= last:
            message = f"E2 {action}: the stages are 0 to {last}"
        elif not 0 <= microbatch < num_microbatches:
            message = f"E3 {action}: the micro-batches are 0 to {num_microbatches - 1}"
        elif rank not in ranks_of[stage]:
            listed = " or ".join(map(str, ranks_of[stage]))
            message = f"E4 {action}: stage {stage} is placed on rank {listed}"
        elif (home := rank_of.get(action._replace(op=FORWARD), rank)) != rank:
            message = f"E8 {action}: its forward runs on rank {home}"
        else:
            continue
        yield _shown(message, rows[rank], rank, position)


def _miscounted(
    rows: Rows, num_stages: int, num_microbatches: int, forward_only: bool
) -> Iterator[str]:
    """What is missing, appears twice, or does the same work twice."""
    if message := too_large(num_stages, num_microbatches, sum(map(len, rows))):
        yield message
        return
    ran: dict[tuple[int, int], list[str]] = defaultdict(list)
    for _, _, action in _cells(rows):
        ran[action.stage, action.microbatch].append(action.op)
    complete = ["F"] if forward_only else ["F B", "F I W"]
    for stage, i in itertools.product(range(num_stages), range(num_microbatches)):
        ops = " ".join(sorted(ran[stage, i], key="FBIW".find))
        if ops not in complete:
            yield (
                f"E5 stage {stage} runs {ops or 'nothing'} on micro-batch {i}, needs "
                f"{' or '.join(complete)}" + " alone: it is forward_only" * forward_only
            )


def _misordered(rows: Rows) -> Iterator[str]:
    """What runs before what it reads on its own rank, and sums that do not ascend."""
    for rank, row in enumerate(rows):
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


def _cells(rows: Rows) -> Iterator[tuple[int, int, Action]]:
    """The rank and the position of each action."""
    for rank, row in enumerate(rows):
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

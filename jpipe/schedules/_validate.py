"""Whether a schedule can run: every fault found, by rule, with its place."""

import warnings
from collections import Counter
from collections.abc import Iterator

from ._action import BACKWARD, FORWARD, INPUT, OPS, WEIGHT, Action

Rows = tuple[tuple[Action, ...], ...]

# How many cells of a row are shown on each side of the one at fault.
_AROUND = 4


def faults(
    rows: Rows, placement: tuple[int, ...], num_microbatches: int, forward_only: bool
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

    Returns:
      A line or more for each fault, beginning with the number of its rule.
    """
    found = [
        *_out_of_place(rows, placement, num_microbatches),
        *_miscounted(rows, len(placement), num_microbatches, forward_only),
    ]
    found += [] if found else _misordered(rows)
    for rank, row in enumerate(rows):
        if not row and not found:
            warnings.warn(f"E12 rank {rank} runs nothing", stacklevel=4)
    return found


def _out_of_place(
    rows: Rows, placement: tuple[int, ...], num_microbatches: int
) -> Iterator[str]:
    """Actions that name something that does not exist or run in the wrong place."""
    last = len(placement) - 1
    wrong = [s for s, rank in enumerate(placement) if not 0 <= rank < len(rows)]
    if wrong:
        yield f"E4 stages {wrong} are placed on ranks that are not 0 to {len(rows) - 1}"
    home = {
        a for rank, row in enumerate(rows) for a in row if _at_home(a, rank, placement)
    }
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            op, stage, microbatch = action
            says = None
            if op not in OPS:
                says = f"E1 {action}: the ops are {', '.join(OPS)}"
            elif not 0 <= stage <= last:
                says = f"E2 {action}: the stages are 0 to {last}"
            elif not 0 <= microbatch < num_microbatches:
                says = f"E3 {action}: the micro-batches are 0 to {num_microbatches - 1}"
            elif placement[stage] != rank:
                says = (
                    f"E4 {action}: stage {stage} is placed on rank {placement[stage]}"
                )
                if op != FORWARD and action._replace(op=FORWARD) in home:
                    says = says.replace("E4", "E10") + ", where its forward runs"
            if says is not None:
                yield _shown(says, row, rank, position)


def _at_home(action: Action, rank: int, placement: tuple[int, ...]) -> bool:
    return 0 <= action.stage < len(placement) and placement[action.stage] == rank


def _miscounted(
    rows: Rows, num_stages: int, num_microbatches: int, forward_only: bool
) -> Iterator[str]:
    """Actions that are missing, appear twice, or do the same work twice."""
    count = Counter(action for row in rows for action in row)
    for stage in range(num_stages):
        for i in range(num_microbatches):
            forward, whole, half, rest = (Action(op, stage, i) for op in OPS)
            if not count[forward]:
                yield f"E5 {forward} never runs"
            if forward_only:
                continue
            halves = [action for action in (half, rest) if count[action]]
            if count[whole] and halves:
                yield f"E7 {whole} and {' and '.join(map(str, halves))} both run"
            elif not count[whole] and not halves:
                yield f"E5 {whole} never runs, nor do {half} and {rest}"
            elif not count[whole] and len(halves) == 1:
                missing = rest if halves == [half] else half
                yield f"E5 {missing} never runs, {halves[0]} does"
    if forward_only:
        extra = [action for action in count if action.op != FORWARD]
        yield from (
            f"E7 {action} in a schedule that is forward_only" for action in extra
        )
    seen: set[Action] = set()
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action in seen:
                says = f"E6 {action} runs {count[action]} times"
                yield _shown(says, row, rank, position)
            seen.add(action)


def _misordered(rows: Rows) -> Iterator[str]:
    """What runs before what it reads on its own rank, and sums that do not ascend."""
    for rank, row in enumerate(rows):
        position = {action: i for i, action in enumerate(row)}
        last: dict[tuple[str, int], Action] = {}
        for at, action in enumerate(row):
            if action.op == FORWARD:
                reads, kind = [], FORWARD
            else:
                reads = [FORWARD] if action.op != WEIGHT else [INPUT]
                kind = "" if action.op == INPUT else BACKWARD
            for op in reads:
                first = action._replace(op=op)
                if position[first] > at:
                    yield _shown(f"E8 {action} runs before {first}", row, rank, at)
            if not kind:
                continue
            before = last.get((kind, action.stage))
            if before is not None and before.microbatch > action.microbatch:
                says = (
                    f"E8 {action} runs after {before}: losses and gradients are summed "
                    f"in ascending order of micro-batches"
                )
                yield _shown(says, row, rank, at)
            last[kind, action.stage] = action


def _shown(says: str, row: tuple[Action, ...], rank: int, position: int) -> str:
    """A fault with its place: the cells around it, and a mark below."""
    begin, end = max(position - _AROUND, 0), position + _AROUND + 1
    left = ["..."] if begin else []
    cells = [*left, *map(str, row[begin:end]), *(["..."] if end < len(row) else [])]
    at = position - begin + len(left)
    indent = len(" ".join(cells[:at])) + (1 if at else 0)
    prefix = f"rank {rank}: "
    return (
        f"{says} (rank {rank}, position {position})\n"
        f"      {prefix}{' '.join(cells)}\n"
        f"      {' ' * (len(prefix) + indent)}{'^' * len(cells[at])}"
    )

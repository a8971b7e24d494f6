"""Validates schedules: every fault, by rule, with the cells around it.

E6 0B0 runs before 0F0 (rank 0, position 0)
  rank 0: 0B0 0F0
          ^^^
"""

import itertools
import reprlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ._action import BACKWARD, FORWARD, INPUT, LOCAL_READS, OPS, Action
from ._formats import format_type

# The cells of a row that are shown on each side of the one at fault.
_NUM_AROUND = 4
# The most faults that are listed; a text that is no schedule has one for each word.
_MAX_FAULTS = 50


def format_refusal(name: Any, faults: Iterable[str]) -> str:
    """Formats the message of all faults of a schedule."""
    lines = [f"  * {fault}" for fault in itertools.islice(faults, _MAX_FAULTS + 1)]
    if len(lines) > _MAX_FAULTS:
        lines[_MAX_FAULTS:] = ["  * and more"]
    return "\n".join([f"schedule {name!r} cannot run:", *lines])


def find_faults(schedule: Any) -> list[str]:
    """Finds the faults of a schedule, apart from ranks that wait for each other.

    Losses are summed in the order of the forwards and gradients in that of the
    backwards, so both must ascend in each stage: then every schedule gives the same
    bits. A schedule of forwards alone sums nothing.

    Args:
      schedule: a `Schedule`, with anything in its fields.

    Returns:
      A line or more for each fault, beginning with the number of its rule.
    """
    # The rules of each function rely on those before.
    for rules in (_check_fields, _check_cells, _check_order):
        faults = list(itertools.islice(rules(schedule), _MAX_FAULTS + 1))
        if faults:
            return faults
    for rank, row in enumerate(schedule.rows):
        if not row:
            warnings.warn(f"E9 rank {rank} runs nothing", stacklevel=3)
    return []


def _check_fields(schedule: Any) -> Iterator[str]:
    """Yields faults of the types of fields, and of the placement: E0, E4."""
    num_stages = schedule.num_stages
    num_microbatches = schedule.num_microbatches
    placement = schedule.placement
    replicas = schedule.replicas
    ranks = range(len(schedule.rows))
    if not _is_count(num_stages) or not _is_count(num_microbatches):
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
        for stage, stage_ranks in enumerate(schedule.ranks_of):
            if not all(rank in ranks for rank in stage_ranks):
                yield (
                    f"E4 stage {stage} is on ranks {stage_ranks}, there are "
                    f"{len(ranks)}"
                )
            is_repeated = len(set(stage_ranks)) != len(stage_ranks)
            if is_repeated or list(stage_ranks[:1]) != [placement[stage]]:
                yield (
                    f"E4 replicas[{stage}]={tuple(stage_ranks)}: needs different "
                    f"ranks, placement[{stage}]={placement[stage]} first"
                )
    if not isinstance(schedule.forward_only, bool):
        flag = reprlib.repr(schedule.forward_only)
        yield f"E0 forward_only={flag}: must be True or False"
    for rank, position, cell in _cells(schedule):
        if not isinstance(cell, Action):
            yield (
                f"E0 rows[{rank}][{position}] is {format_type(cell)}, needs a "
                f"jpipe.schedules.Action, such as Action.parse('2F0')"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _check_cells(schedule: Any) -> Iterator[str]:
    """Yields cells out of range, on a wrong rank, missing, repeated: E1 to E5, E8."""
    last_stage = schedule.num_stages - 1
    last_microbatch = schedule.num_microbatches - 1
    ranks_of = schedule.ranks_of
    # The rank of each forward, if several ranks take turns at a stage.
    forward_rank: dict[Action, int] = {}
    # (stage, micro-batch) -> the ops that run.
    ops_of: dict[tuple[int, int], list[str]] = defaultdict(list)
    for rank, _, action in _cells(schedule):
        ops_of[action.stage, action.microbatch].append(action.op)
        if schedule.replicas and action.op == FORWARD:
            forward_rank[action] = rank

    for rank, position, action in _cells(schedule):
        op, stage, microbatch = action
        forward = action._replace(op=FORWARD)
        if op not in OPS:
            fault = f"E1 {action}: the ops are {', '.join(OPS)}"
        elif not 0 <= stage <= last_stage:
            fault = f"E2 {action}: the stages are 0 to {last_stage}"
        elif not 0 <= microbatch <= last_microbatch:
            fault = f"E3 {action}: the micro-batches are 0 to {last_microbatch}"
        elif rank not in ranks_of[stage]:
            listed = " or ".join(map(str, ranks_of[stage]))
            fault = f"E4 {action}: stage {stage} is placed on rank {listed}"
        elif forward_rank.get(forward, rank) != rank:
            fault = f"E8 {action}: its forward runs on rank {forward_rank[forward]}"
        else:
            continue
        yield _show_in_row(fault, schedule.rows[rank], rank=rank, position=position)

    complete = ["F"] if schedule.forward_only else ["F B", "F I W"]
    reason = " alone: it is forward_only" if schedule.forward_only else ""
    for stage in range(last_stage + 1):
        for microbatch in range(last_microbatch + 1):
            ops = " ".join(sorted(ops_of[stage, microbatch], key="FBIW".find))
            if ops not in complete:
                yield (
                    f"E5 stage {stage} runs {ops or 'nothing'} on micro-batch "
                    f"{microbatch}, needs {' or '.join(complete)}{reason}"
                )


def _check_order(schedule: Any) -> Iterator[str]:
    """Yields what runs before what it reads, and sums in another order: E6."""
    descends = _gradients_descend(schedule)
    for rank, row in enumerate(schedule.rows):
        position_of = {action: position for position, action in enumerate(row)}
        # (FORWARD for losses or BACKWARD for gradients, stage) -> the last summand.
        last: dict[tuple[str, int], Action] = {}
        for position, action in enumerate(row):
            read = action._replace(op=LOCAL_READS.get(action.op, action.op))
            if position_of[read] > position:
                fault = f"E6 {action} runs before {read}"
                yield _show_in_row(fault, row, rank=rank, position=position)
            if schedule.forward_only or action.op == INPUT:  # which is not summed
                continue
            sum_key = FORWARD if action.op == FORWARD else BACKWARD, action.stage
            before = last.get(sum_key)
            is_descending = descends and action.op != FORWARD
            if before is not None and is_descending != (
                before.microbatch > action.microbatch
            ):
                order = "descending" if is_descending else "ascending"
                fault = (
                    f"E6 {action} runs after {before}: losses are summed in ascending "
                    f"order of micro-batches, gradients of all stages in one order, "
                    f"ascending or descending; here {order}"
                )
                yield _show_in_row(fault, row, rank=rank, position=position)
            last[sum_key] = action


def _gradients_descend(schedule: Any) -> bool:
    """True if a stage adds its first gradient of a later micro-batch than its last."""
    for row in schedule.rows:
        first: dict[int, Action] = {}  # stage -> its first summand
        last: dict[int, Action] = {}
        for action in row:
            if action.op not in (FORWARD, INPUT):
                first.setdefault(action.stage, action)
                last[action.stage] = action
        for stage, action in first.items():
            if action.microbatch != last[stage].microbatch:
                return action.microbatch > last[stage].microbatch
    return False


def _cells(schedule: Any) -> Iterator[tuple[int, int, Action]]:
    """Yields the rank and the position of each action, and the action."""
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            yield rank, position, action


def _show_in_row(
    fault: str, row: tuple[Action, ...], *, rank: int, position: int
) -> str:
    """Formats a fault with the cells around it, and a mark below."""
    begin = max(position - _NUM_AROUND, 0)
    end = position + _NUM_AROUND + 1
    before = list(map(str, row[begin:position]))
    if begin > 0:
        before.insert(0, "...")
    cell = str(row[position])
    after = list(map(str, row[position + 1 : end]))
    if end < len(row):
        after.append("...")

    prefix = f"rank {rank}: "
    indent = " " * len(" ".join([prefix.rstrip(), *before, ""]))
    return (
        f"{fault} (rank {rank}, position {position})\n"
        f"      {prefix}{' '.join([*before, cell, *after])}\n"
        f"      {indent}{'^' * len(cell)}"
    )

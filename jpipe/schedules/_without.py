"""What the other ranks of a stage do when one of them is lost."""

from collections.abc import Mapping, Sequence

from ._action import OPS, Action

Row = tuple[Action, ...]


def peers(replicas: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The other ranks of a rank's stage; none if it is the only one."""
    own = next((ranks for ranks in replicas if rank in ranks), ())
    return [other for other in own if other != rank]


def taken_over(
    rows: Sequence[Row],
    rank: int,
    others: Sequence[int],
    start: Mapping[Action, float],
) -> tuple[Row, ...]:
    """The rows without one, whose micro-batches its peers take over, in turn.

    A peer does what both did, at the times at which both would have: so it has no more
    in flight than the two had.

    Args:
      rows: the actions of each rank.
      rank: the one that is lost.
      others: its peers.
      start: when each action would have run.
    """
    lost = sorted({action.microbatch for action in rows[rank]})
    home = {m: others[k % len(others)] for k, m in enumerate(lost)}
    new = list(rows)
    for peer in others:
        adopted = [action for action in rows[rank] if home[action.microbatch] == peer]
        new[peer] = _ascending(sorted([*rows[peer], *adopted], key=start.__getitem__))
    return (*new[:rank], *new[rank + 1 :])


def _ascending(cells: Sequence[Action]) -> Row:
    """The same ops in the same order, each on its micro-batches in ascending order."""
    numbers = {
        op: iter(sorted(a.microbatch for a in cells if a.op == op)) for op in OPS
    }
    return tuple(a._replace(microbatch=next(numbers[a.op])) for a in cells)

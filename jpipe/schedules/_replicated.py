"""Stages with several ranks each, which take turns."""

import itertools
import math
from collections.abc import Sequence

from ._action import Action
from ._build import check, in_turns
from ._schedule import Schedule
from ._simulate import ScheduleError


def replicated(
    replicas: Sequence[int], num_microbatches: int, *, eager: bool = False
) -> Schedule:
    """1F1B with several ranks per stage: micro-batch i runs on the (i mod r)-th of r.

    A rank of stage s with r ranks warms up with k forwards, where the ranks of the
    next stage, r' of them, do with k': the least with ``k r >= (k' + 1) r'``. With
    this much in flight nothing waits for itself: in the steady state the time from one
    micro-batch to the next is that of the slowest stage, forward and backward divided
    by its number of ranks. Where it divides evenly, stage 0 has as many micro-batches
    in flight as there are ranks: PipeDream's number.

    Args:
      replicas: the number of ranks of each stage.
      num_microbatches: the number of micro-batches, any positive number.
      eager: whether transfers are counted as stages of their own, on as many links as
        the side with fewer ranks has: they are hidden, as in `eager_one_f_one_b`.

    Returns:
      A valid schedule; `jpipe.pipeline` runs it as ``schedule=``, or by ``replicas=``.

    Raises:
      ScheduleError: with every number that is no int of at least 1.

    Example:
      >>> print(replicated([2, 1], 4))
      1f1b, replicas 2-1: 3 ranks, 2 stages, 4 micro-batches, bubble 46.7 %
      rank 0 |F0 F2 .  .  B0 B0 .  .  .  .  B2 B2 .  .  . |
      rank 1 |F1 F3 .  .  .  .  .  B1 B1 .  .  .  .  B3 B3|
      rank 2 |.  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  . |

    References:
      Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019):
      there "1F1B-RR".
    """
    if not isinstance(replicas, Sequence) and hasattr(replicas, "tolist"):
        replicas = replicas.tolist()  # an array of NumPy
    if not isinstance(replicas, Sequence) or isinstance(replicas, str) or not replicas:
        raise ScheduleError(
            f"replicated: replicas={replicas!r}: needs one number for each stage"
        )
    numbers = {f"replicas[{s}]": number for s, number in enumerate(replicas)}
    check("replicated", {"num_microbatches": num_microbatches} | numbers)
    counts = _warmups(with_links(replicas))[::2] if eager else _warmups(replicas)
    ends = [sum(replicas[: s + 1]) for s in range(len(replicas))]
    ranks = tuple(
        tuple(range(end - r, end)) for end, r in zip(ends, replicas, strict=True)
    )
    rows: list[tuple[Action, ...]] = []
    for stage, r in enumerate(replicas):
        for first in range(r):
            own = [(stage, i) for i in range(first, num_microbatches, r)]
            rows.append(tuple(map(Action._make, in_turns(own, own, counts[stage]))))
    name = f"{'eager ' * eager}1f1b, replicas {'-'.join(map(str, replicas))}"
    placement = tuple(own[0] for own in ranks)
    several = ranks if max(replicas) > 1 else ()
    sizes = len(replicas), num_microbatches
    return Schedule(name, *sizes, placement, tuple(rows), replicas=several)


def with_links(replicas: Sequence[int]) -> list[int]:
    """The numbers of ranks with the links between them as stages of their own."""
    found = [replicas[0]]
    for one, other in itertools.pairwise(replicas):
        found += [min(one, other), other]
    return found


def _warmups(replicas: Sequence[int]) -> list[int]:
    """The forwards before the first backward on the ranks of each stage."""
    counts = [0]
    for after, own in zip(replicas[:0:-1], replicas[-2::-1], strict=True):
        counts.append(math.ceil((counts[-1] + 1) * after / own))
    return counts[::-1]

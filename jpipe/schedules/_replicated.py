"""1F1B with several ranks per stage, which take turns at the micro-batches."""

import itertools
import math
from collections.abc import Sequence

from ._action import Action
from ._build import alternate, check_counts
from ._schedule import Schedule
from ._simulate import ScheduleError


def replicated(
    replicas: Sequence[int], num_microbatches: int, *, eager: bool = False
) -> Schedule:
    """1F1B with several ranks per stage: micro-batch i runs on the (i mod r)-th of r.

    Let a stage have r ranks and the next stage r', each of which warms up with k'
    forwards. Then each rank of the stage warms up with the least k for which
    ``k r >= (k' + 1) r'``. In the steady state no stage but the slowest limits the
    pipeline: the time from one micro-batch to the next is its forward and backward
    divided by its number of ranks. Where the numbers divide evenly, stage 0 has as many
    micro-batches in flight as there are ranks: PipeDream's number.

    Args:
      replicas: the number of ranks of each stage.
      num_microbatches: the number of micro-batches, any positive number.
      eager: True counts transfers as stages, with as many links as the side with fewer
        ranks has ranks: they are hidden, as in `eager_one_f_one_b`.

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
    counts = {"num_microbatches": num_microbatches}
    counts |= {f"replicas[{s}]": count for s, count in enumerate(replicas)}
    check_counts("replicated", counts)

    warmups = _warmups(replicas)
    if eager:
        warmups = _warmups(_insert_links(replicas))[::2]  # without those of the links

    ranks: list[tuple[int, ...]] = []
    rows: list[tuple[Action, ...]] = []
    for stage, count in enumerate(replicas):
        ranks.append(tuple(range(len(rows), len(rows) + count)))
        for first in range(count):
            cells = [(stage, i) for i in range(first, num_microbatches, count)]
            row = alternate(cells, cells, warmup=warmups[stage])
            rows.append(tuple(map(Action._make, row)))

    name = f"1f1b, replicas {'-'.join(map(str, replicas))}"
    return Schedule(
        name=f"eager {name}" if eager else name,
        num_stages=len(replicas),
        num_microbatches=num_microbatches,
        placement=tuple(stage_ranks[0] for stage_ranks in ranks),
        rows=tuple(rows),
        replicas=tuple(ranks) if max(replicas) > 1 else (),
    )


def _insert_links(replicas: Sequence[int]) -> list[int]:
    """The numbers of ranks, with the links between two stages as a stage."""
    counts = [replicas[0]]
    for before, after in itertools.pairwise(replicas):
        counts += [min(before, after), after]
    return counts


def _warmups(replicas: Sequence[int]) -> list[int]:
    """The forwards before the first backward, for the ranks of each stage.

    From the last stage, with 0, back to the first: ``k = ceil((k' + 1) r' / r)``.
    """
    warmups = [0]
    for after, count in zip(replicas[:0:-1], replicas[-2::-1], strict=True):
        warmups.append(math.ceil((warmups[-1] + 1) * after / count))
    return warmups[::-1]

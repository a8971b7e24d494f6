"""The best cuts of a problem: a climb from the cut with the fastest slowest stage.

With one stage on each rank a rank's time and bytes are those of its stage, and so are
its best modes: a dynamic program finds the cut that keeps to the limit and whose
slowest stage is the fastest (`_bottleneck_cut`). With several, in a V or a loop, that
is a start whatever stages store. `climb` goes on from there, by the sums over the
stages of each rank:

    step = num_microbatches * busiest rank + other stages + transfers

In a V or a loop a rank runs some stages of a micro-batch while others wait for it: at
the begin and at the end of a step as often as there are other ranks, for a stage each,

    step = num_microbatches * busiest rank + (num_ranks - 1) * slowest stage + transfers

What a schedule makes of a cut, its simulation tells: `climb_by_simulation` looks for
the best one around some cuts.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ._bottleneck_cut import minimize_bottleneck, minimize_max
from ._climb import Cuts, Ends, Key, climb, list_cuts
from ._problem import PartitionProblem, RankModes

# The number of actions that a climb simulates (benchmarks/results/planning.md).
_MAX_ACTIONS = 40_000
# With several stages on a rank, the number of cuts that are evaluated without running
# them: it bounds the time of a search of many layers.
_MAX_EVALUATED = 10_000


def find_best_cuts(problem: PartitionProblem) -> list[Ends]:
    """Cuts, the best first; if none keeps to the limit, the one that exceeds it least.

    With one stage per rank the first has the fastest slowest stage of all, or of steps
    the shortest that a climb from there finds.
    """
    starts = list(_starts(problem))
    if problem.has_one_stage_per_rank and problem.objective == "max":
        return starts
    return climb(starts, lambda cuts: _evaluate(problem, cuts), _MAX_EVALUATED)


def count_missing_bytes(problem: PartitionProblem, ends: Ends) -> float:
    """The bytes by which a cut exceeds the limit of a rank, at most; 0 if it fits."""
    solutions = problem.solve_cuts(np.array([ends]))
    return max(solution.missing_bytes.item() for solution in solutions)


def least_busy_seconds(problem: PartitionProblem, cuts: Sequence[Ends]) -> float:
    """The seconds of one micro-batch in the busiest rank of the most even of cuts."""
    solutions = problem.solve_cuts(np.array(cuts))
    return _loads(solutions).max(axis=0).min().item() * problem.quantum


def _starts(problem: PartitionProblem) -> Iterator[Ends]:
    """The cut with the fastest slowest stage; of several per rank also an even one.

    With one stage per rank it keeps to the limit, or exceeds it least.
    """
    if problem.has_one_stage_per_rank:
        solutions = problem.solve_stages()
        _, ends = minimize_max([stage.missing_bytes for stage in solutions])
        times = [
            np.where(stage.missing_bytes <= 0, stage.times, np.inf)
            for stage in solutions
        ]
        yield minimize_bottleneck(times, problem.transfers) or ends
        return
    num_layers = problem.num_layers
    num_stages = problem.num_stages
    if ends := minimize_bottleneck(problem.fastest_times, problem.transfers):
        yield ends
    yield tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))


def _evaluate(problem: PartitionProblem, cuts: Cuts) -> list[Key]:
    """The keys of cuts without running them; first, the bytes above the limit."""
    solutions = problem.solve_cuts(cuts)
    loads = _loads(solutions)
    bottlenecks = loads.max(axis=0)
    transfer_times = problem.transfer_times(cuts)
    times = [bottlenecks, loads.sum(axis=0) + transfer_times]
    if problem.objective == "step":
        waits = loads.sum(axis=0) - bottlenecks
        if not problem.has_one_stage_per_rank:
            waits = (problem.schedule.num_ranks - 1) * problem.slowest_stages(cuts)
        times = [problem.num_microbatches * bottlenecks + waits + transfer_times]
    missing_bytes = _missing_bytes(solutions)
    unevenness = np.square(loads).sum(axis=0)
    columns = [column.tolist() for column in (missing_bytes, *times, unevenness)]
    return list(zip(*columns, strict=True))


def _loads(solutions: Sequence[RankModes]) -> np.ndarray:
    """The time of one micro-batch on each rank: ``[ranks, cuts]``."""
    return np.array([solution.times for solution in solutions])


def _missing_bytes(solutions: Sequence[RankModes]) -> np.ndarray:
    """The bytes by which each cut exceeds the limit of the rank that lacks most."""
    return np.max([solution.missing_bytes for solution in solutions], axis=0)


def climb_by_simulation(
    problem: PartitionProblem,
    cuts: Sequence[Ends],
    simulate: Callable[[Ends], float],
) -> Ends:
    """The best of some cuts and those around them, by their simulated steps.

    Args:
      problem: the problem, which says what keeps to the limit and what is not worth a
        simulation: no order of its actions makes the rank that has most to do faster.
      cuts: the cuts from which the climb begins, the best first.
      simulate: the seconds of a step of a cut; infinite if it is out of the question.
    """
    num_actions = sum(map(len, problem.schedule.rows))
    max_cuts = max(_MAX_ACTIONS // num_actions, 1)
    shortest_step = np.inf

    def key(ends: list[int], bottleneck: float, missing_bytes: float) -> Key:
        nonlocal shortest_step
        if missing_bytes > 0:
            return (np.inf,)
        lower_bound = problem.num_microbatches * bottleneck
        if lower_bound >= shortest_step:
            return lower_bound, 1.0
        step = simulate(tuple(ends))
        shortest_step = min(shortest_step, step)
        return step, 0.0

    def keys(cuts: Cuts) -> list[Key]:
        solutions = problem.solve_cuts(cuts)
        bottlenecks = _loads(solutions).max(axis=0) * problem.quantum
        missing_bytes = _missing_bytes(solutions)
        return list(
            map(key, cuts.tolist(), bottlenecks.tolist(), missing_bytes.tolist())
        )

    few_cuts = list_cuts(problem.num_layers, problem.num_stages, max_cuts=max_cuts)
    best, *_ = climb([*cuts[:max_cuts], *few_cuts], keys, max_cuts)
    return best

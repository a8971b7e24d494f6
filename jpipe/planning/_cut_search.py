"""The best cuts of a problem: a climb from the cut with the fastest slowest stage.

With one stage on each rank a rank's time and bytes are those of its stage, and so are
its best modes: a dynamic program finds the cut that keeps to the limit and whose
slowest stage is the fastest (`_bottleneck_cut`). With several, in a V or a loop, that
is a start whatever stages store. A climb goes on from there, by the sums over the
stages of each rank:

    step = num_microbatches * busiest rank + other stages + transfers

In a V or a loop a rank runs some stages of a micro-batch while others wait for it: at
the begin and at the end of a step as often as there are other ranks, for a stage each,

    step = num_microbatches * busiest rank + (num_ranks - 1) * slowest stage + transfers

What a schedule makes of a cut, its simulation tells: `climb_by_simulation` looks for
the best one around some cuts.

A climb is a best-first search: the neighbors of the best cut that was not yet expanded
are scored, those with one end moved or two by one layer each; so are the neighbors of a
few worse ones, which may lead to a better one yet. It ends when some expansions in a
row brought nothing better.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ._bottleneck_cut import minimize_bottleneck, minimize_max
from ._problem import PartitionProblem, RankModes
from ._stage_costs import Cuts, Ends

# The number of actions that a climb simulates (benchmarks/results/planning.md).
_MAX_ACTIONS = 40_000
# With several stages on a rank, the number of cuts that are scored without running
# them: it bounds the time of a search of many layers.
_MAX_SCORED = 10_000
# The number of cuts around which a climb looks for a better one before it gives up.
_PATIENCE = 12

# Two ends move by one layer each: both to the same side, or to different ones.
_PAIRED_STEPS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


class Score(NamedTuple):
    """The value of a cut; of two the smaller is better.

    Attributes:
      missing_bytes: the bytes by which the rank that lacks most exceeds its limit.
      time: the time of the busiest rank or of a step, as the objective is.
      is_bound: True if the time is a lower bound of one that was not simulated.
      latency: the time of one micro-batch, where that decides between equal times.
      unevenness: the sum of the squares of the times of ranks.
    """

    missing_bytes: float
    time: float
    is_bound: bool = False
    latency: float = 0.0
    unevenness: float = 0.0


def find_best_cuts(problem: PartitionProblem) -> list[Ends]:
    """Cuts, the best first; if none keeps to the limit, the one that exceeds it least.

    With one stage per rank the first has the fastest slowest stage of all, or of steps
    the shortest that a climb from there finds.
    """
    starts = list(_starts(problem))
    if problem.has_one_stage_per_rank and problem.objective == "max":
        return starts
    return _climb(starts, lambda cuts: _score(problem, cuts), _MAX_SCORED)


def count_missing_bytes(problem: PartitionProblem, ends: Ends) -> float:
    """The bytes by which a cut exceeds the limit of a rank, at most; 0 if it fits."""
    rank_modes = problem.solve_cuts(np.array([ends]))
    return max(modes.missing_bytes.item() for modes in rank_modes)


def least_busy_seconds(problem: PartitionProblem, cuts: Sequence[Ends]) -> float:
    """The seconds of one micro-batch in the busiest rank of the most even of cuts."""
    rank_modes = problem.solve_cuts(np.array(cuts))
    return _loads(rank_modes).max(axis=0).min().item() * problem.times.unit


def _starts(problem: PartitionProblem) -> Iterator[Ends]:
    """The cut with the fastest slowest stage; of several per rank also an even one.

    With one stage per rank it keeps to the limit, or exceeds it least.
    """
    if problem.has_one_stage_per_rank:
        rank_modes = problem.solve_stages()
        _, ends = minimize_max([stage.missing_bytes for stage in rank_modes])
        times = [
            np.where(stage.missing_bytes <= 0, stage.times, np.inf)
            for stage in rank_modes
        ]
        yield minimize_bottleneck(times, problem.times.overlapped) or ends
        return
    num_layers = problem.num_layers
    num_stages = problem.num_stages
    if ends := minimize_bottleneck(problem.fastest_times, problem.times.overlapped):
        yield ends
    yield tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))


def _score(problem: PartitionProblem, cuts: Cuts) -> list[Score]:
    """The scores of cuts without running them."""
    rank_modes = problem.solve_cuts(cuts)
    loads = _loads(rank_modes)
    missing_bytes = _missing_bytes(rank_modes)
    bottlenecks = loads.max(axis=0)
    between = problem.times.between(cuts)
    latencies = loads.sum(axis=0) + between
    unevenness = np.square(loads).sum(axis=0)
    times = bottlenecks
    if problem.objective == "step":
        waits = loads.sum(axis=0) - bottlenecks
        if not problem.has_one_stage_per_rank:
            waits = (problem.schedule.num_ranks - 1) * problem.slowest_stages(cuts)
        times = problem.num_microbatches * bottlenecks + waits + between
        latencies = np.zeros(len(cuts))
    return [
        Score(missing, time, latency=latency, unevenness=squares)
        for missing, time, latency, squares in zip(
            missing_bytes.tolist(),
            times.tolist(),
            latencies.tolist(),
            unevenness.tolist(),
            strict=True,
        )
    ]


def _loads(rank_modes: Sequence[RankModes]) -> np.ndarray:
    """The time of one micro-batch on each rank: ``[ranks, cuts]``."""
    return np.array([modes.times for modes in rank_modes])


def _missing_bytes(rank_modes: Sequence[RankModes]) -> np.ndarray:
    """The bytes by which each cut exceeds the limit of the rank that lacks most."""
    return np.max([modes.missing_bytes for modes in rank_modes], axis=0)


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

    def score(ends: Ends, bottleneck: float, missing_bytes: float) -> Score:
        nonlocal shortest_step
        if missing_bytes > 0:
            return Score(missing_bytes, math.inf)
        lower_bound = problem.num_microbatches * bottleneck
        if lower_bound >= shortest_step:
            return Score(0.0, lower_bound, is_bound=True)
        step = simulate(ends)
        shortest_step = min(shortest_step, step)
        return Score(0.0, step)

    def score_cuts(cuts: Cuts) -> list[Score]:
        rank_modes = problem.solve_cuts(cuts)
        bottlenecks = _loads(rank_modes).max(axis=0) * problem.times.unit
        missing_bytes = _missing_bytes(rank_modes)
        ends = map(tuple, cuts.tolist())
        return list(map(score, ends, bottlenecks.tolist(), missing_bytes.tolist()))

    few_cuts = _list_cuts(problem.num_layers, problem.num_stages, max_cuts=max_cuts)
    best, *_ = _climb([*cuts[:max_cuts], *few_cuts], score_cuts, max_cuts)
    return best


def _list_cuts(num_layers: int, num_stages: int, *, max_cuts: int) -> Iterator[Ends]:
    """All cuts, if there are at most ``max_cuts``; else none."""
    if math.comb(num_layers - 1, num_stages - 1) <= max_cuts:
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
            yield (0, *inner, num_layers)


def _climb(
    starts: Iterable[Ends],
    score_cuts: Callable[[Cuts], Sequence[Score]],
    max_cuts: int,
) -> list[Ends]:
    """The best cuts among some and those around the best of them.

    Args:
      starts: the cuts from which the search begins.
      score_cuts: ``cuts -> scores``, one per cut.
      max_cuts: the number of cuts to score at most, besides the starts.

    Returns:
      All cuts seen, the best first.
    """
    first_cuts = list(dict.fromkeys(starts))
    # cut -> its score
    seen = dict(zip(first_cuts, score_cuts(np.array(first_cuts)), strict=True))
    max_cuts += len(seen)
    moves = _moves(first_cuts[0])
    queue = [(score, ends) for ends, score in seen.items()]
    heapq.heapify(queue)

    best_score, _ = queue[0]
    tries = _PATIENCE
    while queue and tries and len(seen) < max_cuts:
        tries -= 1
        _, ends = heapq.heappop(queue)
        neighbors = ends + moves
        neighbors = neighbors[(np.diff(neighbors) > 0).all(axis=1)]
        new_cuts = [cut for cut in map(tuple, neighbors.tolist()) if cut not in seen]
        new_cuts = new_cuts[: max_cuts - len(seen)]
        if not new_cuts:
            continue

        new_scores = score_cuts(np.array(new_cuts))
        seen.update(zip(new_cuts, new_scores, strict=True))
        for score, cut in zip(new_scores, new_cuts, strict=True):
            heapq.heappush(queue, (score, cut))
        if min(new_scores) < best_score:
            best_score = min(new_scores)
            tries = _PATIENCE
    return sorted(seen, key=lambda ends: (seen[ends], ends))


def _moves(ends: Ends) -> Cuts:
    """The numbers to add to ends for each neighbor, the nearest first."""
    num_ends = len(ends)
    inner_ends = range(1, num_ends - 1)
    unit = np.eye(num_ends, dtype=np.intp)
    # An end moves up to half a stage.
    reach = max(1, ends[-1] // (2 * num_ends))

    moves: list[Cuts] = []
    for distance in range(1, reach + 1):
        for i in inner_ends:
            moves += [-distance * unit[i], distance * unit[i]]
    for i, j in itertools.combinations(inner_ends, 2):
        moves += [a * unit[i] + b * unit[j] for a, b in _PAIRED_STEPS]
    return np.array(moves, np.intp).reshape(-1, num_ends)

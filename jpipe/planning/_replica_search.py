"""The best stages with several devices each, which take turns.

Of M micro-batches each of r devices of a stage runs ceil(M / r). The first of them
passes all stages; then each stage has all others to run, and the gradients of its
devices to add up, once:

    step = sum over stages of (time + transfers) + max over stages of load
    load = (ceil(M / r) - 1) * time + exchange

The least sum of the layers from i on with d devices, no load above a limit, is

    latency[d, i] = min over j, r of time[i, j] + transfers[j] + latency[d - r, j]

where a stage [i, j) on r devices has ceil(d / r) micro-batches in flight on each, which
may not need more bytes than a device has. The lower the limit, the larger the sum: a
few limits, each so low as the best step so far asks for, find the least step. All cuts
on the way are simulated. For n layers a limit takes n ** 2 * d ** 2 operations.

References:
  Narayanan et al., `PipeDream <https://doi.org/10.1145/3341301.3359646>`_ (2019): there
  with an exchange for each micro-batch, so that stages with many parameters get fewer
  devices.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._replica_problem import ReplicaProblem, SimulatedStages, StageReplicas

_ROUNDING = 1e-12


class _Cut(NamedTuple):
    """Stages, and the parts of their step.

    Attributes:
      latency: the seconds of one micro-batch in all stages, transfers between.
      load: the largest load of a stage.
      stages: the stages, in order.
    """

    latency: float
    load: float
    stages: tuple[StageReplicas, ...]


def find_best_stages(
    problem: ReplicaProblem, num_devices: int, *, max_replicas: int
) -> SimulatedStages:
    """The best of all cuts that the limits lead to; the nearest if none fits.

    If a simulated rank needs more than was counted, the search has as much less room,
    and goes on.

    Args:
      problem: the layers, and all that is the same for each cut.
      num_devices: the number of devices that may be used.
      max_replicas: the most devices of one stage.
    """
    room = problem.max_bytes
    nearest: SimulatedStages | None = None
    while True:
        cuts = list(_find_cuts(problem, num_devices, max_replicas, room))
        steps = [problem.simulate(cut.stages) for cut in cuts]
        fitting = [step for step in steps if step.max_bytes <= problem.max_bytes]
        if fitting:
            best = min(fitting, key=lambda step: (step.seconds, step.max_bytes))
            return _climb(problem, best, num_devices, max_replicas)
        if steps:
            nearest = min(steps, key=lambda step: step.max_bytes)
            room = min(_room_without(problem, step) for step in steps)
        elif nearest is not None:
            return nearest
        else:
            return problem.simulate(_even_stages(problem, num_devices))


def _climb(
    problem: ReplicaProblem, best: SimulatedStages, num_devices: int, max_replicas: int
) -> SimulatedStages:
    """The best step that is reached by one change of its stages after another.

    A simulation knows what the sum does not: transfers that are hidden, and devices
    that take turns and start one after another.
    """
    while True:
        steps: list[SimulatedStages] = []
        for stages in _neighbors(best.stages, num_devices, max_replicas):
            if problem.least_seconds(stages) < best.seconds:
                steps.append(problem.simulate(stages))
        better = [
            step
            for step in steps
            if step.max_bytes <= problem.max_bytes
            and step.seconds < best.seconds * (1 - _ROUNDING)
        ]
        if not better:
            return best
        best = min(better, key=lambda step: (step.seconds, step.max_bytes))


def _neighbors(
    stages: tuple[StageReplicas, ...], num_devices: int, max_replicas: int
) -> Iterator[tuple[StageReplicas, ...]]:
    """The stages after one change.

    A stage has a device more or less, or becomes two stages with as many devices; two
    have their end moved by a layer, or become one.
    """
    num_used = sum(stage.replicas for stage in stages)
    for index, stage in enumerate(stages):
        before = stages[:index]
        after = stages[index + 1 :]
        for replicas in (stage.replicas - 1, stage.replicas + 1):
            total = num_used + replicas - stage.replicas
            if 1 <= replicas <= max_replicas and total <= num_devices:
                yield *before, stage._replace(replicas=replicas), *after
        for replicas in range(1, stage.replicas):
            for end in range(stage.begin + 1, stage.end):
                first = StageReplicas(stage.begin, end, replicas)
                second = StageReplicas(end, stage.end, stage.replicas - replicas)
                yield *before, first, second, *after
    for index, (first, second) in enumerate(itertools.pairwise(stages)):
        before = stages[:index]
        after = stages[index + 2 :]
        for end in (first.end - 1, first.end + 1):
            if first.begin < end < second.end:
                moved = first._replace(end=end), second._replace(begin=end)
                yield *before, *moved, *after
        replicas = first.replicas + second.replicas
        if replicas <= max_replicas:
            yield *before, StageReplicas(first.begin, second.end, replicas), *after


def _room_without(problem: ReplicaProblem, step: SimulatedStages) -> float:
    """The room in which a step that needs too much is not found any more."""
    counted = problem.count_bytes(step.stages)
    ranks = zip(step.memory, counted, strict=True)
    memory, num_bytes = max(ranks, key=lambda pair: pair[0].total)
    return problem.max_bytes - (memory.total - num_bytes)


def _even_stages(
    problem: ReplicaProblem, num_devices: int
) -> tuple[StageReplicas, ...]:
    """Stages with one device each, as evenly as layers can be counted."""
    num_layers = len(problem.profile.layers)
    count = min(num_devices, num_layers)
    ends = [num_layers * stage // count for stage in range(count + 1)]
    return tuple(StageReplicas(*pair, 1) for pair in itertools.pairwise(ends))


def _find_cuts(
    problem: ReplicaProblem, num_devices: int, max_replicas: int, room: float
) -> Iterator[_Cut]:
    """Cuts with less and less load, as far as their steps may be the best."""
    limit = math.inf
    shortest_step = math.inf
    while cut := _minimize_latency(problem, num_devices, max_replicas, room, limit):
        yield cut
        shortest_step = min(shortest_step, cut.latency + cut.load)
        # Under a lower limit the latency is no less than that of this cut.
        largest_load = min(cut.load, shortest_step - cut.latency)
        limit = largest_load * (1 - _ROUNDING)
        if limit <= 0:
            return


def _minimize_latency(
    problem: ReplicaProblem,
    num_devices: int,
    max_replicas: int,
    room: float,
    limit: float,
) -> _Cut | None:
    """The cut with the least latency, if no load exceeds a limit, nor bytes a room.

    Of several the one with the fewest devices.
    """
    num_ends = len(problem.profile.layers) + 1
    # number of devices -> the least latency of the layers from each on
    latency = {0: np.full(num_ends, np.inf)}
    latency[0][-1] = 0.0
    # number of devices -> the end and the devices of the stage at each begin
    stages: dict[int, npt.NDArray[np.intp]] = {}
    for devices in range(1, num_devices + 1):
        latency[devices] = np.full(num_ends, np.inf)
        stages[devices] = np.zeros((num_ends, 2), np.intp)
        for replicas in range(1, min(max_replicas, devices) + 1):
            in_flight = problem.count_in_flight(devices, replicas)
            is_possible = (problem.loads(replicas) <= limit) & (
                problem.bytes_of(in_flight) <= room
            )
            times = np.where(is_possible, problem.times, np.inf)
            behind = problem.transfers + latency[devices - replicas]
            latencies = times + behind[None, :]  # [begin, end]
            ends = latencies.argmin(axis=1)
            least = latencies[np.arange(num_ends), ends]
            is_less = least < latency[devices]
            latency[devices][is_less] = least[is_less]
            stages[devices][is_less, 0] = ends[is_less]
            stages[devices][is_less, 1] = replicas

    devices = min(latency, key=lambda count: latency[count][0])
    least_latency = float(latency[devices][0])
    if not math.isfinite(least_latency):
        return None
    cut: list[StageReplicas] = []
    begin = 0
    while devices:
        end, replicas = stages[devices][begin].tolist()
        cut.append(StageReplicas(begin, end, replicas))
        begin = end
        devices -= replicas
    load = max(problem.loads(stage.replicas)[stage.begin, stage.end] for stage in cut)
    return _Cut(least_latency, float(load), tuple(cut))

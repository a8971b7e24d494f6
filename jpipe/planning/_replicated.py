"""Stages with several devices each, as a value: names and numbers only."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..schedules import Costs, Schedule, Timeline, replicated
from ..schedules._units import columns, many


class ReplicatedStage(NamedTuple):
    """Layers ``start`` to ``end - 1``, on as many devices as there are ``replicas``."""

    start: int
    end: int
    replicas: int


def ring(num_bytes: Any, replicas: int, bandwidth: float, latency: float = 0.0) -> Any:
    """The time in which a ring of devices adds up gradients of so many bytes."""
    hops = 2 * (replicas - 1)
    return hops * num_bytes / (bandwidth * replicas) + hops * latency


@dataclass(frozen=True)
class Replicated:
    """Stages with several devices each, and what they would take.

    Prints its stages, what one device would take, and what stages of one device each
    would.

    Attributes:
      stages: in order.
      costs: of each stage on one device, of one micro-batch: its times, and what
        crosses the cut before it, skip connections included; and ``exchange``, the time
        in which its replicas add up their gradients once.
      seconds: from one micro-batch to the next, in the steady state. As PipeDream's
        planner counts: each replica exchanges gradients after each of its
        micro-batches, and an exchange counts twice; a transfer uses as many links as
        the stage with fewer devices has.
      straight: what ``seconds`` would be with one device per stage.

    Example:
      >>> import jpipe
      >>> from jpipe.planning._profile import LayerProfile, Profile
      >>> plan = jpipe.replicate(Profile((LayerProfile("a", 1.0, 2.0),)), 3)
      >>> plan.seconds
      1.0
    """

    stages: tuple[ReplicatedStage, ...]
    costs: Costs
    seconds: float
    straight: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def alone(self) -> float:
        """What one device would take for the same."""
        return sum(self.costs.forward) + sum(self.costs.backward)

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """Who runs which micro-batch when: 1F1B, transfers hidden if they take time.

        Args:
          num_microbatches: of one step; default: twice as many as there are devices.

        Returns:
          A rank for each device; micro-batch i runs on replica i mod r of r.

        Raises:
          ScheduleError: if the number is less than 1.
        """
        default = 2 * sum(self.replicas)
        count = default if num_microbatches is None else num_microbatches
        costs = self.costs
        moved = sum(costs.boundary_bytes[1:])
        moved += sum(costs.cotangent(s, 0) for s in range(1, len(self.stages)))
        return replicated(self.replicas, count, eager=moved / costs.bandwidth > 0)

    def simulate(self, num_microbatches: int | None = None) -> Timeline:
        """`schedule` on paper, in seconds.

        Gradients are exchanged once, when the last backward of a stage has run. As in
        every timeline, a transfer does not wait for others.

        Args:
          num_microbatches: as for `schedule`.

        Returns:
          The timeline; what devices hold is not known.

        Raises:
          ScheduleError: if the number is less than 1.
        """
        timeline = self.schedule(num_microbatches).simulate(self.costs)
        return dataclasses.replace(timeline, memory=())

    def __str__(self) -> str:
        used, seconds = sum(self.replicas), self.seconds
        faster = self.alone / seconds if seconds else 1.0
        lines = [
            f"{seconds:.6g} s a micro-batch on {many(used, 'device')}, "
            f"{faster:.3f} times as fast as one"
        ]
        if max(self.replicas) > 1 and seconds:
            lines.append(
                f"with one device per stage {self.straight:.6g} s, "
                f"{self.straight / seconds:.3f} times as long"
            )
        rows = [["stage", "layers", "devices"]]
        for i, stage in enumerate(self.stages):
            layers = f"{stage.start} to {stage.end - 1}"
            rows.append([str(i), layers, str(stage.replicas)])
        return "\n".join([*lines, columns(rows, left={1})])

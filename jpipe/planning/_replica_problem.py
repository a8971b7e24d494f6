"""The problem that `jpipe.replicate` solves: times and bytes of possible stages.

Entry [i, j] of a matrix is of the stage of layers i to j - 1.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules import Costs, replicated
from ._fused import fused_costs
from ._mode_names import stores_only_inputs
from ._plan import Memory
from ._profile import Profile, costs_of_stages
from ._stage_costs import StageCosts
from ._sums import Matrix, sum_stages
from ._workspace import stage_workspaces


class StageReplicas(NamedTuple):
    """A stage with several devices.

    Attributes:
      begin: its first layer.
      end: the first layer behind it.
      replicas: the number of its devices.
    """

    begin: int
    end: int
    replicas: int


class SimulatedStages(NamedTuple):
    """A cut as it runs.

    Attributes:
      seconds: the seconds of a step.
      stages: the stages.
      memory: the memory of each rank.
      costs: the costs of the stages.
    """

    seconds: float
    stages: tuple[StageReplicas, ...]
    memory: tuple[Memory, ...]
    costs: Costs

    @property
    def max_bytes(self) -> int:
        """The bytes of the rank that needs most."""
        return max(memory.total for memory in self.memory)


@dataclass(frozen=True, eq=False)
class ReplicaProblem:
    """The layers, and all that is the same for each cut; for the names see `replicate`.

    A limit that there is not is infinite.
    """

    profile: Profile
    num_microbatches: int
    bandwidth: float | None
    latency: float
    max_bytes: float
    remat: str

    def count_in_flight(self, devices: int, replicas: int) -> int:
        """The micro-batches that a device of a stage has in flight.

        Args:
          devices: the number of devices of the stage and of all behind it.
          replicas: the number of devices of the stage.
        """
        rounds = math.ceil(self.num_microbatches / replicas)
        return min(math.ceil(devices / replicas), rounds)

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of every stage of the layers."""
        return costs_of_stages(self.profile)

    @functools.cached_property
    def times(self) -> Matrix:
        """The seconds of one micro-batch in each stage."""
        layers = self.profile.layers
        forward = sum_stages([layer.forward for layer in layers])
        backward = sum_stages([layer.backward for layer in layers], empty=np.inf)
        times = forward + backward + 2 * self.profile.action_seconds
        if stores_only_inputs(self.remat):
            # The last stage computes its forward in its backward.
            times[:, :-1] += forward[:, :-1]
        return times

    def loads(self, replicas: int) -> Matrix:
        """The seconds of all micro-batches but one, and of the exchange."""
        exchange = self._exchange_seconds(self.stage_costs.param_bytes, replicas)
        rounds = math.ceil(self.num_microbatches / replicas)
        if rounds == 1:
            return exchange
        return (rounds - 1) * self.times + exchange

    def bytes_of(self, in_flight: int) -> Matrix:
        """The bytes of a stage with so many micro-batches in flight."""
        costs = self.stage_costs
        residuals = costs.residual_bytes[self.remat]
        fixed = 2 * costs.param_bytes + costs.state_bytes
        return fixed + in_flight * residuals + self._workspace

    @functools.cached_property
    def _workspace(self) -> Matrix:
        return stage_workspaces(self.profile)

    @functools.cached_property
    def transfers(self) -> npt.NDArray[np.float64]:
        """The seconds of the transfers of a cut before each layer, there and back."""
        num_layers = len(self.profile.layers)
        seconds = [
            2 * self.latency + self.crossing_bytes(cut) / self._bandwidth
            for cut in range(1, num_layers)
        ]
        return np.pad(np.array(seconds, float), 1)

    def crossing_bytes(self, cut: int) -> int:
        """The bytes that cross a cut before a layer, there and back."""
        layer = self.profile.layers[cut - 1]
        # (source, name) -> bytes: an array that several later layers read crosses once.
        skip_bytes: dict[tuple[int, str], int] = {}
        for skip in self.profile.skips:
            is_layer_output = skip.is_output and skip.source == cut - 1
            if skip.source < cut <= skip.target and not is_layer_output:
                key = skip.source, skip.name
                skip_bytes[key] = skip.bytes + skip.cotangent_bytes
        return layer.output_bytes + layer.cotangent_bytes + sum(skip_bytes.values())

    @property
    def _bandwidth(self) -> float:
        return math.inf if self.bandwidth is None else self.bandwidth

    def _exchange_seconds(self, num_bytes: Any, replicas: int) -> Any:
        """The seconds in which the devices of a stage get parameters and add gradients.

        The first of them sends its parameters to each other one, and is sent a sum of
        gradients by each.
        """
        if replicas == 1:
            return 0.0 * num_bytes
        hops = 2 * (replicas - 1)
        return hops * num_bytes / self._bandwidth + 2 * self.latency

    def count_bytes(self, stages: Sequence[StageReplicas]) -> list[float]:
        """The bytes of each rank as the search counts them."""
        counted: list[float] = []
        num_devices = sum(stage.replicas for stage in stages)
        for begin, end, replicas in stages:
            in_flight = self.count_in_flight(num_devices, replicas)
            counted += [float(self.bytes_of(in_flight)[begin, end])] * replicas
            num_devices -= replicas
        return counted

    def least_seconds(self, stages: Sequence[StageReplicas]) -> float:
        """A lower bound on a step: the device that has most to do, alone."""
        return max(
            math.ceil(self.num_microbatches / stage.replicas)
            * self.times[stage.begin, stage.end].item()
            for stage in stages
        )

    def simulate(self, stages: tuple[StageReplicas, ...]) -> SimulatedStages:
        """Simulates a step of these stages."""
        profile = self.profile
        schedule = replicated(
            [stage.replicas for stage in stages], self.num_microbatches
        )
        costs = profile.costs(
            [stage.end - stage.begin for stage in stages],
            remat=self.remat,
            bandwidth=self.bandwidth,
            latency=self.latency,
            overlap=True,
        )
        exchange = [
            float(self._exchange_seconds(num_bytes, stage.replicas))
            for stage, num_bytes in zip(stages, costs.accumulator_bytes, strict=True)
        ]
        costs = fused_costs(
            dataclasses.replace(costs, exchange=exchange),
            schedule,
            is_last_recomputed=stores_only_inputs(self.remat),
            action_seconds=profile.action_seconds,
        )
        timeline = schedule.simulate(costs)
        memory: list[Memory] = []
        peaks = iter(timeline.peak_bytes)
        for index, stage in enumerate(stages):
            parameters = int(costs.parameter_bytes[index])
            gradients = int(costs.accumulator_bytes[index])
            workspace = int(self._workspace[stage.begin, stage.end])
            is_last = index == len(stages) - 1
            if is_last or stores_only_inputs(self.remat):
                # One program runs forward and backward: it holds the residuals itself.
                mode = self.stage_costs.pending_mode(self.remat)
                residuals = self.stage_costs.residual_bytes[mode]
                workspace += int(residuals[stage.begin, stage.end])
            for peak in itertools.islice(peaks, stage.replicas):
                memory.append(
                    Memory(
                        parameters=parameters,
                        gradients=gradients,
                        optimizer=0,
                        activations=int(peak) - parameters - gradients,
                        workspace=workspace,
                    )
                )
        return SimulatedStages(timeline.makespan, stages, tuple(memory), costs)

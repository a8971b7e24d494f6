"""In how many stages functions are divided, and where and when these run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._functions import _remat
from .._layers._stage import StageFunction
from .._run._pipe import Pipe
from ..schedules._choose import choose_schedule
from . import _cut
from ._program import Traced


@dataclass
class Division:
    """In how many stages functions are divided, where these run, and when.

    Attributes:
      num_microbatches: how many there are.
      num_stages: how many stages; ``None``: as many as marks say, or devices are.
      devices: one for each rank.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      is_lasting: whether all functions are divided as the first one is, so that their
        parameters stay where they are.
      first: that one, where it is divided, and the stage of each of its parameters.
    """

    num_microbatches: int
    num_stages: int | None
    devices: Sequence[Any]
    schedule: Any
    remat: Any
    is_lasting: bool = False
    first: tuple[Traced, list[int], list[int]] | None = field(default=None, init=False)

    def cuts(
        self, programs: Mapping[int, Traced], num_shared: int | None
    ) -> dict[int, Any]:
        """Where programs are divided, by the sizes of their micro-batches.

        Args:
          programs: by these sizes.
          num_shared: how many of their parameters the first one has; ``None``: all.
        """
        if self.first is None:
            program = next(iter(programs.values()))
            cuts = _cut.positions(program, self.num_stages, len(self.devices))
        else:
            program, cuts, _ = self.first
        num_shared = program.num_params if num_shared is None else num_shared
        return {
            n: cuts
            if one is program
            else _cut.same_cuts(program, cuts, one, num_shared)
            for n, one in programs.items()
        }

    def pipe(self, count: int) -> Pipe:
        """The schedule and the devices of so many stages."""
        schedule = choose_schedule(self.schedule, count, self.num_microbatches)
        functions = tuple(StageFunction(s, s, ()) for s in range(count))
        ranks = schedule.num_ranks
        if len(self.devices) < ranks:
            have = len(self.devices)
            raise ValueError(
                f"{ranks} ranks need {ranks} devices, there are {have}; give "
                f"num_stages={have}, or let a device serve several stages: "
                f"devices=({ranks} * jax.devices())[:{ranks}]"
            )
        used = tuple(self.devices[:ranks])
        return Pipe(functions, used, schedule, _remat.per_stage(self.remat, count))

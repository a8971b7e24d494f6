"""In how many stages functions are divided, and where and when these run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax

from .._functions import _remat
from .._instructions._transfer import OnPaper
from .._layers._stage import StageLayers
from .._messages import WarnOnce
from .._run._param_sharding import Rule
from .._run._pipe import Pipe, idle
from ..schedules import Schedule
from ..schedules._choose import choose_schedule, turns
from . import _cut, _marks
from ._cuts import Cuts
from ._program import Traced

PyTree = Any
# Of each parameter its shape.
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Division:
    """In how many stages functions are divided, where these run, and when.

    Attributes:
      num_microbatches: how many there are.
      num_stages: how many stages; ``None``: as many as marks make, or devices are.
      devices: those that there are, one for each rank.
      choose: gives those that a schedule takes.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      replicas: as for `jpipe.pipeline`.
      rule: of parameters' sharding, where stages have several devices.
      gather: as for `jpipe.pipeline`.
      is_lasting: whether all functions are divided as the first one is, so that their
        parameters stay where they are.
      cuts: where that is, once it is known.
      planned_shapes: those of the parameters that a plan is of, if it has any.
      owner_stages: of each of their parameters, likewise.
      warnings: of all that is built in these stages.
    """

    num_microbatches: int
    num_stages: int | None
    devices: Sequence[Any]
    choose: Callable[[Schedule], tuple[Any, ...]]
    schedule: Any
    remat: Any
    replicas: Sequence[int] | None = None
    rule: Rule | None = None
    gather: str = "step"
    is_lasting: bool = False
    cuts: Cuts | None = None
    planned_shapes: Shapes | None = None
    owner_stages: Sequence[int] | None = field(default=None, init=False)
    warnings: WarnOnce = field(init=False)
    # Whether equations move to where they are first read.
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.warnings = _warnings(self.devices)

    def owners(self, specs: PyTree) -> Sequence[int] | None:
        """The owner stages of parameters, once these are known."""
        del specs
        return self.owner_stages

    def note(self, owner_stages: Sequence[int]) -> None:
        """Keeps the owner stages of one function for all others."""
        if self.is_lasting:
            self.owner_stages = owner_stages

    @property
    def count(self) -> int | None:
        """In how many stages, once it is known."""
        return len(self.cuts.positions) + 1 if self.cuts else self.num_stages

    @property
    def about(self) -> int:
        """In how many stages, where no marks decide it."""
        if self.cuts is not None:
            return self.cuts.about
        return self.num_stages or len(self.replicas or self.devices)

    def positions(
        self, programs: Mapping[int, Traced], num_params: int
    ) -> tuple[Cuts, dict[int, list[int]]]:
        """Where programs are divided; and by the sizes of their micro-batches.

        Args:
          programs: by these sizes.
          num_params: how many of their parameters all functions have.

        Raises:
          ValueError: if a plan is of a function of other parameters.
        """
        cuts, (size, first) = self.cuts, next(iter(programs.items()))
        if cuts is None:
            found = _cut.positions(first, self.num_stages, self.about, self.warnings)
            cuts = Cuts.of(first, found, num_params, self.about)
        if cuts.positions and len(cuts.totals) != num_params:
            raise ValueError(
                f"plan: it is of a model or function of {len(cuts.totals)} arrays of "
                f"parameters and state, and this one has {num_params}; make a plan of "
                f"this one, by jpipe.plan"
            )
        if self.is_lasting:
            self.cuts = cuts
        found = {size: cuts.on(first)}
        # Programs of other sizes are more like the first one than what was cut before.
        alike = Cuts.of(first, found[size], num_params, self.about)
        return cuts, {n: found.get(n) or alike.on(one) for n, one in programs.items()}

    def pipe(self, count: int, stages: Sequence[StageLayers] = ()) -> Pipe:
        """The schedule and the devices of so many stages.

        Args:
          count: how many.
          stages: they, of a list of layers.
        """
        schedule, number = self.schedule, self.num_microbatches
        if self.replicas is not None:
            schedule = turns(self.replicas, schedule, count, number)
        schedule = choose_schedule(schedule, count, number)
        functions = tuple(stages or (StageLayers(s, s, ()) for s in range(count)))
        ranks, remat = self.choose(schedule), _remat.per_stage(self.remat, count)
        return Pipe(functions, ranks, schedule, remat, self.rule, self.gather)

    @property
    def places(self) -> tuple[Any, ...]:
        """Each once; of several processes with one of each."""
        found = dict.fromkeys(self.devices)
        return (*found, *idle(found))

    @property
    def num_parts(self) -> int:
        """How many micro-batches there are, of all shards together."""
        return self.num_microbatches * self.num_shards

    @property
    def num_shards(self) -> int:
        """Over how many devices the examples of a micro-batch are spread."""
        return getattr(self.devices[0], "num_shards", 1)


class ByLayer:
    """The division of a list of layers, which its user decided.

    Args:
      pipe: the stages, and where they run.
      planned_shapes: those of the parameters that a plan is of, if it has any.
    """

    moves, cuts = False, None
    # A `jax.checkpoint` in a layer stays as it is.
    about = 1

    def __init__(self, pipe: Pipe, planned_shapes: Shapes | None = None) -> None:
        self._pipe, self.devices, self.places = pipe, pipe.devices, pipe.places
        self.planned_shapes = planned_shapes
        self.warnings = _warnings(pipe.devices)
        self.num_shards = pipe.num_shards
        self.num_microbatches = pipe.schedule.num_microbatches
        self.count = len(pipe.stages)

    def owners(self, specs: PyTree) -> list[int]:
        """The owner stages of variables, one entry per layer."""
        pairs = zip(self._pipe.stage_of_layer, specs, strict=True)
        return [stage for stage, entry in pairs for _ in jax.tree.leaves(entry)]

    def note(self, owner_stages: Sequence[int]) -> None:
        """Nothing: they are known."""

    def positions(
        self, programs: Mapping[int, Traced], num_params: int
    ) -> tuple[None, dict[int, list[int]]]:
        """Where programs are divided: see `Division.positions`."""
        del num_params
        ends = {size: _marks.ends(one.closed) for size, one in programs.items()}
        inner = range(len(self._pipe.stages) - 1)
        return None, {size: [at[s] for s in inner] for size, at in ends.items()}

    def pipe(self, count: int) -> Pipe:
        """The schedule and the devices of its stages."""
        del count
        return self._pipe


def _warnings(devices: Sequence[Any]) -> WarnOnce:
    return WarnOnce(is_muted=any(isinstance(device, OnPaper) for device in devices))

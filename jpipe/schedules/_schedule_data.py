"""The fields of a schedule, from which its simulation and its timeline are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ._action import Action
from ._placement import find_ranks, list_ranks


@dataclass(frozen=True)
class ScheduleData:
    """The actions of every rank, in order; for the attributes see `Schedule`."""

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def rank_of(self) -> Mapping[int, Sequence[int]]:
        """For each micro-batch the rank of each stage."""
        return find_ranks(self.placement, self.rows, self.replicas)

    @property
    def ranks_of(self) -> Sequence[Sequence[int]]:
        """All ranks of each stage."""
        return list_ranks(self.placement, self.replicas)

"""Ratios of the time that actions take in a step to that of each by itself.

Devices may slow each other down: they share memory, and some also cores. How much
depends on the number of micro-batches, and of stages on a rank, more than on the
operations of a schedule (benchmarks/results/planning.md).
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class StepKind(NamedTuple):
    """A kind of steps.

    Attributes:
      num_microbatches: the number of micro-batches.
      num_shards: the number of devices that share a micro-batch.
      num_ranks: the number of ranks.
      num_stages: the number of stages.
    """

    num_microbatches: int
    num_shards: int
    num_ranks: int
    num_stages: int

    @property
    def has_one_device(self) -> bool:
        """True if no other device may slow it down."""
        return self.num_ranks * self.num_shards == 1


@dataclass(frozen=True)
class Slowdowns:
    """Ratios of the time of actions in steps of several devices to that by themselves.

    Attributes:
      by_size: numbers of micro-batches, of devices that share one and of stages on a
        rank -> the median of steps that ran.
      by_num_shards: number of devices that share a micro-batch -> likewise.
    """

    by_size: Mapping[tuple[int, int, float], float] = field(default_factory=dict)
    by_num_shards: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[StepKind, float]]) -> "Slowdowns":
        """The slowdowns of steps, each with its ratio."""
        by_size = defaultdict[tuple[int, int, float], list[float]](list)
        by_num_shards = defaultdict[int, list[float]](list)
        for step_kind, ratio in steps:
            if not step_kind.has_one_device:
                by_size[_size(step_kind)].append(ratio)
                by_num_shards[step_kind.num_shards].append(ratio)
        return cls(
            {size: statistics.median(ratios) for size, ratios in by_size.items()},
            {count: statistics.median(x) for count, x in by_num_shards.items()},
        )

    def predict(self, step_kind: StepKind) -> float:
        """The ratio of steps of a kind.

        It is that of its size, if one ran; else that of all in which as many devices
        share a micro-batch; 1 if none did.
        """
        if step_kind.has_one_device:
            return 1.0
        ratio_of_all = self.by_num_shards.get(step_kind.num_shards, 1.0)
        return self.by_size.get(_size(step_kind), ratio_of_all)


def _size(step_kind: StepKind) -> tuple[int, int, float]:
    chunks = step_kind.num_stages / step_kind.num_ranks
    return step_kind.num_microbatches, step_kind.num_shards, chunks

"""How many times as long actions take in a step as each by itself.

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
    """How many times as long actions take in steps of several devices.

    Attributes:
      by_size: numbers of micro-batches, of devices that share one and of stages on a
        rank -> the median of steps that ran.
      by_num_shards: number of devices that share a micro-batch -> likewise.
    """

    by_size: Mapping[tuple[int, int, float], float] = field(default_factory=dict)
    by_num_shards: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[StepKind, float]]) -> "Slowdowns":
        """Those of steps, each with how many times as long it took."""
        by_size = defaultdict[tuple[int, int, float], list[float]](list)
        by_num_shards = defaultdict[int, list[float]](list)
        for kind, ratio in steps:
            if not kind.has_one_device:
                by_size[_size(kind)].append(ratio)
                by_num_shards[kind.num_shards].append(ratio)
        return cls(
            {size: statistics.median(ratios) for size, ratios in by_size.items()},
            {count: statistics.median(x) for count, x in by_num_shards.items()},
        )

    def predict(self, kind: StepKind) -> float:
        """How many times as long actions take in steps of a kind.

        By those of its size, if one ran; else by all in which as many devices share a
        micro-batch; 1 if none did.
        """
        if kind.has_one_device:
            return 1.0
        known = self.by_num_shards.get(kind.num_shards, 1.0)
        return self.by_size.get(_size(kind), known)


def _size(kind: StepKind) -> tuple[int, int, float]:
    return kind.num_microbatches, kind.num_shards, kind.num_stages / kind.num_ranks

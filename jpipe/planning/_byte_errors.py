"""Errors of forecasts of bytes, and what others of their kind should lack.

The forecasts of schedules that have as many stages on a rank, and the same operations
(forwards, backwards, halves of these), err alike; with another number of micro-batches
by bytes in proportion to their size.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..schedules import Schedule


class _Kind(NamedTuple):
    """A kind of schedules.

    Attributes:
      num_chunks: the number of stages on a rank.
      ops: the operations of its actions.
    """

    num_chunks: float
    ops: frozenset[str]


@dataclass(frozen=True)
class ByteErrors:
    """The bytes that forecasts lacked; less than 0 where they had too many.

    Attributes:
      lacking: kind of schedules -> number of shards of all micro-batches -> bytes of
        the device that needs most.
    """

    lacking: Mapping[_Kind, Mapping[int, int]] = field(default_factory=dict)

    def knows(self, schedule: Schedule) -> bool:
        """True if an error of its kind is known."""
        return _kind_of(schedule) in self.lacking

    def predict(self, schedule: Schedule, num_shards: int) -> int:
        """The bytes that a forecast should lack; 0 if none of its kind is known."""
        if not self.lacking:  # saves a look at all actions
            return 0
        by_count = self.lacking.get(_kind_of(schedule), {})
        if not by_count:
            return 0
        count = schedule.num_microbatches * num_shards
        nearest = min(by_count, key=lambda x: max(x, count) / min(x, count))
        num_bytes = by_count[nearest]
        in_proportion = num_bytes * nearest // count
        # What is left of too many may be less than that.
        return max(in_proportion, num_bytes) if num_bytes < 0 else in_proportion

    def noted(
        self, schedule: Schedule, num_shards: int, num_bytes: int
    ) -> "ByteErrors":
        """The errors with that of one more forecast.

        Args:
          schedule: its schedule.
          num_shards: the number of devices that share a micro-batch.
          num_bytes: the bytes that it lacked besides those that were predicted.
        """
        schedule_kind = _kind_of(schedule)
        count = schedule.num_microbatches * num_shards
        num_bytes += self.predict(schedule, num_shards)
        by_count = {**self.lacking.get(schedule_kind, {}), count: num_bytes}
        lacking = {**self.lacking, schedule_kind: by_count}
        return dataclasses.replace(self, lacking=lacking)


def _kind_of(schedule: Schedule) -> _Kind:
    actions = itertools.chain.from_iterable(schedule.rows)
    return _Kind(
        num_chunks=schedule.num_stages / schedule.num_ranks,
        ops=frozenset(action.op for action in actions),
    )

"""The builders of the schedules of the literature, by name."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._action import FORWARD
from ._blocks import one_f_one_b_v, v_half, v_min
from ._flush import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    gpipe_last_one_f_one_b,
    one_f_one_b,
)
from ._looped import interleaved, interleaved_zb, looped_bfs
from ._placement import place_in_line, place_in_loop, place_in_v
from ._schedule import Schedule, ScheduleBuilder
from ._zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v


@dataclass(frozen=True)
class CatalogueEntry:
    """A schedule of the catalogue, and what is known of it before it is built.

    Attributes:
      build: ``(num_ranks, num_microbatches) -> schedule``.
      place: ``num_ranks -> ranks`` of the stages.
      split_share: the share of the backwards of any stage that run in halves; ``None``
        if it depends on the stage.
    """

    build: ScheduleBuilder
    place: Callable[[int], tuple[int, ...]]
    split_share: float | None = 0.0

    @property
    def num_chunks(self) -> int:
        """The number of stages of each rank."""
        return len(self.place(1))

    @property
    def family(self) -> tuple[int, bool]:
        """The stages of each rank, and True if backwards run in halves."""
        return self.num_chunks, self.split_share != 0

    def outline(
        self, num_ranks: int, num_microbatches: int
    ) -> tuple[tuple[int, ...], float | None]:
        """The rank of each stage, and the share of backwards that run in halves."""
        return self.place(num_ranks), self.split_share


_place_in_two_rounds = functools.partial(place_in_loop, num_chunks=2)

CATALOGUE = {
    "gpipe": CatalogueEntry(gpipe, place_in_line),
    "gpipe_last_1f1b": CatalogueEntry(gpipe_last_one_f_one_b, place_in_line),
    "1f1b": CatalogueEntry(one_f_one_b, place_in_line),
    "eager_1f1b": CatalogueEntry(eager_one_f_one_b, place_in_line),
    "interleaved": CatalogueEntry(interleaved, _place_in_two_rounds),
    "interleaved_zb": CatalogueEntry(
        interleaved_zb, _place_in_two_rounds, split_share=1.0
    ),
    "looped_bfs": CatalogueEntry(looped_bfs, _place_in_two_rounds),
    "zb_h1": CatalogueEntry(zb_h1, place_in_line, split_share=1.0),
    "zb_h2": CatalogueEntry(zb_h2, place_in_line, split_share=1.0),
    "zb_v": CatalogueEntry(zb_v, place_in_v, split_share=1.0),
    "v_half": CatalogueEntry(v_half, place_in_v, split_share=1.0),
    "v_min": CatalogueEntry(v_min, place_in_v, split_share=1.0),
    "1f1b_v": CatalogueEntry(one_f_one_b_v, place_in_v),
    "dualpipe_v": CatalogueEntry(dualpipe_v, place_in_v, split_share=None),
    "forward_only": CatalogueEntry(forward_only, place_in_line),
}
BY_NAME: dict[str, ScheduleBuilder] = {
    name: entry.build for name, entry in CATALOGUE.items()
}
TRAINING = tuple(name for name in BY_NAME if name != "forward_only")
# Those of them in which each rank runs all forwards first.
FORWARDS_FIRST = ("gpipe", "looped_bfs")


def runs_forwards_first(schedule: Schedule) -> bool:
    """True if each backward follows all forwards of its rank.

    Example:
      >>> [runs_forwards_first(build(2, 4)) for build in (gpipe, one_f_one_b)]
      [True, False]
    """
    for row in schedule.rows:
        is_forward = [action.op == FORWARD for action in row]
        if is_forward != sorted(is_forward, reverse=True):
            return False
    return True


def named(name: str) -> ScheduleBuilder:
    """The builder of that name.

    Args:
      name: a key of `BY_NAME`, or the name of a builder function, such as
        ``"one_f_one_b"``.

    Returns:
      The builder.

    Raises:
      ValueError: if the name is unknown; the message lists all names.

    Example:
      >>> named("zb_v")(4, 8).num_stages
      8
    """
    key = find_catalogue_key(name)
    if key is None:
        raise ValueError(
            f"unknown schedule {name!r}: choose {', '.join(map(repr, BY_NAME))}, a "
            f"builder of jpipe.schedules or a Schedule"
        )
    return BY_NAME[key]


def find_catalogue_key(schedule: Any) -> str | None:
    """The key of a builder in `BY_NAME`; ``None`` if it is not there.

    Args:
      schedule: the key, the name of the builder function, or the function.
    """
    builder = schedule
    if isinstance(schedule, str):
        builder = BY_NAME.get(schedule.replace("one_f_one_b", "1f1b"))
    return next((key for key, value in BY_NAME.items() if value is builder), None)

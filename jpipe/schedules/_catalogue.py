"""The builders, by name."""

from typing import Any

from ._blocks import one_f_one_b_v, v_half, v_min
from ._flush import (
    eager_one_f_one_b,
    forward_only,
    gpipe,
    gpipe_last_one_f_one_b,
    one_f_one_b,
)
from ._looped import interleaved, interleaved_zb, looped_bfs
from ._schedule import ScheduleBuilder
from ._zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

BY_NAME: dict[str, ScheduleBuilder] = {
    "gpipe": gpipe,
    "gpipe_last_1f1b": gpipe_last_one_f_one_b,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "interleaved_zb": interleaved_zb,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "1f1b_v": one_f_one_b_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}


def named(name: str) -> ScheduleBuilder:
    """The builder of that name.

    Args:
      name: of the catalogue, or of a function of it.

    Returns:
      The builder.

    Raises:
      ValueError: if there is none; the message lists those that there are.

    Example:
      >>> named("zb_v")(4, 8).num_stages
      8
    """
    if (key := key_of(name)) is None:
        raise ValueError(
            f"unknown schedule {name!r}: choose {', '.join(map(repr, BY_NAME))}, a "
            f"builder of jpipe.schedules or a Schedule"
        )
    return BY_NAME[key]


def key_of(schedule: Any) -> str | None:
    """The name by which the catalogue has a schedule; ``None`` if it has not.

    Args:
      schedule: its name, that of its function, or the function.
    """
    if isinstance(schedule, str):
        schedule = BY_NAME.get(schedule.replace("one_f_one_b", "1f1b"), schedule)
    return next((key for key, made in BY_NAME.items() if made is schedule), None)

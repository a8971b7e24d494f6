"""The builders of the schedules of the literature, by name."""

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
from ._schedule import Schedule, ScheduleBuilder
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
# The schedules of training in which each rank runs all forwards first.
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

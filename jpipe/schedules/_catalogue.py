"""The builders, by name."""

from ._flush import eager_one_f_one_b, forward_only, gpipe, one_f_one_b
from ._looped import interleaved, looped_bfs
from ._schedule import ScheduleBuilder
from ._zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v

BY_NAME: dict[str, ScheduleBuilder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "forward_only": forward_only,
}


def named(name: str) -> ScheduleBuilder:
    """The builder of that name; that of the function is understood too.

    Raises:
      ValueError: if there is none; the message lists those that there are.
    """
    key = name.replace("one_f_one_b", "1f1b")
    if key not in BY_NAME:
        raise ValueError(
            f"unknown schedule {name!r}: choose {', '.join(map(repr, BY_NAME))}, a "
            f"builder of jpipe.schedules or a Schedule"
        )
    return BY_NAME[key]
